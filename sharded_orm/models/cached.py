"""Querysets that read through the cache (Yupoo, Y13-Y16): one mix-in for sharded and global.

What is cached, by whom it is asked, and when it is not, is decided here. A hit becomes
instances exactly as Django makes them: what is cached is what the driver gave, before
Django's converters, and it passes those and ``from_db``.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import getattr_static
from itertools import chain
from typing import TYPE_CHECKING, Any, Self
from uuid import UUID

from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.base import ModelState
from django.db.models.fields.related_descriptors import ForeignKeyDeferredAttribute
from django.db.models.query import MAX_GET_RESULTS, ModelIterable
from django.db.models.query_utils import DeferredAttribute
from django.db.models.signals import post_init, pre_init
from django.db.models.sql import Query

from sharded_orm import runtime
from sharded_orm.backends.shared import ShardAliasMixin
from sharded_orm.cache import level1
from sharded_orm.cache.guards import digest
from sharded_orm.cache.memory import Decoded
from sharded_orm.cache.reading import Reader
from sharded_orm.cache.values import Row
from sharded_orm.cache.wants import HIT, MISS, Want, WantedList, WantedObject
from sharded_orm.models.caching import CachedModel, cached_model
from sharded_orm.models.fingerprint import QUERIES, asked, compiled

# What is asked for.
_ROWS, _COUNT, _EXISTS = "rows", "count", "exists"
# Values that can be looked up as they are, without asking their field.
_KEYS = frozenset({int, str, UUID})
# What a fresh query has, also as a copy of one.
_FRESH = frozenset(Query(None).__dict__) | {"_annotation_select_cache", "filter_is_sticky"}

_reader: Reader | None = None


def _current_reader() -> Reader | None:
    """The reader of this process's cache; None without one."""
    global _reader
    cache = runtime.cache()
    found = _reader
    if found is None or found.cache is not cache:
        found = _reader = Reader(cache) if cache is not None and cache.options.read else None
    return found


def _forget_reader() -> None:
    # In a child: another thread of its parent may have held one of the reader's locks.
    global _reader
    _reader = None


os.register_at_fork(after_in_child=_forget_reader)


# -- Rows to instances -----------------------------------------------------------------


class Connected:
    """What a connection object is for the rows of cached models. Of one thread, like it."""

    def __init__(self, connection: ShardAliasMixin) -> None:
        self._connection: Any = connection
        self._makers: dict[Any, Maker] = {}
        self._is_mysql = connection.vendor == "mysql"
        options = connection.settings_dict.get("OPTIONS") or {}
        level = options.get("isolation_level", "read committed") if self._is_mysql else None
        #: Of MySQL, lower case; None: what the server says, or SQLite's, which is the strictest.
        self._isolation = level.lower() if isinstance(level, str) else None

    def may_fill(self) -> bool | None:
        """Whether what is read now may be stored; None: the cache must not be used at all."""
        if self._isolation == "read uncommitted":
            return None  # What it reads may never have been.
        connection = self._connection
        group = connection.group_wrapper
        if connection.connection is None:
            in_transaction = not connection.settings_dict["AUTOCOMMIT"]
        else:
            in_transaction = connection._in_atomic_block or not connection.autocommit
        if not in_transaction and not (group is not None and group.levels):
            return True
        if connection.wrote or connection.needs_rollback or self._isolation != "read committed":
            # It sees what it wrote, or what stood there when it began; or an error.
            return None
        return False

    def maker(self, plan: Plan) -> Maker:
        found = self._makers.get(plan)
        if found is None:
            found = self._makers[plan] = Maker(plan, self._connection)
        return found

    # Of repair.Sessions:

    def judges(self, writer: Any) -> bool:
        return bool(self._connection.judges(writer))

    def gone(self, writers: Sequence[Any]) -> set[Any]:
        return set(self._connection.sessions_gone(writers))


class Maker:
    """Makes instances of a model from rows of a connection; a :class:`Format` for the cache."""

    def __init__(self, plan: Plan, connection: Any) -> None:
        model = plan.model
        fields = model._meta.concrete_fields
        self._connection = connection
        self._alias = connection.alias
        self._is_plain = _is_plain(model)
        self._names = [field.attname for field in fields]
        columns = [field.get_col(model._meta.db_table) for field in fields]
        compiler = connection.ops.compiler("SQLCompiler")(Query(model), connection, self._alias)
        # As RawModelIterable does it.
        self._converters = [
            (position, tuple(converters), column)
            for position, (converters, column) in compiler.get_converters(columns).items()
        ]
        self._model = model
        self.fingerprint = plan.fingerprint(connection.vendor)
        self.width = len(fields)
        # What a field's own converter makes may be changed by whoever gets it, or depend on
        # more than the row. Django's depend on the time zone of the connection.
        self.decoded: Decoded | None = None
        if not any(column.get_db_converters(connection) for column in columns):
            self.decoded = plan.decoded(connection.vendor, connection.timezone_name)

    def values(self, rows: Sequence[Row]) -> list[Row]:
        """The rows after Django's converters."""
        if not self._converters:
            return list(rows)
        connection = self._connection
        found: list[Row] = []
        for row in map(list, rows):
            for position, converters, column in self._converters:
                value = row[position]
                for converter in converters:
                    value = converter(value, column, connection)
                row[position] = value
            found.append(row)
        return found

    def instances(self, values: Sequence[Row]) -> list[Any]:
        """Instances as ``Model.from_db`` makes them."""
        model, alias, names = self._model, self._alias, self._names
        # Hardly any project has receivers of these, and to ask for those of a model is slow.
        if not self._is_plain or (
            (pre_init.receivers or post_init.receivers)
            and (pre_init.has_listeners(model) or post_init.has_listeners(model))
        ):
            return [model.from_db(alias, names, list(row)) for row in values]
        # What from_db and Model.__init__ come to for such a model, in a fifth of the time.
        found = []
        new = object.__new__
        for row in values:
            instance = new(model)
            state = ModelState()
            state.adding = False
            state.db = alias
            attributes = instance.__dict__
            attributes["_state"] = state
            attributes.update(zip(names, row, strict=True))
            found.append(instance)
        return found


@lru_cache(maxsize=1024)
def _is_plain(model: Any) -> bool:
    """Whether setting the attributes of a new instance runs no code but Django's."""
    return (
        model.from_db.__func__ is Model.from_db.__func__  # type: ignore[attr-defined]  # a classmethod
        and model.__init__ is Model.__init__
        and super(Model, model).__init__ is object.__init__  # a mix-in behind Model
        and model.__new__ is object.__new__
        and model.__setattr__ is object.__setattr__
        and all(
            type(getattr_static(model, field.attname))
            in (DeferredAttribute, ForeignKeyDeferredAttribute)
            for field in model._meta.concrete_fields
        )
    )


def _connected(alias: str) -> Connected | None:
    """What is known of the connection; None if it has no moment before COMMIT."""
    connection = connections[alias]
    found: Connected | None = connection.__dict__.get("_for_cache")
    if found is None and isinstance(connection, ShardAliasMixin):
        # With the connection, as the converters are bound to it.
        found = Connected(connection)
        connection.__dict__["_for_cache"] = found
    return found


# -- Queries to names ------------------------------------------------------------------


class Plan:
    """How a model is looked up in the cache. Immutable, shared by all threads."""

    def __init__(self, model: Any, cached: CachedModel) -> None:
        self.cached = cached
        self.model = model
        meta = model._meta
        fields = list(meta.concrete_fields)
        self.pk_positions = [fields.index(part.field) for part in cached.pk_fields]
        key = cached.key
        self.key_position = None if key is None else fields.index(key)
        self.key_column = None if key is None else key.column
        self.isolate_column = None if cached.isolate is None else cached.isolate.column
        self.pk_columns = [part.field.column for part in cached.pk_fields]
        #: Equality of these is one object.
        self.object_columns = {*self.pk_columns, *([key.column] if key is not None else ())}
        #: The names in get(): True of the primary key, False of the shard key alone.
        self.names: dict[str, bool] = {}
        if key is not None:
            self.names |= {key.name: False, key.attname: False}
        if len(cached.pk_fields) == 1:
            pk = cached.pk
            self.names |= {pk.name: True, pk.attname: True, "pk": True}
        self.key_is_pk = key is not None and len(cached.pk_fields) == 1 and key == cached.pk
        self._decoded: dict[tuple[str, str], Decoded] = {}

    def fingerprint(self, vendor: str) -> str:
        """Drivers of two kinds of databases give different values for one row."""
        return digest(self.cached.type.fingerprint, vendor)[:8]

    def decoded(self, vendor: str, timezone: str) -> Decoded:
        return self._decoded.setdefault((vendor, timezone), Decoded())

    def pk_token(self, values: Row) -> str | None:
        positions = self.pk_positions
        if len(positions) == 1:
            return self.cached.pk_token(values[positions[0]])
        return self.cached.pk_token(tuple(values[position] for position in positions))


_plans: dict[Any, Plan | None] = {}


def _plan(model: Any) -> Plan | None:
    cached = cached_model(model)
    if cached is None:
        return None
    found = _plans.get(model)
    if found is None or found.cached is not cached:
        if model._meta.apps is not cached.model._meta.apps:
            return None  # A historical model reads what a migration has made of its table.
        found = _plans[model] = Plan(model, cached)
    return found


class _Read:
    """A queryset that is to be read through the cache, now."""

    __slots__ = (
        "alias", "entries", "fill", "key", "kind", "level", "maker", "plan", "queryset", "want",
    )  # fmt: skip

    def __init__(
        self, queryset: Any, plan: Plan, alias: str, maker: Maker, kind: str, want: Want, fill: bool
    ) -> None:
        self.queryset = queryset
        self.plan = plan
        self.alias = alias
        self.maker = maker
        self.kind = kind
        self.want = want
        self.fill = fill
        self.level = level1.current()
        if self.level is not None:
            scope = want.scope
            self.entries: dict[str, Any] = self.level.home(scope.guards[scope.home])
            if isinstance(want, WantedObject):
                self.key = want.name
            elif isinstance(want, WantedList):
                self.key = f"{scope.guards[-1]} {want.query}"

    def remembered(self) -> Any:
        """The result as level 1 has it, or None."""
        if self.level is None or self.queryset._for_write:
            # What is to be deleted, or created if it is missing, is told by now, not by then.
            return None
        found = self.entries.get(self.key)
        return self._instances(found) if found is not None and self.kind is _ROWS else found

    def result(self, rows: list[Row], *, keep: bool) -> list[Any]:
        """Instances; ``rows`` are values if the maker has ``decoded``."""
        if keep and self.level is not None:
            want, entries = self.want, self.entries
            entries[self.key] = rows
            self.level.count(1 + len(rows))
            if isinstance(want, WantedList) and want.names is not None:
                # Its objects, for whoever asks for one by its key.
                entries.update(zip(want.names, ([row] for row in rows), strict=True))
        return self._instances(rows)

    def _instances(self, rows: list[Row]) -> list[Any]:
        maker = self.maker
        instances = maker.instances(rows if maker.decoded is not None else maker.values(rows))
        known = self.queryset._known_related_objects
        if known:
            _set_known(self.queryset.model, known, instances)
        return instances

    def keep_scalar(self, value: int) -> int:
        if self.level is not None:
            self.entries[self.key] = value
            self.level.count(1)
        return value


def _set_known(model: Any, known: dict[Any, Any], instances: list[Any]) -> None:
    # As ModelIterable does it.
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
                continue  # May happen in qs1 | qs2.
            setattr(instance, field.name, related)


def _prepare(queryset: Any, plan: Plan, kind: str) -> _Read | None:
    """How to read ``queryset`` through the cache; None: it is not cached."""
    query = queryset.query
    if query.select_for_update:
        # Whoever locks rows wants to see them as they are, here and in what follows.
        level1.forget()
        return None
    if queryset._uncached or level1.is_uncached():
        return None
    if kind is _ROWS and (
        queryset._iterable_class is not ModelIterable or queryset._fields is not None
    ):
        return None
    found = asked(query, ordered=kind is _ROWS)
    if isinstance(found, str):
        return None
    cached = plan.cached
    alias = queryset.db
    key: str | None = None
    if plan.key_column is not None:
        values = found.equal.get(plan.key_column, ())
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
    elif not cached.home_alias_ok(alias):
        return None
    connected = _connected(alias)
    if connected is None:
        return None
    fill = connected.may_fill()
    if fill is None:
        return None
    place = cached.place(alias)
    maker = connected.maker(plan)
    want: Want
    if kind is _ROWS and found.only_equal and found.equal.keys() == plan.object_columns:
        equal = found.equal
        pk = _one_pk(plan, equal)
        if pk is None:
            return None
        want = WantedObject(cached.scope(place, key), maker, connected, pk)
    else:
        text = found.text
        if text is None:
            text = compiled(query, alias)
            if text is None:
                return None
        isolate = None
        if plan.isolate_column is not None:
            values = found.equal.get(plan.isolate_column, ())
            if len(values) == 1:
                isolate = cached.isolate_token(values[0])
        want = WantedList(
            cached.scope(place, key, isolate),
            maker,
            connected,
            digest(text, maker.fingerprint, kind),
            scalar=kind is not _ROWS,
        )
    return _Read(queryset, plan, alias, maker, kind, want, fill)


def _one_pk(plan: Plan, equal: dict[str, list[Any]]) -> str | None:
    values = [equal[column] for column in plan.pk_columns]
    if any(len(each) != 1 for each in values):
        return None
    first = values[0][0]
    if len(values) == 1:
        return plan.cached.pk_token(first)
    return plan.cached.pk_token(tuple(each[0] for each in values))


def _rows_of(query: Any, alias: str) -> list[Row]:
    """What the database says, as the driver gives it."""
    return list(chain.from_iterable(query.get_compiler(using=alias).execute_sql()))


def _answer(read: _Read, reader: Reader) -> list[Any]:
    """The instances of a read that was made: from the cache, or the database."""
    want = read.want
    if want.outcome == HIT:
        assert want.rows is not None
        return read.result(want.rows, keep=True)
    maker = read.maker
    rows = _rows_of(read.queryset.query, read.alias)
    values = rows if maker.decoded is None else maker.values(rows)
    may_fill = want.outcome == MISS and read.fill
    if may_fill and want.state is not None:
        _fill(read, reader, rows, values if maker.decoded is not None else maker.values(rows))
    return read.result(values, keep=may_fill)


def _fill(read: _Read, reader: Reader, rows: Sequence[Row], values: Sequence[Row]) -> None:
    plan, want = read.plan, read.want
    cached, position = plan.cached, plan.key_position
    pks = []
    for row in values:
        pk = plan.pk_token(row)
        if pk is None:
            return
        # What the database takes for equal, names in the cache may not.
        if position is not None and cached.key_token(row[position]) != want.scope.key:
            return
        pks.append(pk)
    reader.fill([(want, pks, rows)])


# -- The queryset ----------------------------------------------------------------------


class CachedQuerySet(QuerySet[Any, Any]):
    """Reads rows of models with ``cache = True`` through the cache; others as Django does."""

    _uncached = False

    if TYPE_CHECKING:  # Django's own, which its stubs leave out.
        _db: str | None
        _fields: Any
        _hints: dict[str, Any]
        _prefetch_related_lookups: tuple[Any, ...]
        _result_cache: list[Any] | None

        def _chain(self) -> Self: ...

    def uncached(self) -> Self:
        """The same query, answered by the database, whatever the cache holds."""
        clone = self._chain()
        clone._uncached = True
        return clone

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]  # not in the stubs
        if self._uncached:
            clone._uncached = True
        return clone

    def _names_alias(self) -> bool:
        """Whether ``using()`` has named an alias that decides where the query runs."""
        return self._db is not None

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            read = CachedQuerySet._prepared(self)  # Routed already.
            if read is not None:
                self._result_cache = self._read_cached(read)
        super()._fetch_all()

    def _read_cached(self, read: _Read) -> list[Any] | None:
        reader = _current_reader()
        if reader is None:
            return None
        found: list[Any] | None = read.remembered()
        if found is not None:
            reader.cache.statistics.add(read.want.scope.type.name, l1_hits=1)
            return found
        reader.read([read.want], to_fill=read.fill)
        return _answer(read, reader)

    def _scalar(self, kind: str, ask: Callable[[], int]) -> int:
        plan = _plan(self.model)
        read = None if plan is None else _prepare(self, plan, kind)
        reader = None if read is None else _current_reader()
        if read is None or reader is None:
            return ask()
        found = read.remembered()
        want = read.want
        if found is not None:
            reader.cache.statistics.add(want.scope.type.name, l1_hits=1)
            return int(found)
        reader.read([want], to_fill=read.fill)
        if want.outcome == HIT and want.value is not None:
            return read.keep_scalar(want.value)
        value = int(ask())
        if want.outcome == MISS and read.fill:
            want.value = value
            reader.fill([(want, (), ())])
            read.keep_scalar(value)
        return value

    def count(self) -> int:
        if self._result_cache is not None:
            return super().count()
        return self._scalar(_COUNT, super().count)

    def exists(self) -> bool:
        if self._result_cache is not None:
            return super().exists()
        return bool(self._scalar(_EXISTS, super().exists))

    def get(self, *args: Any, **kwargs: Any) -> Any:
        if not args and (found := self._get_by_key(kwargs)) is not None:
            return found
        return super().get(*args, **kwargs)

    def _prepared(self) -> _Read | None:
        """How to read the rows through the cache; None: they are not cached."""
        plan = _plan(self.model)
        return None if plan is None else _prepare(self, plan, _ROWS)

    def _get_by_key(self, named: dict[str, Any]) -> Any:
        """``get(user_id=…, pk=…)`` of a fresh queryset, without building a query.

        None if it is anything else; raises DoesNotExist.
        """
        plan = _plan(self.model)
        if plan is None:
            return None
        cached = plan.cached
        key_value: Any = None
        pk_value: Any = None
        for name, value in named.items():
            is_pk = plan.names.get(name)
            if is_pk is None or type(value) not in _KEYS:
                return None
            if is_pk:
                pk_value = value
            else:
                key_value = value
        if plan.key_is_pk:
            key_value = pk_value
        if pk_value is None or len(named) != (
            1 if plan.key_is_pk or plan.key_column is None else 2
        ):
            return None
        query = self.query
        if (
            query.where.children
            or query.alias_map
            or query.annotations
            or query.extra
            or type(query) not in QUERIES
            or not query.__dict__.keys() <= _FRESH
            or self._names_alias()
            or self._uncached
            or self._fields is not None
            or self._iterable_class is not ModelIterable
            or self._prefetch_related_lookups
            or level1.is_uncached()
            or not _is_routine(type(self))
        ):
            return None
        pk = cached.pk_token(pk_value)
        key: str | None = None
        if plan.key_column is not None:
            key = cached.key_token(key_value)
            if key is None or pk is None:
                return None
            assert cached.options is not None
            shard = runtime.locate(cached.options.group, cached.key.get_prep_value(key_value))
            if shard is None:
                return None
            alias = shard.alias
        else:
            alias = self.db
            if pk is None or not cached.home_alias_ok(alias):
                return None
        connected = _connected(alias)
        reader = _current_reader()
        if connected is None or reader is None:
            return None
        fill = connected.may_fill()
        if fill is None:
            return None
        maker = connected.maker(plan)
        want = WantedObject(
            cached.scope(cached.place(alias), key),
            maker,
            connected,
            pk,
        )
        read = _Read(self, plan, alias, maker, _ROWS, want, fill)
        found = read.remembered()
        if found is not None:
            reader.cache.statistics.add(cached.type.name, l1_hits=1)
        else:
            reader.read([want], to_fill=fill)
            if want.outcome != HIT:
                # What Django's get() asks.
                asking = self.filter(**named)
                asking.query.clear_ordering(force=True)
                asking.query.set_limits(high=MAX_GET_RESULTS)
                read.queryset = asking
            found = _answer(read, reader)
        if not found:
            raise self.model.DoesNotExist(
                f"{self.model._meta.object_name} matching query does not exist."
            )
        return found[0]


_OF_GET = (
    "filter", "_filter_or_exclude", "_filter_or_exclude_inplace", "_chain", "_clone",
    "_fetch_all", "__iter__",
)  # fmt: skip
_ROUTINE: dict[type, bool] = {}


def _is_routine(kind: Any) -> bool:
    """Whether nothing that ``get()`` passes on its way is overridden by the project."""
    found = _ROUTINE.get(kind)
    if found is None:
        found = _ROUTINE[kind] = all(
            getattr(kind, name).__module__.startswith(("django.db.models.", "sharded_orm.models."))
            for name in _OF_GET
        )
    return found


# -- Several at once -------------------------------------------------------------------


def fetch_together(*querysets: Any) -> None:
    """Evaluate querysets of cached models with one multi-get per cache server (Yupoo, P8).

    ::

        photos, tags = Photo.objects.filter(user_id=1), Tag.objects.filter(user_id=1)
        fetch_together(photos, tags)

    Afterwards each has its rows, as after ``list()``. Those that are not cached, or whose
    results are missing, ask the database one after the other.
    """
    reader = _current_reader()
    reads: list[_Read] = []
    for queryset in querysets:
        if reader is None or queryset._result_cache is not None:
            continue
        read = queryset._prepared() if isinstance(queryset, CachedQuerySet) else None
        if read is None:
            continue
        found = read.remembered()
        if found is not None:
            reader.cache.statistics.add(read.plan.cached.type.name, l1_hits=1)
            queryset._result_cache = found
        else:
            reads.append(read)
    if reader is not None and reads:
        for fill in (True, False):
            some = [read for read in reads if read.fill is fill]
            if some:
                reader.read([read.want for read in some], to_fill=fill)
        for read in reads:
            read.queryset._result_cache = _answer(read, reader)
    for queryset in querysets:
        queryset._fetch_all()  # The others, and what is prefetched.
