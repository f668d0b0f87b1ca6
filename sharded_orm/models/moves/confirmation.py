"""Reads by shard key are confirmed: the key was on the shard while its rows were read.

A key may move to another shard between the look-up of the shard and the answer of the database. So a
read asks afterwards whether its keys are still where they were. If not, the result is thrown away,
and the read is repeated. See docs/decisions/0028-key-moves.md.
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

# Two moves of one key are many seconds apart, so a second repetition is rare.
_ATTEMPTS = 5


def confirmed(group: str, read: Callable[[], R]) -> R:
    """Return the result of ``read``, of which the keys were on the shards that were asked.

    If a key has moved meanwhile, ``read`` is called again. Costs one look at the clock, and a query
    to the directory only for keys in flight.

    :param group: the shard group of the rows.
    :param read: finds the shards of its keys each time it is called, and changes nothing.
    :raises KeyMoved: a key has moved, and a transaction is open.
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
    """Return the rows of ``open_rows``, confirmed when the first of them has arrived.

    The database has taken its snapshot by then. A stream of several shards is confirmed at its end,
    too, because their snapshots are of different moments.

    :param open_rows: finds the shards, and returns an iterator that sends the query when it is used.
    :param several: whether the rows come from several shards; asked after the first row.
    :raises KeyMoved: as :func:`confirmed`, or rows were yielded already.
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
    """Raise :exc:`KeyMoved` if a transaction is open on a shard of ``group`` or on the group."""
    if in_transaction(group):
        # The transaction that is run again must not begin with what was known before the move.
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
