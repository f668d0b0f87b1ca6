"""Reads of many rows by their primary keys through the cache, if the primary key is the shard key.

All rows are requested from the cache together, in one round trip per cache server. The rows that
the cache lacks are read from the database in one query, which costs one round trip per node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from django.db import connections
from django.db.models.query import ModelIterable

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.cache import request_cache
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import MISS, ObjectRequest, RowAddress, RowBatch
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.cached_instances import InstanceFactory
from sharded_orm.models.cached.cached_read import ROWS, CachedRead, to_fill
from sharded_orm.models.cached.connection_state import ConnectionUse, connection_use
from sharded_orm.models.cached.lookup_plan import LookupPlan
from sharded_orm.models.plans.id_batch import batch_rows, ids_by_shard
from sharded_orm.routing.base import Strategy


class DriverRows(ModelIterable):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """Yields pairs: the alias of a row's shard, and the row as the driver returns it.

    The cache stores rows in this form.
    """

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        queryset: Any = self.queryset
        compiler = queryset.query.get_compiler(using=queryset.db)
        for rows in compiler.execute_sql(
            chunked_fetch=self.chunked_fetch, chunk_size=self.chunk_size
        ):
            for row in rows:
                yield queryset.db, row


class ShardRead(RowBatch):
    """The rows of one shard that are read together through the cache.

    :param use: how the connection to the shard may use the cache.
    """

    def __init__(self, use: ConnectionUse) -> None:
        super().__init__(use.alias, use.factory, use.state)
        self.use = use


def reads_by_pk(plan: LookupPlan, pks: Iterable[Any]) -> tuple[list[ShardRead], list[Any]]:
    """Prepare to read rows by their primary keys, which are the shard keys. Sends nothing to the cache.

    :returns: a read for each shard, and a list of the keys whose rows cannot be read through the
        cache.
    """
    assert plan.cached.options is not None
    strategy = runtime.strategy(plan.cached.options.group)
    known = plan.addresses(strategy)
    reads: dict[str, ShardRead | None] = {}
    others: list[Any] = []
    for pk in dict.fromkeys(pks):
        address = known.get(pk)
        if address is None:
            address = _address(plan, strategy, pk)
            if address is None:
                others.append(pk)
                continue
            known[pk] = address
        alias = address.scope.place
        if alias not in reads:
            use = connection_use(plan, connection_of(alias))
            reads[alias] = None if use is None else ShardRead(use)
        read = reads[alias]
        if read is None:
            others.append(pk)
        else:
            read.addresses[pk] = address
    return [read for read in reads.values() if read is not None], others


def _address(plan: LookupPlan, strategy: Strategy, pk: Any) -> RowAddress | None:
    """Return the address of the row with the primary key ``pk``.

    Return None if the row cannot be in the cache.
    """
    cached = plan.cached
    assert cached.options is not None and cached.key_field is not None
    token = cached.pk_token(pk)
    key = cached.key_token(pk) if strategy.moves_keys else token
    if token is None or key is None:
        return None
    value = pk if cached.key_field.keeps(pk) else cached.key.get_prep_value(pk)
    number = strategy.locate(value)
    if number is None:
        return None
    alias = runtime.shard(cached.options.group, number).alias
    scope = cached.scope(cached.place(alias), key)
    return RowAddress(scope, token, scope.object_name(token))


def read_together(
    plan: LookupPlan, reads: Sequence[ShardRead], reader: Reader, queryset: Any
) -> list[Any]:
    """Execute ``reads``, and return the model instances, in no particular order.

    If there is no row for a primary key, no instance is returned for it.

    :param reads: the reads that :func:`reads_by_pk` has prepared.
    :param queryset: a queryset without conditions.
    """
    level = request_cache.current()
    # Collects the rows that are found. Maps the ``kind`` of factories to a tuple: one of these
    # factories, rows, and the alias of each row's shard. The rows of all shards whose factories
    # have this kind are in the tuple. One call of the factory makes the instances of all of them,
    # which takes half as long as a call for each shard.
    parts: dict[object, tuple[InstanceFactory, list[Row], list[str]]] = {}

    def keep(use: ConnectionUse, rows: Collection[Row]) -> None:
        _, of_kind, aliases = parts.setdefault(use.factory.kind, (use.factory, [], []))
        of_kind += rows
        aliases += [use.alias] * len(rows)

    # Get the dicts of the first-level (per-request) cache before any row is read. If a row is
    # written during the read, the cache drops its dict. The old row is then put into the dropped
    # dict, where nobody finds it.
    homes: dict[str, dict[str, Any]] = {}
    if level is not None:
        hits = 0
        for read in reads:
            for pk, address in list(read.addresses.items()):
                entries = level.home(address.scope.guards[address.scope.home])
                remembered = None if queryset._for_write else entries.get(address.name)
                if remembered is None:
                    homes[address.name] = entries
                else:
                    keep(read.use, remembered)
                    del read.addresses[pk]
                    hits += 1
        if hits:
            reader.cache.statistics.add(plan.cached.type.name, l1_hits=hits)
    for fill in (True, False):
        batches = [read for read in reads if read.use.fill is fill and read.addresses]
        if batches:
            reader.read_rows(batches, to_fill=fill)
    missing: dict[Any, CachedRead] = {}
    for read in reads:
        if level is not None:
            for name, row in read.rows.items():
                homes[name][name] = [row]
                level.count(2)
        keep(read.use, read.rows.values())
        if read.requests:
            for pk, address in read.addresses.items():
                if request := read.requests.get(address.name):
                    missing[pk] = CachedRead(queryset, plan, read.use, ROWS, request, level)
    instances: list[Any] = []
    try:
        for factory, rows, aliases in parts.values():
            instances += factory.instances(rows, queryset, aliases)
        return instances + _from_database(missing, reader, queryset) if missing else instances
    finally:
        if missing:
            reader.release([read.request for read in missing.values()])


def _from_database(missing: dict[Any, CachedRead], reader: Reader, queryset: Any) -> list[Any]:
    """Read from the database the rows that are not in the cache, and store them in the cache."""
    reads: dict[str | None, CachedRead] = {}
    for read in missing.values():
        assert isinstance(read.request, ObjectRequest)
        reads[read.request.pk] = read
    plan = next(iter(reads.values())).plan
    factories = {read.alias: read.factory for read in reads.values()}
    instances: list[Any] = []
    misses: list[tuple[Any, Sequence[str], Sequence[Row]]] = []
    for alias, row in _driver_rows(queryset, plan, list(missing)):
        factory = factories.get(alias)
        if factory is None:
            factory = factories[alias] = InstanceFactory(plan, connections[alias])
        values = factory.values([row])
        read = reads[plan.pk_token(factory.field_values(values)[0])]
        if alias != read.alias:
            # The shard key has moved to another shard since the read was prepared. The request
            # names a cache entry of the old shard, so the row must not be stored under this name.
            instances += factory.instances(values, queryset)
            continue
        may_fill = read.request.outcome == MISS and read.fill
        if may_fill and read.request.state is not None:
            miss = to_fill(read, [row], values)
            misses += [miss] if miss is not None else []
        instances += read.result(values, keep=may_fill)
    if misses:
        reader.fill(misses)
    return instances


def _driver_rows(queryset: Any, plan: LookupPlan, pks: list[Any]) -> Iterable[tuple[str, Row]]:
    assert plan.cached.options is not None
    ids = ids_by_shard(plan.cached.options, pks)
    if ids is not None:
        return [
            pair
            for _, aliases, part in batch_rows(queryset, ids)
            for pair in zip(aliases, part, strict=True)
        ]
    rows = queryset.filter(pk__in=pks)
    rows._iterable_class = DriverRows
    return list(rows)
