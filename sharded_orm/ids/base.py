"""The contract of an id generator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class IdGenerator(ABC):
    """Hands out 64-bit ids, each only once. Thread-safe."""

    def next(self, sequence: str) -> int:
        """One id of ``sequence``; one round trip."""
        return self.take(sequence, 1)[0]

    @abstractmethod
    def take(self, sequence: str, count: int) -> Sequence[int]:
        """``count`` ids of ``sequence``, ascending; one round trip for any ``count``."""
