"""Rows that are not where their shard key leads: what acts on many rows leaves them alone.

``save()`` refuses such a row; ``QuerySet.update()`` on a shard cannot, as it sees no keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.db.models import Q

from sharded_orm import runtime
from sharded_orm.exceptions import RoutingError, TooManyMisplaced
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.topology.model import Shard

#: The rows of so many keys, misplaced on one shard, are left alone; an action on more does nothing.
MOST_LEFT = 1000
#: Keys that are read, and looked up, at once.
_BATCH = 1000


def misplaced(options: ShardOptions, rows: Any, shard: Shard) -> Q | None:
    """The condition that the misplaced of ``rows`` fulfil, a queryset on ``shard``; None: none is.

    One query for each 1000 different shard keys of the rows, and with a directory one there for
    those that this process does not remember.

    :raises TooManyMisplaced: more than :data:`MOST_LEFT` keys lead elsewhere.
    """
    key: Any = options.key
    if key is None:
        return None
    found: list[Any] = []
    for keys in _different_keys(rows, key.attname):
        numbers = shard_numbers(options.group, keys)
        found += [value for value in keys if numbers.get(value) != shard.number]
        if len(found) > MOST_LEFT:
            raise TooManyMisplaced(
                f"more than {MOST_LEFT} shard keys have rows on {shard.alias} that lead to other"
                " shards; choose rows one by one, or move them where they belong."
            )
    return Q(**{f"{key.attname}__in": found}) if found else None


def _different_keys(rows: Any, attname: str) -> Iterator[list[Any]]:
    keys = rows.order_by(attname).values_list(attname, flat=True).distinct()
    page = list(keys[:_BATCH])
    while page:
        yield page
        page = (
            list(keys.filter(**{f"{attname}__gt": page[-1]})[:_BATCH])
            if len(page) == _BATCH
            else []
        )


def shard_numbers(group: str, keys: Iterable[Any]) -> dict[Any, int | None]:
    """The numbers of the shards that ``keys`` lead to; None for those that lead nowhere."""
    try:
        return runtime.strategy(group).locate_many(keys)
    except RoutingError:
        return {key: _shard_number(group, key) for key in keys}


def _shard_number(group: str, key: Any) -> int | None:
    try:
        shard = runtime.locate(group, key)
    except RoutingError:
        return None
    return shard.number if shard is not None else None
