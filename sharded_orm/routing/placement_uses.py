"""The placements (shards of keys) on which an operation relies, and whether they still hold.

An operation looks keys up, sends its statements, and then asks whether the keys are still where they
were. The routing strategy records each key that it looks up in the context of the operation, so the
code in between need not pass the keys on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from sharded_orm.topology.model import ShardGroup


class KnownPlacement(NamedTuple):
    """The shard of a key, as the directory has said."""

    shard: int
    #: Counts the moves of the key: the number of its last move, 0 if it has never moved.
    version: int
    #: The number of the poll of the lease during which the directory was asked; 0 without a lease.
    poll: int


class PlacementSource(Protocol):
    """A routing strategy whose keys may move."""

    @property
    def group(self) -> ShardGroup:
        """The group whose keys it places. Two groups may store the same text for different keys."""

    def holds(self, placements: Mapping[str, KnownPlacement]) -> bool:
        """Whether all keys have been on the same shards since the placements were looked up.

        :param placements: by the text under which the directory stores the key.
        """


class WatchedMoves(Protocol):
    """The moves on which a statement for several shards relies."""

    def holds(self) -> bool:
        """Whether none of them has disturbed the statement."""


class PlacementUses:
    """The placements on which one operation relies. Used by one thread at a time.

    :param writes: whether the operation writes. If so, no statement of it is sent that relies on a
        former placement.
    """

    def __init__(self, *, writes: bool = False) -> None:
        self.writes = writes
        self.placements: dict[PlacementSource, dict[str, KnownPlacement]] = {}
        self._changed = False
        self._watched: list[WatchedMoves] = []

    def record(self, source: PlacementSource, key: str, placement: KnownPlacement) -> None:
        placements = self.placements.setdefault(source, {})
        known = placements.setdefault(key, placement)
        # If the key has moved since the operation began, a part of the operation relies on the old
        # shard. If only the poll is a later one, keep the earlier poll, which is the stricter one.
        if known[:2] != placement[:2]:
            self._changed = True

    def watch(self, moves: WatchedMoves) -> None:
        """Rely on ``moves`` of a statement for several shards, too."""
        self._watched.append(moves)

    def placement(self, source: PlacementSource, key: str) -> KnownPlacement | None:
        """Return the placement of ``key`` on which the operation relies; None if there is none."""
        return self.placements.get(source, {}).get(key)

    def hold(self) -> bool:
        """Whether all keys are still where they were. No query, unless a key is in flight or the
        lease is over; then one query per group and 500 keys.
        """
        return (
            not self._changed
            and all(source.holds(placements) for source, placements in self.placements.items())
            and all(moves.holds() for moves in self._watched)
        )


_uses: ContextVar[PlacementUses | None] = ContextVar("sharded_orm_placement_uses", default=None)


def current_uses() -> PlacementUses | None:
    """Return the placements of the running operation; None outside of operations."""
    return _uses.get()


@contextmanager
def recorded_uses(uses: PlacementUses) -> Iterator[PlacementUses]:
    """Within the ``with`` block, record in ``uses`` the placements that are looked up in this
    context.
    """
    token = _uses.set(uses)
    try:
        yield uses
    finally:
        _uses.reset(token)
