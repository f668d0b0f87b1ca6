"""A range of shards that will be added to a group, and its entry in the group's ``RANGES``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sharded_orm.topology.document import Document


@dataclass(frozen=True)
class NewRange:
    """A range of shards that will be added to a group.

    :param first: the number of the range's first shard; ``last`` is the number of its last shard.
    :param primary: the node of the shards.
    :param replica: the node of their copies; None for no copies.
    :param is_pair: whether the two nodes are a pair of servers that replicate from each other. If
        so, the first half of the shards is active on ``primary``, the second half on ``replica``.
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
    is_pair: bool = False

    def __str__(self) -> str:
        return f"{self.group} {self.first}-{self.last}"

    def entries(self, *, is_open: bool) -> list[dict[str, Any]]:
        """Return the entries of this range for ``RANGES``. A range on a pair has two, one for each
        active side; any other range has one.

        :param is_open: whether the range takes new keys.
        """
        more: dict[str, Any] = {} if self.weight == 1 else {"weight": self.weight}
        if not is_open:
            more["open"] = False
        if not self.is_pair:
            replica = {} if self.replica is None else {"replica": self.replica}
            span = [self.first, self.last]
            return [{"range": span, "primary": self.primary, **replica, **more}]
        nodes = [self.primary, self.replica]
        middle = (self.first + self.last) // 2
        return [
            {"range": [first, last], "pair": nodes, "active": active, **more}
            for first, last, active in (
                (self.first, middle, self.primary),
                (middle + 1, self.last, self.replica),
            )
            if first <= last
        ]

    def entries_in(self, document: Document) -> list[dict[str, Any]]:
        """Return the entries of this range in ``document``; empty if ``document`` lacks the range."""
        entries = [
            dict(entry)
            for entry in document.groups.get(self.group, {}).get("RANGES", ())
            if self.first <= entry["range"][0] and entry["range"][1] <= self.last
        ]
        shards = sum(entry["range"][1] - entry["range"][0] + 1 for entry in entries)
        return entries if shards == self.last - self.first + 1 else []
