"""The placements (shards of keys) on which an operation relies, and whether they are still correct.

An operation, such as a query, looks up the shards of its keys, sends its statements, and then
checks whether the keys are still on these shards, because a key may have moved meanwhile. The
routing strategy records each key that it looks up in a context variable, so that keys need not be
passed through all functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from sharded_orm.topology.model import ShardGroup


class KnownPlacement(NamedTuple):
    """The shard of a key, as read from the directory (the table with the shard of each key)."""

    shard: int
    #: The number of the last move of the key; 0 if the key has never moved.
    version: int
    #: The number of the poll whose lease was valid when the key was looked up in the directory; 0
    #: without a lease. A poll is a query that asks which keys are moving. Its answer gives the
    #: process a lease, which allows it to remember the shards of keys for some seconds.
    poll: int


class PlacementSource(Protocol):
    """A routing strategy whose keys may move to another shard while the site runs."""

    @property
    def group(self) -> ShardGroup:
        """The group whose keys the strategy places.

        Keys of two groups may have the same text, so a key is identified by its group and its text.
        """

    def holds(self, placements: Mapping[str, KnownPlacement]) -> bool:
        """Whether all keys have stayed on the same shards since they were looked up.

        :param placements: maps each key, as the text under which the directory stores it, to the
            placement (shard) that was found for the key.
        """


class WatchedMoves(Protocol):
    """The key moves that were known when a statement for several shards began.

    At the end of the statement, they are compared with the moves that are known then. A move in
    between may have changed the result.
    """

    def holds(self) -> bool:
        """Whether the result of the statement is still correct: no move of a key has changed it."""


class PlacementUses:
    """Records the placements (shards of keys) on which an operation relies.

    Used by one thread at a time.

    :param writes: whether the operation writes. The placements of an operation that writes are checked
        before each statement, and an outdated placement is an error.
    """

    def __init__(self, *, writes: bool = False) -> None:
        self.writes = writes
        self.placements: dict[PlacementSource, dict[str, KnownPlacement]] = {}
        self._changed = False
        self._watched: list[WatchedMoves] = []

    def record(self, source: PlacementSource, key: str, placement: KnownPlacement) -> None:
        placements = self.placements.setdefault(source, {})
        # If the key was looked up before, setdefault() keeps the earlier placement with the number
        # of its poll. So the check at the end covers the whole time since the first look-up.
        known = placements.setdefault(key, placement)
        # If the two placements differ in the shard or in the number of the key's last move, the key
        # has moved since the operation began. So an earlier statement has used the old shard.
        if known[:2] != placement[:2]:
            self._changed = True

    def watch(self, moves: WatchedMoves) -> None:
        """Let :meth:`hold` also check ``moves``: the key moves that a statement relies on."""
        self._watched.append(moves)

    def placement(self, source: PlacementSource, key: str) -> KnownPlacement | None:
        """Return the placement (shard) of ``key`` on which the operation relies.

        Return None if the operation has not looked up ``key``.
        """
        return self.placements.get(source, {}).get(key)

    def hold(self) -> bool:
        """Whether all keys that the operation uses are still on the same shards.

        Sends no query while the lease (the right to remember the shards of keys) is valid and no
        key is in flight (moving). Otherwise, sends one query for each 500 keys of a group.
        """
        if self._changed:
            return False
        # Use a loop, because all() with a generator is slower, and every read and write runs these
        # lines. The last line may use all(), because _watched is empty for most reads and writes.
        for source, placements in self.placements.items():
            if not source.holds(placements):
                return False
        return not self._watched or all(moves.holds() for moves in self._watched)


_uses: ContextVar[PlacementUses | None] = ContextVar("sharded_orm_placement_uses", default=None)


def current_uses() -> PlacementUses | None:
    """Return the object that records the placements of the current operation; None if there is none."""
    return _uses.get()


class recorded_uses:
    """Within the ``with`` block, record in ``uses`` the placement (shard) of each key that is
    looked up.

    Every read and write uses this context manager. It is a class, because a generator function
    would take three times as long.
    """

    __slots__ = ("_token", "_uses")

    def __init__(self, uses: PlacementUses) -> None:
        self._uses = uses

    def __enter__(self) -> PlacementUses:
        self._token = _uses.set(self._uses)
        return self._uses

    def __exit__(self, *exc_info: object) -> None:
        _uses.reset(self._token)
