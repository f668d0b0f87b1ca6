"""Reads a batch of rows by their primary keys, if the primary key is the shard key.

Each id tells its shard, so there is no need to search the conditions of a query for a shard key.
All shards of a node (a database server) are read by one compiled query.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from django.db import models

from sharded_orm import runtime, scatter
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.cache.values import Row
from sharded_orm.models.plans.instances import loader_of
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.signals import scattered
from sharded_orm.topology.model import Shard

#: The method of Django's integer fields that prepares a value for the database: it returns an int
#: unchanged.
PLAIN_INTEGERS = frozenset({models.IntegerField.get_prep_value, models.AutoField.get_prep_value})

# The methods of Django's integer fields that send an int to the database as it is.
_SENT_UNCHANGED = frozenset(
    {models.IntegerField.get_db_prep_value, models.AutoField.get_db_prep_value}
)

# The largest number of ids in a batch. Each id is a parameter of a statement, and databases limit
# the number of parameters.
_MOST = 10_000


def ids_by_shard(options: ShardOptions, ids: Sequence[Any]) -> dict[Shard, list[int]] | None:
    """Return a dict that maps each shard to its ids. Ids that no row can have are left out.

    Return None if :func:`batch_rows` cannot read the rows. This is so if the shard key is not the
    primary key, if the ids are not integers or too many, if the field stores another value than the
    id, or if keys of the group may move. Also return None if all ids are on one shard, because then
    Django's own code can read the rows.
    """
    key: Any = options.key
    strategy = runtime.strategy(options.group)
    if key is None or not key.primary_key or strategy.moves_keys or len(ids) > _MOST:
        return None
    kind = type(key)
    if kind.get_prep_value not in PLAIN_INTEGERS or set(map(type, ids)) != {int}:
        return None
    if kind.get_db_prep_value not in _SENT_UNCHANGED:
        return None
    by_number: dict[int, list[int]] = {}
    for value, number in strategy.locate_many(ids).items():
        if number is not None:
            by_number.setdefault(number, []).append(value)
    if len(by_number) < 2:
        return None
    numbers = sorted(by_number)
    shards = runtime.shards_in(runtime.group(options.group), numbers)
    return {shard: by_number[number] for shard, number in zip(shards, numbers, strict=True)}


def batch_rows(
    queryset: Any, ids: dict[Shard, list[int]]
) -> Generator[tuple[str, list[str], list[Row]]]:
    """Read the rows with the ids, and yield them in parts.

    Each part is a tuple: the name of a node (a database server), a list with the alias of each
    row's shard, and the rows as the driver returns them. Costs one statement per node. The nodes
    are queried in parallel.

    :param queryset: a queryset of all rows. If ``scatter()`` was called on it, the signal
        ``scattered`` is sent.
    :raises ScatterError: a shard does not answer.
    """
    model = queryset.model
    if queryset._scatters and scattered.has_listeners(model):
        # Compute the route only if the signal has receivers, because computing the route takes longer
        # than reading the batch.
        route = queryset.filter(pk__in=[pk for pks in ids.values() for pk in pks])._route()
        scattered.announce(model, route)
    query = ShardedQuery(model)
    query.clear_ordering(force=True)
    return scatter.fetch_parts_by_key(query, ids)


def batch_instances(queryset: Any, ids: dict[Shard, list[int]]) -> list[Any]:
    """Return the model instances with the ids, in no particular order.

    Costs what :func:`batch_rows` costs, and raises its errors.

    :param queryset: a queryset of all rows, with which :func:`batch_rows` reads. The instances are
        made as if this queryset had read them.
    """
    key = (queryset.model, None, None)
    instances: list[Any] = []
    others: list[tuple[list[str], list[Row]]] = []
    refusal: ValueError | None = None
    parts = batch_rows(queryset, ids)
    # If an exception ends the loop, close the cursors of the nodes that still execute.
    with closing(parts):
        for _, aliases, rows in parts:
            if not rows or refusal is not None:
                continue
            # All shards of a node have its settings, so one loader serves all rows of the node.
            # Loaders for each shard would take twice as long.
            loader = loader_of(key, connection_of(aliases[0]))
            if not loader.is_unobserved():
                others.append((aliases, rows))
                continue
            # No code of the project runs while these instances are made. So make them now, while
            # other nodes still execute their statements.
            try:
                instances += loader.loaded(rows, queryset, aliases)
            except ValueError as error:
                # A stored value cannot be converted. Raise this error only after all nodes have
                # answered. If one of them fails, the error of that node must be raised instead.
                refusal = error
    if refusal is not None:
        raise refusal
    # To make these instances, code of the project runs, such as a receiver of post_init. This code
    # must not run before it is certain that no node has failed.
    for aliases, rows in others:
        loader = loader_of(key, connection_of(aliases[0]))
        if loader.serves_others:
            instances += loader.loaded(rows, queryset, aliases)
            continue
        for alias, row in zip(aliases, rows, strict=True):
            instances += loader_of(key, connection_of(alias)).loaded([row], queryset)
    return instances
