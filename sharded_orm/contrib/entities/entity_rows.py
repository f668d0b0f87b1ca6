"""Reads rows of entities by their ids and shard keys.

Where possible, the queries have a form whose SQL is compiled only once in a process. The SQL is
then kept for later queries of the same form (see docs/explanation/read-plans.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connections

from sharded_orm import runtime, scatter, unbound
from sharded_orm.models.plans.instances import loader_of
from sharded_orm.models.sharding.query import ShardedQuery

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.store import DataStore
    from sharded_orm.topology.model import Shard


def entity_rows(
    store: DataStore, keys: Mapping[UUID, Any], names: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Return the values of the fields ``names`` of each row that has one of the ids in ``keys``.

    Costs a round trip to each node (a database server).

    In a store with ``shard_on``, the result may have too many rows, because the query has two
    separate conditions, such as ``id IN (1, 2) AND user_id IN (7, 8)``. Even if the entity 1 is
    wanted only with the shard key 7, a row with the id 1 and the shard key 8 is returned as well.
    The caller must drop such rows.

    :param keys: maps the id of each entity to its shard key; at least one.
    """
    condition: dict[str, Any]
    with unbound():
        if len({*keys.values()}) == 1:
            # All entities have the same shard key. Ask for this one value: a query with a single
            # shard key is compiled only once (see docs/explanation/read-plans.md).
            condition = {"id__in": list(keys)} if len(keys) > 1 else {"id": next(iter(keys))}
            condition[store.key_name] = next(iter(keys.values()))
        elif store.shard_on is None and not runtime.strategy(store.group).moves_keys:
            return _rows_by_shard(store, keys, tuple(names))
        else:
            condition = {"id__in": list(keys), f"{store.key_name}__in": {*keys.values()}}
        rows: Any = store.model._default_manager.filter(**condition).order_by()
        return list(rows.values_list(*names))


def _rows_by_shard(
    store: DataStore, ids: Iterable[UUID], names: tuple[str, ...]
) -> list[tuple[Any, ...]]:
    """Return the rows with these ids, in a store that is sharded by its ids."""
    model: Any = store.model
    field = model._meta.get_field("id")
    numbers = runtime.strategy(store.group).locate_many(map(field.get_prep_value, ids))
    group = runtime.group(store.group)
    ids_by_shard: dict[Shard, list[Any]] = {}
    for entity_id, number in numbers.items():
        if number is not None:
            shard = runtime.shard_in(group, number)
            value = field.get_db_prep_value(entity_id, connections[shard.alias])
            ids_by_shard.setdefault(shard, []).append(value)
    if not ids_by_shard:
        return []
    query = ShardedQuery(model)
    query.clear_ordering(force=True)
    query.set_values(names)
    rows_by_alias: dict[str, list[Any]] = {}
    for alias, row in scatter.fetch_by_key(query, ids_by_shard, field=field):
        rows_by_alias.setdefault(alias, []).append(row)
    rows: list[Any] = []
    for alias, of_shard in rows_by_alias.items():
        loader = loader_of((model, names, None), connections[alias])
        rows += map(tuple, loader.converted(of_shard))
    return rows
