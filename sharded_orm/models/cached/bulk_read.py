"""Reads of many rows by their primary keys through the cache, if the primary key is the shard key.

The cache is asked for all rows together: one round trip per cache server. The database is asked for
all rows that the cache lacks in one query, which costs one round trip per node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db.models.query import ModelIterable

from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import HIT, MISS
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.cached_read import CachedRead, to_fill


class DriverRows(ModelIterable):  # type: ignore[type-arg]  # generic in the stubs only
    """Yields the alias of each row, and the row as the driver returns it, which the cache stores."""

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        queryset: Any = self.queryset
        compiler = queryset.query.get_compiler(using=queryset.db)
        for rows in compiler.execute_sql(
            chunked_fetch=self.chunked_fetch, chunk_size=self.chunk_size
        ):
            for row in rows:
                yield queryset.db, row


def read_together(reads: dict[Any, CachedRead], reader: Reader, queryset: Any) -> dict[Any, Any]:
    """Return the instances of ``reads``, by primary key; keys without a row are left out.

    :param reads: reads of one row each, prepared but not sent, by primary key.
    :param queryset: a queryset without conditions.
    """
    instances: dict[Any, Any] = {}
    waiting: dict[Any, CachedRead] = {}
    for pk, read in reads.items():
        remembered = read.remembered()
        if remembered is None:
            waiting[pk] = read
            continue
        reader.cache.statistics.add(read.plan.cached.type.name, l1_hits=1)
        instances.update((pk, instance) for instance in remembered)
    for fill in (True, False):
        requests = [read.request for read in waiting.values() if read.fill is fill]
        if requests:
            reader.read(requests, to_fill=fill)
    for pk, read in [*waiting.items()]:
        rows = read.request.rows
        if read.request.outcome == HIT and rows is not None:
            del waiting[pk]
            instances.update((pk, instance) for instance in read.result(rows, keep=True))
    if waiting:
        instances |= _from_database(waiting, reader, queryset)
    return instances


def _from_database(waiting: dict[Any, CachedRead], reader: Reader, queryset: Any) -> dict[Any, Any]:
    reads = list(waiting.values())
    position = reads[0].plan.pk_positions[0]
    factories = {read.alias: read.factory for read in reads}
    missing = queryset.filter(pk__in=list(waiting))
    missing._iterable_class = DriverRows
    instances: dict[Any, Any] = {}
    misses: list[tuple[Any, Sequence[str], Sequence[Row]]] = []
    for alias, row in missing:
        factory = factories[alias]
        converted = factory.values([row])
        pk = converted[0][position]
        read = waiting[pk]
        may_fill = read.request.outcome == MISS and read.fill
        if may_fill and read.request.state is not None:
            miss = to_fill(read, [row], converted)
            misses += [miss] if miss is not None else []
        kept = converted if factory.decoded is not None else [row]
        (instances[pk],) = read.result(kept, keep=may_fill)
    if misses:
        reader.fill(misses)
    return instances
