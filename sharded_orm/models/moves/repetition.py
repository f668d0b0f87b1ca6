"""Writes whose shard key moves: they wait for the end of the switch, and run again on the new shard.

See docs/decisions/0028-key-moves.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.db import OperationalError

from sharded_orm import runtime
from sharded_orm.backends.fence import is_deadlock
from sharded_orm.exceptions import KeyMoved, RoutingError
from sharded_orm.models.moves.confirmation import in_transaction, refuse_repetition
from sharded_orm.routing.placement_uses import PlacementUses, current_uses, recorded_uses

R = TypeVar("R")

# Seconds between two attempts.
_PAUSE = 0.02


def repeated(group: str, write: Callable[[], R]) -> R:
    """Return the result of ``write``, which may be run several times if a shard key moves.

    If a shard refuses the write, or ends it because of a deadlock with the mover, nothing was written.
    Outside of transactions, call ``write`` again after some milliseconds, until it passes or
    ``MOVE_WAIT`` seconds are over.

    :param group: the shard group of the rows.
    :param write: finds the shard each time it is called, and changes rows on one shard, all or none.
    :raises KeyMoved: a transaction is open, or the move took too long. The transaction may be run
        again.
    """
    if not runtime.strategy(group).moves_keys:
        return write()
    deadline = None
    while True:
        uses = PlacementUses(writes=True)
        try:
            with recorded_uses(uses):
                return write()
        except KeyMoved as error:
            if error.is_in_part or in_transaction(group):
                raise
            reason: Exception = error
        except RoutingError as error:
            # Two look-ups may have given two shards, because the key has moved between them.
            if uses.has_sent or uses.hold():
                raise
            refuse_repetition(group)
            reason = error
        except OperationalError as error:
            if in_transaction(group) or not (is_deadlock(error) and _moves_now(group)):
                raise
            reason = error
        if deadline is None:
            deadline = time.monotonic() + runtime.config().move_wait
        elif time.monotonic() > deadline:
            raise reason
        # The fence tells nobody when it is removed. Look the key up again next time.
        time.sleep(_PAUSE)
        runtime.placement_lease().renew()


def _moves_now(group: str) -> bool:
    """Whether this process knows of a key of ``group`` that is in flight."""
    poll = runtime.placement_lease().valid()
    return poll is not None and any(key.group == group for key in poll.moves.in_flight)


@contextmanager
def part_of_write(number: int) -> Iterator[None]:
    """Within the ``with`` block, write to one of several shards.

    If the key moves, the whole write must not be repeated after its first part: the first shards
    would be written twice.

    :param number: how many shards were written before.
    """
    try:
        yield
    except KeyMoved as error:
        if number:
            error.is_in_part = True
            error.add_note(f"{number} other shards were written already.")
        raise


def refuse_former_route() -> None:
    """Raise an error if the running operation relies on a placement that no longer holds.

    The backends call this between taking a session and sending a write. It looks at the clock, and
    sends a query only for keys in flight.

    :raises KeyMoved: a key has moved. Nothing was sent.
    """
    uses = current_uses()
    if uses is None or not uses.writes:
        return
    if not uses.hold():
        raise KeyMoved(
            "A shard key has moved to another shard since the write looked for its shard. Nothing was"
            " sent. Run the transaction again."
        )
    uses.has_sent = True
