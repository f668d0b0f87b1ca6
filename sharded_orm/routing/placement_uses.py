"""The placements (shards of keys) on which an operation relies, and whether they are still true.

An operation looks keys up, sends its statements, and then checks whether the keys are still on the
same shards. The routing strategy records each key that it looks up in the context of the operation.
So the code in between need not pass the keys on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from sharded_orm.topology.model import ShardGroup


class KnownPlacement(NamedTuple):
    """The shard of a key, as the directory has answered."""

    shard: int
    #: The number of the last move of the key; 0 if the key has never moved.
    version: int
    #: The number of the poll under whose lease the directory was asked; 0 without a lease.
    poll: int


class PlacementSource(Protocol):
    """A routing strategy whose keys may move."""

    @property
    def group(self) -> ShardGroup:
        """The group whose keys the strategy places.

        Two groups may store the same text for different keys.
        """

    def holds(self, placements: Mapping[str, KnownPlacement]) -> bool:
        """Whether all keys have been on the same shards since the placements were looked up.

        :param placements: by the text under which the directory stores the key.
        """


class WatchedMoves(Protocol):
    """What a statement for several shards knew of moves, to be checked at its end."""

    def holds(self) -> bool:
        """Whether no move has disturbed the statement."""


class PlacementUses:
    """The placements on which one operation relies. Used by one thread at a time.

    :param writes: whether the operation writes. If so, it sends no statement that relies on an
        outdated placement.
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
        # shard. If only the poll differs, keep the earlier poll, because to hold since then is the
        # stricter condition.
        if known[:2] != placement[:2]:
            self._changed = True

    def watch(self, moves: WatchedMoves) -> None:
        """Also rely on ``moves``, what a statement for several shards knew of moves."""
        self._watched.append(moves)

    def placement(self, source: PlacementSource, key: str) -> KnownPlacement | None:
        """Return the placement of ``key`` on which the operation relies; None if there is none."""
        return self.placements.get(source, {}).get(key)

    def hold(self) -> bool:
        """Whether all keys that the operation uses are still on the same shards.

        Sends no query, unless a key is in flight or the lease is over. Then it sends one query per
        group and 500 keys.
        """
        if self._changed:
            return False
        # No generator, because each write and read comes here. Hardly one has watched moves.
        for source, placements in self.placements.items():
            if not source.holds(placements):
                return False
        return not self._watched or all(moves.holds() for moves in self._watched)


_uses: ContextVar[PlacementUses | None] = ContextVar("sharded_orm_placement_uses", default=None)


def current_uses() -> PlacementUses | None:
    """Return the record of placements of the current operation; None outside of operations."""
    return _uses.get()


class recorded_uses:
    """Within the ``with`` block, record in ``uses`` the placements that are looked up in this
    context.

    A class, because a generator takes three times as long, and each write and read comes here.
    """

    __slots__ = ("_token", "_uses")

    def __init__(self, uses: PlacementUses) -> None:
        self._uses = uses

    def __enter__(self) -> PlacementUses:
        self._token = _uses.set(self._uses)
        return self._uses

    def __exit__(self, *exc_info: object) -> None:
        _uses.reset(self._token)
