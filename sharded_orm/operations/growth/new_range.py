"""A range of shards that will be added to a group, and its entry in the group's ``RANGES``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharded_orm.topology.document import Document


@dataclass(frozen=True)
class NewRange:
    """A range of shards that will be added to a group.

    :param first: the number of the range's first shard; ``last`` is the number of its last shard.
    :param primary: the node of the shards.
    :param replica: the node of their copies; None for no copies.
    :param weight: how often a shard of the range gets a new key, relative to other ranges' weights.
    :param bounds: if the group has ``BOUNDS``, the lowest key of each new shard; otherwise empty.
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
        """Return the range's entry for ``RANGES``.

        :param is_open: whether the range takes new keys.
        """
        entry: dict[str, Any] = {"range": [self.first, self.last], "primary": self.primary}
        if self.replica is not None:
            entry["replica"] = self.replica
        if self.weight != 1:
            entry["weight"] = self.weight
        return entry if is_open else {**entry, "open": False}

    def entry_in(self, document: Document) -> Mapping[str, Any] | None:
        """Return the entry of this range in ``document``; None if ``document`` lacks the range."""
        for entry in document.groups.get(self.group, {}).get("RANGES", ()):
            if tuple(entry["range"]) == (self.first, self.last):
                return dict(entry)
        return None
