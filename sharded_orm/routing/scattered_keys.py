"""Makes statements for several shards see each row once, even while keys move.

A move copies the rows of a key to another shard, and later removes the old rows. In between, both
shards have the rows. So a statement for several shards must not read them on both. It reads them
only on the shard that the directory (the table with the shard of each key) names. At the end of the
statement, the library checks that the directory still names this shard. See
docs/decisions/0028-key-moves.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from sharded_orm.routing.placement_lease import KeyInFlight, MoveList, MoveStore, Poll

#: Phases of a move in which the directory still names the old shard of the key, the source. The new
#: shard, the target, may have a copy of the rows already. An aborted move counts as in flight (not
#: ended) until this copy is removed.
_AT_SOURCE = frozenset({"switching", "aborted"})
#: Phases of a move in which the directory already names the new shard of the key, the target. The
#: old shard, the source, may still have the old rows.
_AT_TARGET = frozenset({"switched", "settled"})


def has_switched(move: KeyInFlight) -> bool:
    """Whether the directory already assigns the key to its new shard, the target of the move."""
    return move.phase in _AT_TARGET


def keys_to_leave_out(
    group: str, used: MoveList, starts: Iterable[MoveList], *, announced: bool = False
) -> dict[int, tuple[KeyInFlight, ...]]:
    """Return the keys whose rows a statement must leave out, as a dict by shard number.

    While a key moves, its old shard (the source) and its new shard (the target) may both have its
    rows. The statement must read them on only one of the two shards.

    :param used: the moves that the directory reported before the statement was sent.
    :param starts: for each open transaction in which the statement reads, the moves that were known
        when the transaction took its snapshot. If a move has ended since, the snapshot may still
        contain rows that the end of the move has removed.
    :param announced: whether to leave out a key on the target already when its move is announced.
        If False, the key is left out from the phase "switching" on. Before this phase, the tables
        of the target do not have rows of the key yet.
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

    True if each key was on the same shard from ``start`` to ``end``. If a key was moving, two
    shards may have had its rows. Then the result is True only if the statement has left out these
    rows on one of the two shards.

    :param start: the moves that the process knew before the statement's oldest database snapshot
        was taken.
    :param used: the moves that were passed to :func:`keys_to_leave_out`.
    :param end: the moves that the process knew after the last shard had answered, and the moves
        that had ended since ``start``.
    :param shard: the number of the shard on which the oldest snapshot was taken; None if it may be
        any shard.
    """
    before, known, after = (_moves(group, moves.in_flight) for moves in (start, used, end))
    ended = _moves(group, end.ended).keys()
    if ended - known.keys() - before.keys():
        # A move has begun and ended while the statement ran. The statement may have read the rows
        # of the moved key twice, or not at all.
        return False
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
    """Whether the result of the statement is correct in spite of one move of a key.

    ``before``, ``known`` and ``after`` are the same move at three times: as it was in ``start``,
    ``used`` and ``end`` of :func:`is_exact`. They are None if the move was not in flight then.
    """
    phase = None if after is None else after.phase
    if known is None:
        if before is not None:
            return before.phase in _KEPT_IN_SNAPSHOTS and after is None
        return phase not in _AT_SOURCE | _AT_TARGET
    if known.phase in _AT_SOURCE:
        return phase in _AT_SOURCE or (known.phase == "aborted" and after is None)
    if known.phase in _AT_TARGET:
        # The directory named the new shard before the statement began, so the statement has left
        # out the rows on the old shard. The result is correct only if the statement has read the
        # copied rows on the new shard. It may have missed them if it has read that shard from a
        # snapshot that was taken before the directory was changed (is_old). An old snapshot of the
        # old shard does no harm.
        is_old = before is None or before.phase not in _AT_TARGET
        return not (is_old and shard != known.source) and (after is None or phase in _AT_TARGET)
    # When the statement was sent, the move was in the phase "announced" or "copying". In these
    # phases, copied rows are only in side tables of the new shard, which the statement does not
    # read. If the move is still in one of them, the result is correct.
    return after is not None and phase not in _AT_SOURCE | _AT_TARGET


def _moves(group: str, moves: Iterable[KeyInFlight]) -> Mapping[int, KeyInFlight]:
    return {move.number: move for move in moves if move.group == group}


class _Lease(Protocol):
    def valid(self) -> Poll | None: ...


class Snapshot(NamedTuple):
    """The database snapshot that a transaction reads on a shard, and the last poll before the
    snapshot.

    A poll is a query for the keys that are moving.
    """

    poll: Poll
    #: The number of the shard that took the snapshot; None if it may be any shard.
    shard: int | None = None


class ScatterMoves:
    """The key moves that were known when a statement for several shards began.

    At the end of the statement, they are compared with the moves that are known then. Used by one
    thread at a time.

    :param used: the moves that were known when the statement was sent. They determine which rows
        it left out.
    :param snapshots: one :class:`Snapshot` for each open transaction in which the statement reads,
        with the moves that were known when the transaction took its snapshot. There may be two
        more: one with the moves that were known at the first such statement of the transaction, and
        one with the moves in ``used``.
    :param is_quiet: whether no key of the group is in flight (moving) in ``used``.
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
        """Whether the statement on several shards has seen each row exactly once.

        If a key has moved since the statement began, the statement may have seen the key's rows
        twice or not at all. Sends one query for the moves of keys. Sends none if the lease of this
        process is valid and its polls have shown that no key of the group was moving.
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
