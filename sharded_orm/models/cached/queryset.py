"""Querysets of sharded and global models that read through the cache (Yupoo, Y13-Y16).

:mod:`sharded_orm.models.cached.cached_read` decides whether a query is cached, and makes the
request to the cache.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from django.db.models import QuerySet
from django.db.models.query import ModelIterable
from django.db.models.sql import Query

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.cache import request_cache
from sharded_orm.cache.guards import digest
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import ListRequest
from sharded_orm.models.cached.bulk_read import read_together, reads_by_pk
from sharded_orm.models.cached.cached_read import (
    COUNT,
    EXISTS,
    NUMBERS,
    ROWS,
    CachedRead,
    answer,
    prepare,
    rows_through_cache,
    value_through_cache,
)
from sharded_orm.models.cached.connection_state import connection_use
from sharded_orm.models.cached.lookup_plan import LookupPlan, plan_of
from sharded_orm.models.cached.query_fingerprint import QUERIES
from sharded_orm.models.plans.id_batch import batch_instances, ids_by_shard
from sharded_orm.models.sharding.bound_key import is_any_bound
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.routing.placement_uses import PlacementUses, recorded_uses

# The types of key values by which rows can be read without building a query.
_KEYS = frozenset({int, str, UUID})
# The names of the attributes in the __dict__ of a new Query or of a copy of one. If a query has any
# other attribute, a method such as distinct() has changed the query.
_FRESH = frozenset(Query(None).__dict__) | {
    "_annotation_select_cache", "bound_key", "filter_is_sticky",
}  # fmt: skip

_reader: Reader | None = None


def current_reader() -> Reader | None:
    """Return the object through which this process reads from the cache.

    Return None if no cache is configured, or if the cache's option ``READ`` is off.
    """
    global _reader
    cache = runtime.cache()
    reader = _reader
    if reader is None or reader.cache is not cache:
        reader = _reader = Reader(cache) if cache is not None and cache.options.read else None
    return reader


def _forget_reader() -> None:
    # Called in a forked child. At the fork, another thread of the parent may have held a lock of
    # the reader, and nobody would release this lock in the child. So the child makes a new reader.
    global _reader
    _reader = None


os.register_at_fork(after_in_child=_forget_reader)


# -- The queryset ----------------------------------------------------------------------


class CachedQuerySet(QuerySet[M]):
    """A queryset that reads rows of models with ``cache = True`` through the cache.

    For other models it behaves like Django's queryset.
    """

    _uncached = False

    if TYPE_CHECKING:  # Members of Django's QuerySet that are missing in its type stubs.
        _db: str | None
        _fields: Any
        _hints: dict[str, Any]
        _prefetch_related_lookups: tuple[Any, ...]
        _result_cache: list[Any] | None

        def _chain(self) -> Self: ...

    def uncached(self) -> Self:
        """Return a queryset that reads from the database only, and stores nothing in the cache."""
        clone = self._chain()
        clone._uncached = True
        return clone

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]  # missing in Django's type stubs
        if self._uncached:
            clone._uncached = True
        return clone

    def _names_alias(self) -> bool:
        """Whether ``using()`` has fixed the database alias of the query."""
        return self._db is not None

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            # Call _prepared() of this class, not an override of a subclass. The override would
            # choose the shard of the query again, although it has been chosen already.
            read = CachedQuerySet._prepared(self)
            reader = None if read is None else current_reader()
            if read is not None and reader is not None:
                self._result_cache = rows_through_cache(read, reader)
        super()._fetch_all()

    def _scalar(self, kind: str, query_database: Callable[[], int]) -> int:
        plan = plan_of(self.model)
        read = None
        if plan is not None:
            read = prepare(self, plan, kind, lambda: int(query_database()))
        reader = None if read is None else current_reader()
        if read is None or reader is None:
            return query_database()
        return int(value_through_cache(read, reader))

    def count(self) -> int:
        if self._result_cache is not None:
            return super().count()
        return self._scalar(COUNT, super().count)

    def exists(self) -> bool:
        if self._result_cache is not None:
            return super().exists()
        return bool(self._scalar(EXISTS, super().exists))

    def numbers_of_key(
        self, key: Any, text: str, query_database: Callable[[], Iterable[int]]
    ) -> tuple[int, ...]:
        """Return numbers that are computed from the rows of one shard key, through the cache.

        For example, the ids of a user's newest photos. Each write to a row of the model with this
        shard key makes the cached numbers void. Costs one round trip to the cache. If this queryset
        has conditions, or cannot be read through the cache now, the numbers come from the database.

        :param key: the shard key.
        :param text: the name of these numbers in the cache. Use different texts for numbers that
            are computed differently.
        :param query_database: queries the database for the numbers, without the cache.
        """
        plan = None if self._is_uncached() else plan_of(self.model)
        reader = None if plan is None else current_reader()
        if plan is None or reader is None or is_any_bound():
            return tuple(query_database())
        read = self._read_of_numbers(plan, key, text) if self._has_no_options() else None
        if read is None:
            return tuple(query_database())
        read.query_database = lambda: tuple(query_database())
        numbers: tuple[int, ...] = value_through_cache(read, reader)
        return numbers

    numbers_of_key.queryset_only = True  # type: ignore[attr-defined]  # a function type has no such attribute

    def _read_of_numbers(self, plan: LookupPlan, key_value: Any, text: str) -> CachedRead | None:
        """Prepare to read numbers through the cache; return None if that is impossible."""
        cached = plan.cached
        key = cached.key_token(key_value)
        if key is None or cached.options is None:
            return None
        group = cached.options.group
        if runtime.strategy(group).moves_keys:
            return None
        shard = runtime.locate(group, cached.key.get_prep_value(key_value))
        use = None if shard is None else connection_use(plan, connection_of(shard.alias))
        if use is None:
            return None
        request = ListRequest(
            cached.scope(cached.place(use.alias), key),
            use.factory,
            use.state,
            digest(text, use.factory.fingerprint, NUMBERS),
            numbers=True,
        )
        return CachedRead(self, plan, use, NUMBERS, request, request_cache.current())

    def _prepared(self) -> CachedRead | None:
        """Prepare to read the rows through the cache; return None if the query cannot be cached."""
        plan = plan_of(self.model)
        return None if plan is None else prepare(self, plan, ROWS)

    def _is_uncached(self) -> bool:
        return self._uncached or request_cache.is_uncached()

    def _has_no_options(self) -> bool:
        """Whether this is a plain queryset of all rows, without any condition, order or option.

        Also return False if the project's queryset class overrides one of the methods in
        ``_SKIPPED``, because reads by primary key would not call the project's method.
        """
        return (
            not self._names_alias()
            and self._fields is None
            and self._iterable_class is ModelIterable
            and not self._prefetch_related_lookups
            and _is_routine(type(self))
            and self._is_query_fresh()
        )

    def _is_query_fresh(self) -> bool:
        """Whether no call has changed the query since the queryset was made."""
        query = self.query
        return not (
            query.where.children
            or query.alias_map
            or query.annotations
            or query.extra
            or type(query) not in QUERIES
            or not query.__dict__.keys() <= _FRESH
        )

    def _rows_by_pk(self, ids: list[Any]) -> dict[Any, M] | None:
        """Read rows by primary key through the cache, for a model whose primary key is the shard key.

        Return None if this queryset cannot be read in this way.
        """
        if self.model._meta.ordering or not self._has_no_options():
            return None
        plan = None if self._is_uncached() else plan_of(self.model)
        reader = None if plan is None or not plan.key_is_pk else current_reader()
        if plan is None or reader is None:
            options = shard_options(self.model)
            by_shard = None if options is None else ids_by_shard(options, ids)
            if by_shard is None:
                return None
            rows = batch_instances(self, by_shard)
        else:
            rows = self._cached_rows(plan, reader, ids)
        pks = map(operator.attrgetter(self.model._meta.pk.attname), rows)
        return dict(zip(pks, rows, strict=True))

    def _cached_rows(self, plan: LookupPlan, reader: Reader, ids: list[Any]) -> list[M]:
        others: list[Any] = []
        if not _KEYS.issuperset(map(type, ids)):
            others = [pk for pk in ids if type(pk) not in _KEYS]
            ids = [pk for pk in ids if type(pk) in _KEYS]
        reads, uncached = reads_by_pk(plan, ids)
        rows: list[M] = read_together(plan, reads, reader, self)
        uncached += others
        if uncached:
            rows += self.uncached().filter(pk__in=uncached)
        return rows


# Methods that Django's reads call, but reads by primary key do not.
_SKIPPED = (
    "filter", "_filter_or_exclude", "_filter_or_exclude_inplace", "_chain", "_clone",
    "_fetch_all", "__iter__",
)  # fmt: skip
_ROUTINE: dict[type, bool] = {}


def _is_routine(kind: Any) -> bool:
    """Whether the project overrides none of the methods in ``_SKIPPED``.

    Reads by primary key do not call these methods. If a project overrides one of them, the read
    must call the project's method, so it must not be a read by primary key.

    :param kind: a queryset class.
    """
    is_routine = _ROUTINE.get(kind)
    if is_routine is None:
        is_routine = _ROUTINE[kind] = all(
            getattr(kind, name).__module__.startswith(("django.db.models.", "sharded_orm.models."))
            for name in _SKIPPED
        )
    return is_routine


# -- Several querysets together --------------------------------------------------------


def fetch_together(*querysets: Any) -> None:
    """Evaluate several querysets with few round trips to the cache servers (Yupoo, P8).

    ::

        photos, tags = Photo.objects.filter(user_id=1), Tag.objects.filter(user_id=1)
        fetch_together(photos, tags)

    After the call, the rows of each queryset are loaded, as after ``list()``. All querysets of
    cached models are read from the cache first, together, in one round trip to each cache server.
    Then each queryset that the cache could not answer queries the database, one after the other.
    """
    with recorded_uses(PlacementUses()) as uses:
        looked_up = _look_up_together(querysets)
    if not uses.hold():
        # A shard key has moved to another shard during the look-up, so the rows may be out of date.
        # Let the loop below read them again.
        for queryset in looked_up:
            queryset._result_cache = None
    for queryset in querysets:
        # If a queryset has no rows yet, this call queries the database. It also prefetches related
        # rows.
        queryset._fetch_all()


def _look_up_together(querysets: Iterable[Any]) -> list[Any]:
    """Read ``querysets`` through the cache, and return those that can be read in this way.

    The cache is asked for all of them together. If it does not have the rows of a queryset, they
    are read from the database.
    """
    reader = current_reader()
    if reader is None:
        return []
    looked_up: list[Any] = []
    reads: list[tuple[Any, CachedRead]] = []
    for queryset in querysets:
        if not isinstance(queryset, CachedQuerySet) or queryset._result_cache is not None:
            continue
        read = queryset._prepared()
        if read is None:
            continue
        looked_up.append(queryset)
        instances = read.remembered()
        if instances is not None:
            reader.cache.statistics.add(read.plan.cached.type.name, l1_hits=1)
            queryset._result_cache = instances
        else:
            reads.append((queryset, read))
    try:
        for fill in (True, False):
            requests = [read.request for _, read in reads if read.fill is fill]
            if requests:
                reader.read(requests, to_fill=fill)
        for queryset, read in reads:
            queryset._result_cache = answer(read, reader)
    finally:
        # After an error, some requests still have a lease (the right to store an entry in the
        # cache), because answer() was not called for them. Give these leases back.
        reader.release([read.request for _, read in reads])
    return looked_up
