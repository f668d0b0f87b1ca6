"""Finds misplaced rows, which are on another shard than their shard key says.

``save()`` refuses to write a misplaced row. But an admin action may call ``QuerySet.update()`` on a
shard. This does not read the shard keys of the rows, and so would also write misplaced rows.
Therefore admin actions leave these rows out of their querysets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.db.models import Q

from sharded_orm import runtime
from sharded_orm.admin.exceptions import TooManyMisplaced
from sharded_orm.exceptions import RoutingError
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.topology.model import Shard

#: The greatest number of shard keys in the condition with which an action on many rows leaves out
#: the misplaced rows. If a shard has misplaced rows of more keys, the action fails on that shard.
MAX_MISPLACED_KEYS = 1000
#: The number of shard keys that are read in one query, and whose shards are then looked up together.
_BATCH = 1000


def misplaced(options: ShardOptions, rows: Any, shard: Shard) -> Q | None:
    """Return a condition for the misplaced rows among ``rows``; None if no row is misplaced.

    Costs one query of ``shard`` for each 1000 different shard keys of ``rows``. Shard keys whose
    shards this process does not remember also cost queries of the directory, one for each 500 keys.
    The directory is the table that records the shard of each key.

    :param rows: a queryset on ``shard``.
    :raises TooManyMisplaced: the misplaced rows have more than :data:`MAX_MISPLACED_KEYS` keys.
    """
    key: Any = options.key
    if key is None:
        return None
    misplaced_keys: list[Any] = []
    for keys in _different_keys(rows, key.attname):
        numbers = shard_numbers(options.group, keys)
        misplaced_keys += [value for value in keys if numbers.get(value) != shard.number]
        if len(misplaced_keys) > MAX_MISPLACED_KEYS:
            raise TooManyMisplaced(
                f"more than {MAX_MISPLACED_KEYS} shard keys have rows on {shard.alias} that lead to other"
                " shards; choose rows one by one, or move them where they belong."
            )
    return Q(**{f"{key.attname}__in": misplaced_keys}) if misplaced_keys else None


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
    """Return the number of the shard to which each of ``keys`` leads, keyed by shard key.

    The number is None for a key that leads to no shard.
    """
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
