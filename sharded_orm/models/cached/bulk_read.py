"""Reads of many rows by their primary keys through the cache, if the primary key is the shard key.

All rows are requested from the cache together, in one round trip per cache server. The rows that
the cache lacks are read from the database in one query, which costs one round trip per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.db import connections
from django.db.models.query import ModelIterable

from sharded_orm import runtime
from sharded_orm.cache import request_cache
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import HIT, MISS, ObjectRequest
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.cached_instances import InstanceFactory
from sharded_orm.models.cached.cached_read import ROWS, CachedRead, to_fill
from sharded_orm.models.cached.connection_state import ConnectionState, connection_state
from sharded_orm.models.cached.lookup_plan import LookupPlan, RowAddress
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


class ConnectionUse(NamedTuple):
    """The values that all cached reads of rows of one shard share; see :class:`CachedRead`."""

    alias: str
    state: ConnectionState
    factory: InstanceFactory
    fill: bool


#: A read of one row that is prepared: the values for its shard, and the request to the cache.
RowRead = tuple[ConnectionUse, ObjectRequest]


def reads_by_pk(plan: LookupPlan, pks: Iterable[Any]) -> tuple[dict[Any, RowRead], list[Any]]:
    """Prepare to read rows by their primary keys, which are the shard keys. Sends nothing to the cache.

    :returns: a dict from primary key to prepared read, and a list of the keys whose rows cannot be
        read through the cache.
    """
    assert plan.cached.options is not None
    group = plan.cached.options.group
    strategy = runtime.strategy(group)
    addresses = plan.addresses(strategy)
    uses: dict[int, ConnectionUse | None] = {}
    reads: dict[Any, RowRead] = {}
    others: list[Any] = []
    for pk in dict.fromkeys(pks):
        address = addresses.get(pk)
        if address is None:
            address = _address(plan, strategy, pk)
            if address is None:
                others.append(pk)
                continue
            addresses[pk] = address
        number, scope, token = address
        if number in uses:
            use = uses[number]
        else:
            use = uses[number] = _use(plan, runtime.shard(group, number).alias)
        if use is None:
            others.append(pk)
        else:
            reads[pk] = use, ObjectRequest(scope, use.factory, use.state, token)
    return reads, others


def _address(plan: LookupPlan, strategy: Strategy, pk: Any) -> RowAddress | None:
    """Return the address of the row with a primary key; None if no row that is cached can have it."""
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
    return RowAddress(number, cached.scope(cached.place(alias), key), token)


def _use(plan: LookupPlan, alias: str) -> ConnectionUse | None:
    state = connection_state(alias)
    fill = None if state is None else state.may_fill()
    if state is None or fill is None:
        return None
    return ConnectionUse(alias, state, state.factory(plan), fill)


def read_together(
    plan: LookupPlan, reads: dict[Any, RowRead], reader: Reader, queryset: Any
) -> list[Any]:
    """Return the instances that ``reads`` find. A key without a row has no instance.

    :param reads: one prepared read for each primary key, keyed by the key as the caller passed it.
        None has been sent yet.
    :param queryset: a queryset without conditions.
    """
    level = request_cache.current()
    rows_of: dict[str, tuple[InstanceFactory, list[Row]]] = {}
    # The entries of the first level (per request) are found before anything is read: see
    # RequestCache.
    homes: dict[Any, dict[str, Any]] = {}
    waiting = reads
    if level is not None:
        waiting = {}
        for pk, (use, request) in reads.items():
            homes[pk] = level.home(request.scope.guards[request.scope.home])
            remembered = None if queryset._for_write else homes[pk].get(request.name)
            if remembered is None:
                waiting[pk] = use, request
            else:
                _, rows = rows_of.setdefault(use.alias, (use.factory, []))
                rows += remembered
        if hits := len(reads) - len(waiting):
            reader.cache.statistics.add(plan.cached.type.name, l1_hits=hits)
    for fill in (True, False):
        requests = [request for use, request in waiting.values() if use.fill is fill]
        if requests:
            reader.read(requests, to_fill=fill)
    missing: dict[Any, CachedRead] = {}
    for pk, (use, request) in waiting.items():
        if request.outcome != HIT or request.rows is None:
            missing[pk] = CachedRead(
                queryset, plan, use.alias, use.factory, ROWS, request, use.fill, level
            )
            continue
        if level is not None:
            homes[pk][request.name] = request.rows
            level.count(2)
        _, rows = rows_of.setdefault(use.alias, (use.factory, []))
        rows += request.rows
    instances: list[Any] = []
    for factory, rows in rows_of.values():
        # Convert the rows of an alias in one call. This takes half the time of converting each row
        # by itself.
        instances += factory.instances(rows, queryset)
    return instances + _from_database(missing, reader, queryset) if missing else instances


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
            # names the cache entry of the earlier shard, so the row must not be stored there.
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
        return batch_rows(queryset, ids)
    rows = queryset.filter(pk__in=pks)
    rows._iterable_class = DriverRows
    return list(rows)
