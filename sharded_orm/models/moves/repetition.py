"""Repeats writes that fail because a shard key or a shard moves, until the move has ended.

See docs/decisions/0028-key-moves.md and 0035-moves-of-shards.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError, OperationalError, connections

from sharded_orm import runtime
from sharded_orm.backends.fence_messages import is_deadlock
from sharded_orm.backends.group.moved_shards import PlaceWait, place_wait, rows_move
from sharded_orm.exceptions import KeyMoved, RoutingError, ShardMoved, SideFenced
from sharded_orm.models.moves.confirmation import in_transaction, key_moved
from sharded_orm.routing.placement_lease import KeyInFlight
from sharded_orm.routing.placement_uses import PlacementUses, current_uses, recorded_uses

R = TypeVar("R")

# The longest pause before the next query or attempt to write, in seconds.
_PAUSE = 0.02
# A waiting writer queries in a loop whether its key is still moving. The pause between two queries
# is the fraction _PART of the time that it has waited, but at least _LOOK seconds. So a long wait
# costs only a few queries.
_LOOK, _PART = 0.003, 0.125


class WriteAttempt(PlacementUses):
    """Remembers the shard of each key that one attempt to write has looked up.

    If one of these keys has moved to another shard meanwhile, the write must be attempted again.
    Used by one thread at a time.
    """

    def __init__(self) -> None:
        super().__init__(writes=True)
        #: Whether a part of the write was stored, so that a repetition would store that part twice.
        self.is_in_part = False

    @property
    def has_several_keys(self) -> bool:
        return sum(map(len, self.placements.values())) > 1

    def is_stopped_by(self, moves: Iterable[KeyInFlight]) -> bool:
        """Whether one of ``moves`` is now switching a key of this write to its new shard.

        Until the switch is over, another attempt of the write would be refused.
        """
        switching = {(m.group, m.key) for m in moves if m.phase == "switching"}
        return bool(switching) and any(
            (source.group.name, key) in switching
            for source, placements in self.placements.items()
            for key in placements
        )


def repeated(
    group: str,
    write: Callable[[], R],
    *,
    nothing_written: Callable[[R], bool] | None = None,
    joins: bool = False,
) -> R:
    """Return the result of ``write``. Call ``write`` again if a shard key moves during the call.

    A move can make a write fail in three ways. In each of them, nothing was written:

    - The shard refuses the write.
    - The write finds no row, because the rows have left the shard. The database raises no error
      then. So ``write`` must raise one, or ``nothing_written`` must recognize its result.
    - The write fails because of a deadlock with the process that moves the key.

    If no transaction is open, ``write`` is called again every few milliseconds, until it succeeds
    or ``MOVE_WAIT`` seconds are over. The same happens if the shard itself moves to another node
    (:func:`follow_shard`).

    :param group: the shard group of the rows.
    :param write: a function that looks up the shard each time it is called, and then changes all
        its rows on this shard, or none.
    :param nothing_written: a function that receives the result of ``write``, for example the number
        of deleted rows. It returns True if a second call of ``write`` does no harm, because the
        first has found no row, or because the second would change nothing. None if ``write``
        raises an error when it finds no row.
    :param joins: matters only if this call is made inside of another call of this function. If
        True, this write is a part of the outer write. If a key moves, the outer call repeats the
        whole outer write, and this call repeats nothing. Pass True if the caller knows only the
        alias of the shard, and not the key from which the outer write has found the shard.
    :raises KeyMoved: a transaction is open, the move took too long, or a part was written. In a
        transaction, nothing is repeated here, but the caller may run the transaction again.
    """
    if not runtime.strategy(group).moves_keys or (
        joins and isinstance(current_uses(), WriteAttempt)
    ):
        return follow_shard(group, write)
    deadline = None
    while True:
        attempt = WriteAttempt()
        try:
            with recorded_uses(attempt):
                result = follow_shard(group, write)
            if nothing_written is None or attempt.hold():
                return result
            attempt.is_in_part = not nothing_written(result)
            if attempt.is_in_part and not attempt.has_several_keys:
                # The key has moved after the write. If it had moved during the write, a statement
                # would have been refused. So the write is complete, and its result is right.
                return result
            raise key_moved(group, "moved to another shard while it was written")
        except KeyMoved as moved:
            error = moved
        except ShardMoved as moved:
            moved.is_in_part |= attempt.is_in_part
            raise
        except (DatabaseError, ObjectDoesNotExist, RoutingError) as cause:
            # A move may have caused the error. For example, an UPDATE of an instance found no row,
            # because the key of the instance has moved. In this case repeat the write. But do not
            # repeat it after an OperationalError other than a deadlock, such as a lost connection,
            # because the row may have been written.
            if is_deadlock(cause):
                if not _moves_now(group) and attempt.hold():
                    raise
            elif isinstance(cause, OperationalError) or attempt.hold():
                raise
            error = key_moved(group, "moved to another shard while it was written")
            error.__cause__ = cause
        error.is_in_part |= attempt.is_in_part
        if error.is_in_part or in_transaction(group):
            raise error
        if deadline is None:
            deadline = time.monotonic() + runtime.config().move_wait
        elif time.monotonic() > deadline:
            raise error
        _wait_for_switch(attempt, deadline)


def _wait_for_switch(attempt: WriteAttempt, deadline: float) -> None:
    """Wait until no key of ``attempt`` is being switched to a new shard, or until ``deadline``.

    Until then, the shard would refuse each attempt, and the attempts would slow down the process
    that moves the key. Sends at least one query. It renews the placement lease, so that the next
    attempt looks up the shards of its keys again.

    :param deadline: when the writer gives up, by ``time.monotonic()``.
    """
    began = deadline - runtime.config().move_wait
    while True:
        # No event reports that a key has been switched to its new shard, so query the moves from
        # time to time.
        time.sleep(min(max((time.monotonic() - began) * _PART, _LOOK), _PAUSE))
        poll = runtime.placement_lease().renew()
        if (
            poll is None
            or time.monotonic() > deadline
            or not attempt.is_stopped_by(poll.moves.in_flight)
        ):
            return


def follow_shard(group: str, write: Callable[[], R]) -> R:
    """Return the result of ``write``. Call ``write`` again if its shard moves to another node
    meanwhile.

    Use this function for writes that open a transaction of their own. A single statement does not
    need it, because the database backend repeats the statement on the new node. A write that fails
    because its shard moves has written nothing. While shards or keys of the group move, ``write``
    is also called again after a deadlock, because the process that moves them may have caused the
    deadlock.

    :param write: changes all its rows on one shard, or none. It is called again for at most
        ``MOVE_WAIT`` seconds.
    :raises ShardMoved: a transaction is open around the write, the move took too long, or a part
        was written.
    """
    deadline = None
    side_wait: PlaceWait | None = None
    while True:
        try:
            return write()
        except OperationalError as error:
            if getattr(error, "is_in_part", False) or in_transaction(group):
                raise
            if not isinstance(error, ShardMoved) and not (is_deadlock(error) and rows_move(group)):
                raise
            if deadline is None:
                deadline = time.monotonic() + runtime.config().move_wait
            elif time.monotonic() > deadline:
                raise
            if isinstance(error, SideFenced):
                # This server has refused the write, because its pair is switching to the other
                # server. Do not sleep: next_place() sends a query that waits for the end of the
                # switch.
                wrapper = connections[error.alias]
                side_wait = side_wait or place_wait(wrapper)
                side_wait.next_place(wrapper.settings_dict, is_fenced=True)
                continue
        time.sleep(_PAUSE)


def _moves_now(group: str) -> bool:
    """Whether a key of ``group`` is moving at the moment. Sends one query."""
    poll = runtime.placement_lease().renew()
    return poll is not None and any(key.group == group for key in poll.moves.in_flight)


def write_in_part() -> None:
    """Record that a part of this thread's current write is stored.

    The whole write is then not repeated if a key moves, because that would store the part twice.
    """
    attempt = current_uses()
    if isinstance(attempt, WriteAttempt):
        attempt.is_in_part = True


@contextmanager
def part_of_write(number: int) -> Iterator[None]:
    """Context manager for the part of a write that writes to one of several shards.

    After the first shard was written, the whole write must not be repeated if a key moves. The
    repetition would write to the first shard twice.

    :param number: how many shards were written before this one.
    """
    if number:
        write_in_part()
    try:
        yield
    except OperationalError as error:
        if number:
            error.is_in_part = True  # type: ignore[attr-defined]  # follow_shard() reads it
            error.add_note(f"{number} other shards were written already.")
        raise


def refuse_former_route() -> None:
    """Raise an error if a key has moved since the current operation looked up the key's shard.

    A database backend calls this after it has taken a session from the pool and before it sends a
    write. Costs one reading of the clock, and a query only while keys are moving.

    :raises KeyMoved: a key has moved. Nothing was sent.
    """
    uses = current_uses()
    if uses is not None and uses.writes and not uses.hold():
        raise KeyMoved(
            "A shard key has moved to another shard since the write looked for its shard. Nothing was"
            " sent. Run the transaction again."
        )
