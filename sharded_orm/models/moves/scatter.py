"""Makes statements for several shards see each row once, even while keys move between the shards.

See :mod:`sharded_orm.routing.scattered_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.moves.transactions import refused_use, remember_scatter, snapshots
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.routing.placement_lease import KeyInFlight
from sharded_orm.routing.placement_uses import current_uses
from sharded_orm.routing.scattered_keys import (
    ScatterMoves,
    Snapshot,
    keys_to_leave_out,
)

# The maximum number of queries to the directory (the table of each key's shard) if each answer
# arrives too late to be valid.
_ATTEMPTS = 5


def keys_left_out(group: str) -> dict[int, tuple[KeyInFlight, ...]]:
    """Return the keys whose rows a statement for several shards must leave out, keyed by shard number.

    While a key moves, two shards may have its rows. The statement must read them on only one of the two.

    Call this before the first statement is sent. After the last statement,
    :func:`~sharded_orm.models.moves.confirmation.confirmed` checks that no key has moved meanwhile.

    Cost: one reading of the clock; while a key of the group is moving, also a query.

    :raises KeyMoved: a transaction is open, and a key may have moved since the transaction began.
        Or the directory (the table that stores the shard of each key) answers too slowly.
    """
    strategy = runtime.strategy(group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return {}
    lease, uses = strategy.lease, current_uses()
    poll = lease.current()
    if uses is None or (poll is None and lease.is_suspended):
        return {}
    taken = snapshots(strategy)
    is_quiet = poll is not None and poll.is_quiet(group, poll.number)
    if not is_quiet:
        # ``renew()`` queries the directory for the current moves. It returns None if the directory
        # answered so slowly that the answer may be out of date. So try a few times.
        answers = (lease.renew() for _ in range(_ATTEMPTS))
        poll = next((answer for answer in answers if answer is not None), None)
    if poll is None:
        raise refused_use(group, "may have moved meanwhile")
    remember_scatter(group, poll)
    if is_quiet or taken:
        taken.append(Snapshot(poll))
    used = poll.moves
    uses.watch(ScatterMoves(group, strategy.store, lease, used, taken, is_quiet=is_quiet))
    starts = [snapshot.poll.moves for snapshot in taken]
    return keys_to_leave_out(group, used, starts, announced=uses.writes)


class MovingKeys:
    """Finds the keys of a group that were moving when this object was created, or have moved since.

    The rows of such a key may be on two shards. Or a reader may have read them on the old shard,
    before they moved. Not thread-safe. Cost: one query, if keys of the group can move.
    """

    def __init__(self, group: str) -> None:
        strategy = runtime.strategy(group)
        self._strategy = (
            strategy if isinstance(strategy, DirectoryStrategy) and strategy.moves_keys else None
        )
        # Do not use lease.renew() here. It returns None also if the directory answers slowly, and
        # then it would be unknown which keys are moving. store.moves() returns None only inside
        # Django's TestCase, where no key moves.
        self._before = None if self._strategy is None else self._strategy.store.moves()

    def among(self, keys: Iterable[Any]) -> set[Any]:
        """Return the ``keys`` that are moving or have moved since this object was created.

        Sends one query.

        :param keys: shard keys in the form in which the database stores them. Values that cannot be
            keys are ignored.
        """
        moving = self.entries()
        return {key for key in keys if moving and self._entry(key) in moving}

    def entries(self) -> set[str]:
        """Return the keys that are moving or have moved since this object was made.

        Sends one query. The keys are returned as the directory (the table of each key's shard)
        stores them: as texts, some of which are digests. See
        :meth:`~sharded_orm.routing.directory.DirectoryStrategy.entry`.
        """
        if self._strategy is None or self._before is None:
            return set()
        now = self._strategy.store.moves(since=self._before.last)
        moves = [*self._before.in_flight, *(() if now is None else (*now.in_flight, *now.ended))]
        return {move.key for move in moves if move.group == self._strategy.group.name}

    def _entry(self, key: Any) -> str | None:
        assert self._strategy is not None
        try:
            return self._strategy.entry(key)
        except InvalidShardKey:
            return None
