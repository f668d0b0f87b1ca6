"""Keys in flight, as far as statements for several shards are concerned.

Two servers do not switch at once: from the publication of the copy to the removal of the old rows, the
tables of both shards have the rows of a key. So a scattered statement takes the rows of such a key
from the shard of its placement only, and asks at its end whether the placement was the same all the
time. See docs/decisions/0028-key-moves.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from sharded_orm.routing.placement_lease import KeyInFlight, MoveList, MoveStore, Poll

#: The rows of the copy may be in the tables of the target, and the placement is the source. An aborted
#: move is in flight until its copy is removed.
_AT_SOURCE = frozenset({"switching", "aborted"})
#: The old rows may be in the tables of the source, and the placement is the target.
_AT_TARGET = frozenset({"switched", "settled"})


def has_switched(move: KeyInFlight) -> bool:
    """Whether the placement of the key is the target of its move."""
    return move.phase in _AT_TARGET


def keys_to_leave_out(
    group: str, used: MoveList, starts: Iterable[MoveList], *, announced: bool = False
) -> dict[int, tuple[KeyInFlight, ...]]:
    """Return the keys whose rows a statement must not see on a shard, by the number of the shard.

    :param used: the moves, as asked before the statement was sent.
    :param starts: the moves when the snapshots of open transactions were taken. A snapshot may still
        have rows of a move that has ended.
    :param announced: whether to leave out the keys of other moves in flight, too, on their targets.
    """
    moves = {move.number: move for start in starts for move in start.in_flight}
    moves = {number: move for number, move in moves.items() if move.phase in _KEPT_IN_SNAPSHOTS}
    moves |= {move.number: move for move in used.in_flight}
    keys: dict[int, tuple[KeyInFlight, ...]] = {}
    for move in moves.values():
        if move.group != group:
            continue
        if has_switched(move):
            keys[move.source] = (*keys.get(move.source, ()), move)
        elif announced or move.phase in _AT_SOURCE:
            keys[move.target] = (*keys.get(move.target, ()), move)
    return keys


_KEPT_IN_SNAPSHOTS = _AT_TARGET | {"aborted"}


def is_exact(
    group: str, start: MoveList, used: MoveList, end: MoveList, shard: int | None = None
) -> bool:
    """Whether a statement has seen each row of ``group`` exactly once.

    It has if each key was at the same place from ``start`` to ``end``, and no rows of a key have come
    to a second shard on which they were not left out.

    :param start: the moves before the oldest snapshot of the statement was taken.
    :param used: the moves by which :func:`keys_to_leave_out` was called.
    :param end: the moves after the last answer, with those that have ended since ``start``.
    :param shard: the number of the shard with that snapshot; None if it may be any.
    """
    before, known, after = (_moves(group, moves.in_flight) for moves in (start, used, end))
    ended = _moves(group, end.ended).keys()
    if ended - known.keys() - before.keys():
        return False  # A whole move has passed.
    return all(
        _stays(before.get(number), known.get(number), after.get(number), shard)
        for number in before.keys() | known.keys() | after.keys()
    )


def _stays(
    before: KeyInFlight | None,
    known: KeyInFlight | None,
    after: KeyInFlight | None,
    shard: int | None,
) -> bool:
    """Whether a move has disturbed nothing. Each argument is None if it was not in flight then."""
    phase = None if after is None else after.phase
    if known is None:
        if before is not None:
            return before.phase in _KEPT_IN_SNAPSHOTS and after is None
        return phase not in _AT_SOURCE | _AT_TARGET
    if known.phase in _AT_SOURCE:
        return phase in _AT_SOURCE or (known.phase == "aborted" and after is None)
    if known.phase in _AT_TARGET:
        # The snapshot of the target must have the rows that were published. On the source, the rows
        # are left out.
        is_old = before is None or before.phase not in _AT_TARGET
        return not (is_old and shard != known.source) and (after is None or phase in _AT_TARGET)
    # No rows have come to the target by now: a move that goes on has not begun to switch before.
    return after is not None and phase not in _AT_SOURCE | _AT_TARGET


def _moves(group: str, moves: Iterable[KeyInFlight]) -> Mapping[int, KeyInFlight]:
    return {move.number: move for move in moves if move.group == group}


class _Lease(Protocol):
    def valid(self) -> Poll | None: ...


class Snapshot(NamedTuple):
    """What was known of moves before a snapshot was taken."""

    poll: Poll
    #: The number of the shard; None if it may be any.
    shard: int | None = None


class ScatterMoves:
    """The moves on which the exactness of a statement for several shards relies.

    Used by one thread at a time.

    :param used: the moves, as asked before the first statement.
    :param snapshots: of the open transactions in which the statement takes part. If ``used`` is of a
        poll, that poll as well.
    :param is_quiet: whether no key of the group is in flight in ``used``.
    """

    def __init__(
        self,
        group: str,
        store: MoveStore,
        lease: _Lease,
        used: MoveList,
        snapshots: Iterable[Snapshot],
        *,
        is_quiet: bool,
    ) -> None:
        self.group, self.used = group, used
        self._store, self._lease = store, lease
        self._snapshots, self._is_quiet = list(snapshots), is_quiet

    def holds(self) -> bool:
        """Whether what the statement has read until now is exact.

        No query while the lease shows that no key of the group was in flight; else one.
        """
        poll = self._lease.valid()
        if (
            self._is_quiet
            and poll is not None
            and all(poll.is_quiet(self.group, before.number) for before, _ in self._snapshots)
        ):
            return True
        starts = [(poll.moves, shard) for poll, shard in self._snapshots] or [(self.used, None)]
        end = self._store.moves(since=min(start.last for start, _ in starts))
        return end is None or all(
            is_exact(self.group, start, self.used, end, shard) for start, shard in starts
        )
