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
from sharded_orm.models.cached.lookup_plan import LookupPlan
from sharded_orm.models.plans.batch import batch_rows, ids_by_shard


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
    place: str
    state: ConnectionState
    factory: InstanceFactory
    fill: bool


def reads_by_pk(
    queryset: Any, plan: LookupPlan, pks: Iterable[Any]
) -> tuple[dict[Any, CachedRead], list[Any]]:
    """Prepare to read rows by their primary keys, which are the shard keys. Sends nothing to the cache.

    :param queryset: a queryset without conditions.
    :returns: a dict from primary key to prepared read, and a list of the keys whose rows cannot be
        read through the cache.
    """
    cached = plan.cached
    assert cached.options is not None and cached.key_field is not None
    group, key_field = cached.options.group, cached.key_field
    strategy = runtime.strategy(group)
    level = request_cache.current()
    uses: dict[int, ConnectionUse | None] = {}
    reads: dict[Any, CachedRead] = {}
    others: list[Any] = []
    for pk in dict.fromkeys(pks):
        token = cached.pk_token(pk)
        key = cached.key_token(pk) if strategy.moves_keys else token
        if token is None or key is None:
            others.append(pk)
            continue
        number = strategy.locate(pk if key_field.keeps(pk) else cached.key.get_prep_value(pk))
        if number is not None and number not in uses:
            uses[number] = _use(plan, runtime.shard(group, number).alias)
        use = None if number is None else uses[number]
        if use is None:
            others.append(pk)
            continue
        request = ObjectRequest(cached.scope(use.place, key), use.factory, use.state, token)
        reads[pk] = CachedRead(
            queryset, plan, use.alias, use.factory, ROWS, request, use.fill, level
        )
    return reads, others


def _use(plan: LookupPlan, alias: str) -> ConnectionUse | None:
    state = connection_state(alias)
    fill = None if state is None else state.may_fill()
    if state is None or fill is None:
        return None
    return ConnectionUse(alias, plan.cached.place(alias), state, state.factory(plan), fill)


def read_together(reads: dict[Any, CachedRead], reader: Reader, queryset: Any) -> list[Any]:
    """Return the instances that ``reads`` find. A key without a row has no instance.

    :param reads: one prepared read for each primary key, keyed by the key as the caller passed it.
        Each reads one row, and none has been sent yet.
    :param queryset: a queryset without conditions.
    """
    instances: list[Any] = []
    waiting: dict[Any, CachedRead] = {}
    for pk, read in reads.items():
        remembered = None if read.level is None else read.remembered()
        if remembered is None:
            waiting[pk] = read
        else:
            reader.cache.statistics.add(read.plan.cached.type.name, l1_hits=1)
            instances += remembered
    for fill in (True, False):
        requests = [read.request for read in waiting.values() if read.fill is fill]
        if requests:
            reader.read(requests, to_fill=fill)
    missing: dict[Any, CachedRead] = {}
    hits: dict[str, list[CachedRead]] = {}
    for pk, read in waiting.items():
        if read.request.outcome != HIT:
            missing[pk] = read
        elif read.level is None:
            hits.setdefault(read.alias, []).append(read)
        else:
            instances += read.result(read.request.rows or [], keep=True)
    for of_alias in hits.values():
        # Convert the rows of an alias in one call. This takes half the time of converting each row
        # by itself.
        rows = [row for read in of_alias for row in read.request.rows or ()]
        instances += of_alias[0].result(rows, keep=False)
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
