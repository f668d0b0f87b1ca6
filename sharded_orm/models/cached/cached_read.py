"""One read of a queryset through the cache.

:func:`prepare` decides whether a queryset can be read through the cache, and makes the request to
the cache. :func:`answer` turns the result into model instances.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from django.db.models.query import ModelIterable

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.cache import request_cache
from sharded_orm.cache.guards import digest
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import HIT, MISS, ListRequest, ObjectRequest
from sharded_orm.cache.values import Row, are_storable
from sharded_orm.models.cached.cached_instances import InstanceFactory
from sharded_orm.models.cached.connection_state import ConnectionUse, connection_use
from sharded_orm.models.cached.lookup_plan import LookupPlan
from sharded_orm.models.cached.query_fingerprint import compiled_text, fingerprint_of

#: What a read returns: model instances for ``ROWS``, the result of ``count()`` for ``COUNT``, that
#: of ``exists()`` for ``EXISTS``, or a tuple of numbers for ``NUMBERS``.
ROWS, COUNT, EXISTS, NUMBERS = "rows", "count", "exists", "numbers"


class CachedRead:
    """A queryset that is about to be read through the cache.

    :param plan: the key fields of the queryset's model, with their positions and columns.
    :param use: the alias of the database with the rows, and how its connection may use the cache.
    :param kind: :data:`ROWS`, :data:`COUNT`, :data:`EXISTS` or :data:`NUMBERS`.
    :param request: the request to the cache.
    :param level: the first-level cache of the current request; None if there is none.
    :param query_database: called if the cache does not have the result. It queries the database,
        and returns the rows as the driver returns them, or the number or numbers. Pass None if
        the caller queries the database itself.
    """

    __slots__ = (
        "alias", "entries", "factory", "fill", "key", "kind", "level", "plan", "query_database",
        "queryset", "request",
    )  # fmt: skip

    def __init__(
        self,
        queryset: Any,
        plan: LookupPlan,
        use: ConnectionUse,
        kind: str,
        request: ObjectRequest | ListRequest,
        level: request_cache.RequestCache | None,
        query_database: Callable[[], Any] | None = None,
    ) -> None:
        self.queryset = queryset
        self.plan = plan
        self.alias = use.alias
        self.factory = use.factory
        self.kind = kind
        self.request = request
        self.fill = use.fill
        self.level = level
        self.query_database = query_database
        if level is not None:
            scope = request.scope
            self.entries: dict[str, Any] = level.home(scope.guards[scope.home])
            if isinstance(request, ObjectRequest):
                self.key = request.name
            elif isinstance(request, ListRequest):
                self.key = f"{scope.guards[-1]} {request.query}"

    def remembered(self) -> Any:
        """Return the result from the first-level (per-request) cache; None if it is not there.

        The result is a list of instances; for the other kinds it is a number or a tuple of numbers.
        """
        if self.level is None or self.queryset._for_write:
            # delete() and get_or_create() set _for_write. They read rows in order to write. So they
            # must see the current rows, and not those that an earlier read has left in the cache.
            return None
        entry = self.entries.get(self.key)
        return self._instances(entry) if entry is not None and self.kind is ROWS else entry

    def result(self, rows: list[Row], *, keep: bool) -> list[Any]:
        """Build model instances from ``rows``, which ``factory.values()`` has decoded.

        :param keep: whether to store the rows in the first-level (per-request) cache. The instances
            of later reads share the values of these rows, so all values must be immutable.
        """
        if keep and self.level is not None:
            request, entries = self.request, self.entries
            entries[self.key] = rows
            self.level.count(1 + len(rows))
            if isinstance(request, ListRequest) and request.object_names is not None:
                # The result is a list of rows. Store each row also under the name of its own cache
                # entry, for later reads by primary key.
                entries.update(zip(request.object_names, ([row] for row in rows), strict=True))
        return self._instances(rows)

    def _instances(self, rows: list[Row]) -> list[Any]:
        return instances_of(self.factory, rows, self.queryset)

    def keep_value(self, value: Any) -> Any:
        """Store a number, or a tuple of numbers, in the first-level (per-request) cache; return it."""
        if self.level is not None:
            self.entries[self.key] = value
            self.level.count(1)
        return value


def instances_of(factory: InstanceFactory, rows: Sequence[Row], queryset: Any) -> list[Any]:
    """Return the model instances of ``rows``, which ``factory.values()`` has decoded."""
    instances = factory.instances(rows, queryset)
    known = queryset._known_related_objects
    if known:
        _set_known(queryset.model, known, instances)
    return instances


def _set_known(model: Any, known: dict[Any, Any], instances: list[Any]) -> None:
    # Set the related objects that the queryset knows already, such as the album in album.photos,
    # on the instances. Django's ModelIterable does the same.
    for field, objects in known.items():
        names = [
            field.attname if name == "self" else model._meta.get_field(name).attname
            for name in field.from_fields
        ]
        identity = operator.attrgetter(*names)
        for instance in instances:
            if field.is_cached(instance):
                continue
            try:
                related = objects[identity(instance)]
            except KeyError:
                # The queryset does not know the related object of this instance. For example,
                # album.photos.all() | Photo.objects.filter(stars=5) knows the album of some of its
                # photos only.
                continue
            setattr(instance, field.name, related)


def prepare(
    queryset: Any,
    plan: LookupPlan,
    kind: str,
    query_database: Callable[[], Any] | None = None,
) -> CachedRead | None:
    """Prepare to read ``queryset`` through the cache; return None if it cannot be cached.

    No cache server is called.

    :param plan: the key fields of the queryset's model, with their positions and columns.
    :param kind: :data:`ROWS`, :data:`COUNT` or :data:`EXISTS`.
    :param query_database: returns the number, for :data:`COUNT` and :data:`EXISTS`.
    """
    query = queryset.query
    if query.select_for_update:
        # The query has select_for_update(), so it must read the current rows from the database.
        # Empty the first-level (per-request) cache, so that later reads of this request do not
        # return older values of the locked rows.
        request_cache.forget()
        return None
    if queryset._uncached or request_cache.is_uncached():
        return None
    if kind is ROWS and (
        queryset._iterable_class is not ModelIterable or queryset._fields is not None
    ):
        return None
    fingerprint = fingerprint_of(query, ordered=kind is ROWS)
    if isinstance(fingerprint, str):
        return None
    cached = plan.cached
    alias = queryset.db
    key: str | None = None
    if plan.key_column is not None:
        values = fingerprint.equal.get(plan.key_column, ())
        if len(values) != 1:
            return None
        key = cached.key_token(values[0])
        if key is None:
            return None
        if queryset._names_alias():
            assert cached.options is not None
            shard = runtime.locate(cached.options.group, values[0])
            if shard is None or shard.alias != alias:
                return None
    elif not cached.caches_alias(alias):
        return None
    use = connection_use(plan, connection_of(alias))
    if use is None:
        return None
    place = cached.place(alias)
    request: ObjectRequest | ListRequest
    if kind is ROWS and fingerprint.only_equal and fingerprint.equal.keys() == plan.object_columns:
        equal = fingerprint.equal
        pk = _one_pk(plan, equal)
        if pk is None:
            return None
        request = ObjectRequest(cached.scope(place, key), use.factory, use.state, pk)
    else:
        text = fingerprint.text
        if text is None:
            text = compiled_text(query, alias)
            if text is None:
                return None
        isolate = None
        if plan.isolate_column is not None:
            values = fingerprint.equal.get(plan.isolate_column, ())
            if len(values) == 1:
                isolate = cached.isolate_token(values[0])
        request = ListRequest(
            cached.scope(place, key, isolate),
            use.factory,
            use.state,
            digest(text, use.factory.fingerprint, kind),
            scalar=kind is not ROWS,
        )
    level = request_cache.current()
    if kind is ROWS:
        query_database = partial(_rows_of, query, alias)
    return CachedRead(queryset, plan, use, kind, request, level, query_database)


def _one_pk(plan: LookupPlan, equal: dict[str, list[Any]]) -> str | None:
    values = [equal[column] for column in plan.pk_columns]
    if any(len(column_values) != 1 for column_values in values):
        return None
    parts = tuple(column_values[0] for column_values in values)
    return plan.cached.pk_token(parts[0] if len(parts) == 1 else parts)


def _rows_of(query: Any, alias: str) -> list[Row]:
    """Query the database on ``alias`` and return the rows as the driver returns them."""
    return list(chain.from_iterable(query.get_compiler(using=alias).execute_sql()))


def rows_through_cache(read: CachedRead, reader: Reader) -> list[Any]:
    """Return the model instances of ``read``, from the cache or from the database."""
    instances: list[Any] | None = read.remembered()
    if instances is not None:
        reader.cache.statistics.add(read.request.scope.type.name, l1_hits=1)
        return instances
    reader.read([read.request], to_fill=read.fill)
    return answer(read, reader)


def value_through_cache(read: CachedRead, reader: Reader) -> Any:
    """Return the number or numbers that ``read`` finds, from the cache or from the database."""
    remembered = read.remembered()
    request = read.request
    if remembered is not None:
        reader.cache.statistics.add(request.scope.type.name, l1_hits=1)
        return remembered
    reader.read([request], to_fill=read.fill)
    if request.outcome == HIT and request.value is not None:
        return read.keep_value(request.value)
    assert read.query_database is not None
    value = read.query_database()
    if request.outcome == MISS and read.fill:
        request.value = value
        reader.fill([(request, (), ())])
        read.keep_value(value)
    return value


def answer(read: CachedRead, reader: Reader) -> list[Any]:
    """Return the model instances of ``read``.

    The caller must already have called :meth:`Reader.read` with ``read.request``. If the cache did
    not have the result, this function queries the database. It then stores the rows in the cache if
    ``read.fill`` is True and ``request.state`` is not None. ``Reader.read()`` leaves ``state`` None
    if the result must not be stored.
    """
    request = read.request
    if request.outcome == HIT:
        assert request.rows is not None
        return read.result(request.rows, keep=True)
    assert read.query_database is not None
    may_fill = request.outcome == MISS and read.fill
    try:
        rows = read.query_database()
        values = read.factory.values(rows)
        if may_fill and request.state is not None:
            miss = to_fill(read, rows, values)
            if miss is not None:
                reader.fill([miss])
    finally:
        reader.release([request])
    # Rows of the cache are immutable, but a driver may return a list.
    return read.result(values, keep=may_fill and are_storable(values))


def to_fill(
    read: CachedRead, rows: Sequence[Row], values: Sequence[Row]
) -> tuple[ObjectRequest | ListRequest, list[str], Sequence[Row]] | None:
    """Return a tuple to pass to :meth:`Reader.fill`, so that it stores ``rows`` in the cache.

    The tuple contains the request, the tokens of the primary keys, and the rows. Return None if the
    rows must not be stored.

    :param rows: the rows as the driver returned them.
    :param values: the same rows, which ``factory.values()`` has decoded.
    """
    plan, request = read.plan, read.request
    pks = []
    for row in read.factory.key_values(values):
        pk = plan.pk_token(row)
        if pk is None or not names_row(plan, request, row):
            return None
        pks.append(pk)
    return request, pks, rows


def names_row(plan: LookupPlan, request: ObjectRequest | ListRequest, row: Row) -> bool:
    """Whether the names of the cache entries in ``request`` are right for ``row``.

    The names contain the token of the shard key in the conditions. The token of the row's shard key
    may be another one, although the database considers the two keys equal. Then the names are wrong
    for this row, and nothing may be stored under them.

    :param row: a row that ``factory.key_values()`` has returned.
    """
    position = plan.key_position
    return position is None or plan.cached.key_token(row[position]) == request.scope.key
