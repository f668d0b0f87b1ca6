"""Reads of many rows by their primary keys through the cache, if the primary key is the shard key.

All rows are requested from the cache together, in one round trip per cache server. The rows that
the cache lacks are read from the database in one query, which costs one round trip per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.db import connections
from django.db.models.query import ModelIterable

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.cache import request_cache
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import MISS, ObjectRequest, RowAddress, RowBatch
from sharded_orm.cache.values import Row, are_storable
from sharded_orm.models.cached.cached_instances import InstanceFactory
from sharded_orm.models.cached.cached_read import names_row
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
    pks = list(dict.fromkeys(pks))
    strategy = runtime.strategy(plan.cached.options.group)
    known = plan.addresses(strategy)
    if new := [pk for pk in pks if pk not in known]:
        known |= _addresses(plan, strategy, new)
    reads: dict[str, ShardRead | None] = {}
    others: list[Any] = []
    for pk in pks:
        address = known.get(pk)
        if address is None:
            others.append(pk)
            continue
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


def _addresses(plan: LookupPlan, strategy: Strategy, pks: list[Any]) -> dict[Any, RowAddress]:
    """Return a dict that maps primary keys to the addresses of their rows.

    A key whose row cannot be in the cache is left out. If the strategy reads the shards of keys
    from a table, it needs few queries for all keys.
    """
    cached = plan.cached
    assert cached.options is not None and cached.key_field is not None
    keeps, prepare = cached.key_field.keeps, cached.key.get_prep_value
    tokens = {pk: token for pk in pks if (token := cached.pk_token(pk)) is not None}
    values = {pk: pk if keeps(pk) else prepare(pk) for pk in tokens}
    numbers = strategy.locate_many(values.values())
    group = runtime.group(cached.options.group)
    addresses = {}
    for pk, token in tokens.items():
        number = numbers[values[pk]]
        if number is None:
            continue
        key = cached.key_token(pk) if strategy.moves_keys else token
        assert key is not None  # The shard key is the primary key, which has a token.
        scope = cached.scope(cached.place(runtime.shard_in(group, number).alias), key)
        addresses[pk] = RowAddress(scope, token, scope.object_name(token))
    return addresses


def read_together(
    plan: LookupPlan, reads: Sequence[ShardRead], reader: Reader, queryset: Any
) -> list[Any]:
    """Execute ``reads``, and return the model instances, in no particular order.

    If there is no row for a primary key, no instance is returned for it.

    :param reads: the reads that :func:`reads_by_pk` has prepared.
    :param queryset: a queryset without conditions.
    """
    level = request_cache.current()
    found = _FoundRows()
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
                    found.add(read.use.factory, [read.use.alias] * len(remembered), remembered)
                    del read.addresses[pk]
                    hits += 1
        if hits:
            reader.cache.statistics.add(plan.cached.type.name, l1_hits=hits)
    missing: dict[Any, tuple[ShardRead, ObjectRequest]] = {}
    try:
        for fill in (True, False):
            batches = [read for read in reads if read.use.fill is fill and read.addresses]
            if batches:
                reader.read_rows(batches, to_fill=fill)
        for read in reads:
            if level is not None:
                for name, row in read.rows.items():
                    homes[name][name] = [row]
                    level.count(2)
            found.add(read.use.factory, [read.use.alias] * len(read.rows), read.rows.values())
            if read.requests:
                for pk, address in read.addresses.items():
                    if request := read.requests.get(address.name):
                        missing[pk] = read, request
        if missing:
            for request, row in _from_database(missing, plan, reader, queryset, found):
                if level is not None:
                    homes[request.name][request.name] = [row]
                    level.count(2)
    finally:
        reader.release([request for read in reads for request in read.requests.values()])
    instances: list[Any] = []
    for factory, rows, aliases in found.of_kind.values():
        instances += factory.instances(rows, queryset, aliases)
    return instances


class _FoundRows:
    """Rows that a read has found, of several shards.

    One call of a factory serves all rows whose factories have the same ``kind``. This takes half as
    long as a call for each shard.
    """

    def __init__(self) -> None:
        #: Maps the ``kind`` of factories to a tuple: one of these factories, the rows, and the
        #: alias of each row's shard.
        self.of_kind: dict[object, tuple[InstanceFactory, list[Row], list[str]]] = {}

    def add(self, factory: InstanceFactory, aliases: Iterable[str], rows: Iterable[Row]) -> None:
        """Add ``rows`` of the shards ``aliases``, one alias for each row."""
        _, of_kind, aliases_of_kind = self.of_kind.setdefault(factory.kind, (factory, [], []))
        of_kind += rows
        aliases_of_kind += aliases


def _from_database(
    missing: dict[Any, tuple[ShardRead, ObjectRequest]],
    plan: LookupPlan,
    reader: Reader,
    queryset: Any,
    found: _FoundRows,
) -> list[tuple[ObjectRequest, Row]]:
    """Read from the database the rows that are not in the cache, and store them in the cache.

    :param missing: maps each primary key to its read and its request.
    :param found: gets the decoded rows.
    :returns: pairs (request, decoded row) of the rows that the first-level cache may keep.
    """
    requests: dict[str | None, tuple[ShardRead, ObjectRequest]] = {}
    for pair in missing.values():
        requests[pair[1].pk] = pair
    factories = {read.use.alias: read.use.factory for read, _ in missing.values()}
    answers = _FoundRows()
    for aliases, rows in _driver_rows(queryset, plan, list(missing)):
        for alias, row in zip(aliases, rows, strict=True):
            if alias not in factories:
                factories[alias] = InstanceFactory(plan, connections[alias])
            answers.add(factories[alias], (alias,), (row,))
    misses: list[tuple[ObjectRequest, Sequence[str], Sequence[Row]]] = []
    kept: list[tuple[ObjectRequest, Row]] = []
    for factory, of_kind, aliases in answers.of_kind.values():
        values = factory.values(of_kind)
        found.add(factory, aliases, values)
        keys = factory.key_values(values)
        for alias, row, decoded, fields in zip(aliases, of_kind, values, keys, strict=True):
            read, request = requests[plan.pk_token(fields)]
            if alias != read.use.alias:
                # The shard key has moved to another shard since the read was prepared. The request
                # names a cache entry of the old shard, so the row must not be stored under it.
                continue
            if request.outcome != MISS or not read.use.fill:
                # Do not store the row, because the cache must not be used for this row now, or not
                # by this connection.
                continue
            if are_storable((decoded,)):
                kept.append((request, decoded))
            if request.state is not None and names_row(plan, request, fields):
                misses.append((request, (request.pk,), (row,)))
    if misses:
        reader.fill(misses)
    return kept


def _driver_rows(
    queryset: Any, plan: LookupPlan, pks: list[Any]
) -> Iterable[tuple[Iterable[str], Iterable[Row]]]:
    """Read rows from the database, and return them in parts.

    Each part is a pair: the alias of each row's shard, and the rows as the driver returns them.
    """
    assert plan.cached.options is not None
    ids = ids_by_shard(plan.cached.options, pks)
    if ids is not None:
        return [(aliases, part) for _, aliases, part in batch_rows(queryset, ids)]
    rows = queryset.filter(pk__in=pks)
    rows._iterable_class = DriverRows
    pairs = list(rows)
    return [([alias for alias, _ in pairs], [row for _, row in pairs])]
