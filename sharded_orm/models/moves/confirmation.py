"""Confirms reads by shard key: makes sure that the key was on the shard while its rows were read.

A key may move after its shard was looked up and before the database returns the rows. So after a
read, this module checks whether its keys are still on the same shards. If not, the read is
repeated. See docs/decisions/0028-key-moves.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import connections

from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved, RoutingError
from sharded_orm.routing.placement_uses import PlacementUses, recorded_uses

R = TypeVar("R")

# The maximum number of attempts to read. Even a third attempt is rare, because two moves of one key
# are many seconds apart.
_ATTEMPTS = 5


def confirmed(group: str, read: Callable[[], R]) -> R:
    """Return the result of ``read``, and make sure that each key was on the shard that was read.

    If one of the keys has moved during the call, call ``read`` again. Costs one reading of the
    clock, and, while keys are moving, a query to the directory (the table of each key's shard).

    :param group: the shard group of the rows.
    :param read: a function that finds the shards of its keys each time it is called, and changes
        nothing.
    :raises KeyMoved: a key has moved while a transaction was open, or in each of 5 attempts.
    """
    if not runtime.strategy(group).moves_keys:
        return read()
    for _ in range(_ATTEMPTS):
        with recorded_uses(PlacementUses()) as uses:
            try:
                result = read()
            except (ObjectDoesNotExist, RoutingError):
                if uses.hold():
                    raise
            else:
                if uses.hold():
                    return result
        refuse_repetition(group)
    raise key_moved(group, "moved again and again while it was read")


def confirmed_stream(
    group: str, open_rows: Callable[[], Iterator[R]], *, several: Callable[[], bool]
) -> Iterator[R]:
    """Return an iterator over the rows of ``open_rows``, with a check that no key has moved.

    When the first row arrives, the database has taken its snapshot: the state from which it reads
    all rows. If a key has moved by then, ``open_rows`` is called again. If the rows come from
    several shards, their snapshots were taken at different moments. So in this case, this function
    checks after the last row, too, that no key has moved.

    :param open_rows: finds the shards, and returns an iterator over the rows. The iterator sends
        the query when its first row is fetched.
    :param several: returns whether the rows come from several shards. It is called after all rows
        were yielded.
    :raises KeyMoved: as for :func:`confirmed`, or because a key has moved after rows were yielded.
    """
    if not runtime.strategy(group).moves_keys:
        return open_rows()
    with recorded_uses(PlacementUses()) as uses:
        rows = open_rows()
    return _stream(group, open_rows, rows, uses, several)


def _stream(
    group: str,
    open_rows: Callable[[], Iterator[R]],
    rows: Iterator[R],
    uses: PlacementUses,
    several: Callable[[], bool],
) -> Iterator[R]:
    for _ in range(_ATTEMPTS):
        with recorded_uses(uses):
            first = list(islice(rows, 1))
        if uses.hold():
            break
        close: Any = getattr(rows, "close", None)
        if close is not None:
            close()
        refuse_repetition(group)
        uses = PlacementUses()
        with recorded_uses(uses):
            rows = open_rows()
    else:
        raise key_moved(group, "moved again and again while it was read")
    yield from first
    yield from rows
    if several() and not uses.hold():
        raise key_moved(group, "moved to another shard while its rows were read one by one")


def refuse_repetition(group: str) -> None:
    """Raise :exc:`KeyMoved` if a transaction is open on ``group`` or on one of its shards.

    Called before an operation is repeated because a key has moved. Inside a transaction it must not
    be repeated, because earlier statements of the transaction may have used the key's old shard.
    """
    if in_transaction(group):
        # Query the latest moves, so that the caller's next attempt does not use the old shard of
        # the key.
        runtime.placement_lease().renew()
        raise key_moved(group, "moved to another shard while a transaction used it")


def in_transaction(group: str) -> bool:
    """Whether this thread has an open transaction on ``group`` or on one of its shards."""
    wrapper: Any = connections[group]
    return bool(wrapper.is_in_transaction())


def key_moved(group: str, what: str) -> KeyMoved:
    return KeyMoved(
        f"A shard key of group {group!r} {what}. Run the transaction or the query again."
    )
