"""The abstract base class of id generators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class IdGenerator(ABC):
    """A generator of 64-bit ids. No two calls return the same id of a sequence. Thread-safe.

    A sequence is a named series of ids, such as the ids of one model.
    """

    def next(self, sequence: str) -> int:
        """Return a new id of the sequence named ``sequence``. Costs at most one round trip."""
        return self.take(sequence, 1)[0]

    @abstractmethod
    def take(self, sequence: str, count: int) -> Sequence[int]:
        """Return ``count`` new ids of the sequence named ``sequence``, in ascending order.

        Costs one round trip for any ``count``.
        """
