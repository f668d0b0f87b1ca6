"""The range of shards that a group is to have, and its entry in ``RANGES``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharded_orm.topology.document import Document


@dataclass(frozen=True)
class NewRange:
    """A range that a group is to have.

    :param bounds: for a range group with ``BOUNDS``, the lower bound of each new shard.
    """

    group: str
    first: int
    last: int
    primary: str
    replica: str | None = None
    weight: float = 1
    bounds: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.group} {self.first}-{self.last}"

    def entry(self, *, is_open: bool) -> dict[str, Any]:
        """The range as ``RANGES`` lists it."""
        entry: dict[str, Any] = {"range": [self.first, self.last], "primary": self.primary}
        if self.replica is not None:
            entry["replica"] = self.replica
        if self.weight != 1:
            entry["weight"] = self.weight
        return entry if is_open else {**entry, "open": False}

    def entry_in(self, document: Document) -> Mapping[str, Any] | None:
        """The entry of this range in a topology document; None if the document lacks the range."""
        for entry in document.groups.get(self.group, {}).get("RANGES", ()):
            if tuple(entry["range"]) == (self.first, self.last):
                return dict(entry)
        return None
