"""Which rows of a cached model a write concerns, told from its query.

The shard key, the isolate key and the primary keys are read from the rows of an INSERT and
from the conditions of an UPDATE or DELETE. What these do not tell is read from the database
first, under a lock and in the same transaction, and the statement is then bound to the rows
that were read: no row that another transaction adds in between can be changed unnoticed.
Saving or deleting one instance costs no such reading: what the instance says of its keys is
added to the conditions, and only when no row matches, the database is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

from django.apps import apps
from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, FieldError
from django.db import NotSupportedError
from django.db.models import AutoField, CompositePrimaryKey, DateField, Field, UniqueConstraint
from django.db.models.constants import OnConflict
from django.db.models.sql import Query
from django.db.models.sql.constants import MULTI
from django.db.models.sql.subqueries import DeleteQuery, InsertQuery, UpdateQuery

from sharded_orm import runtime
from sharded_orm.cache.guards import MAX_LISTED
from sharded_orm.cache.markers import TransactionMarkers
from sharded_orm.models.cached.cached_model import CachedModel, cached_model
from sharded_orm.models.cached.conditions import all_pinned


def writes_of(connection: Any) -> TransactionMarkers:
    """What the open transaction of ``connection`` has written to cached models.

    ``connection`` must be inside a transaction, and a cache must be configured.
    """
    # Readers of this transaction leave the cache alone from now on.
    connection.wrote = True
    found: TransactionMarkers | None = connection.transaction_writes
    if found is None:
        cache = runtime.cache()
        assert cache is not None
        found = connection.transaction_writes = TransactionMarkers(cache, connection)
    return found


_writing: ContextVar[Any] = ContextVar("sharded_orm_writing", default=None)


@contextmanager
def writing(instance: Any) -> Iterator[None]:
    """While ``instance`` is saved or deleted: what it holds spares questions.

    Its values are tried as conditions of the statement, so that wrong ones do no harm.
    """
    token = _writing.set(instance)
    try:
        yield
    finally:
        _writing.reset(token)


class CacheObserver:
    """Tells the cache of writes; the :class:`~sharded_orm.backends.write_hooks.observer.WriteObserver`."""

    cached_model_of = staticmethod(cached_model)

    def write(
        self, cached: CachedModel, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Run the statement of ``compiler`` and register what it concerns."""
        connection = compiler.connection
        if not cached.home_alias_ok(connection.alias):
            return execute()
        statement = TrackedWrite(cached, compiler, writes_of(connection), counted)
        query = compiler.query
        if isinstance(query, InsertQuery):
            return statement.insert(execute)
        if isinstance(query, UpdateQuery | DeleteQuery):
            return statement.change(execute)
        statement.touch_all()
        return execute()

    @contextmanager
    def table_flush(self, connection: Any) -> Iterator[None]:
        """Around a flush: all rows of cached models on ``connection`` go."""
        cache = runtime.cache() if runtime.config().cache is not None else None
        found = [c for c in _installed() if c.home_alias_ok(connection.alias)] if cache else []
        if not found or cache is None:
            yield
            return
        writes = TransactionMarkers(cache, connection)
        for concern in found:
            writes.touch(concern.scope(concern.place(connection.alias), None), None, wide=True)
        try:
            writes.announce()
            yield
        finally:
            writes.over()


def _installed() -> list[CachedModel]:
    found = (cached_model(model) for model in apps.get_models())
    return list({id(one): one for one in found if one is not None}.values())


_ABSENT: Any = object()


class KeyColumns(NamedTuple):
    """Where in the table of a model is what counts here; None for what it has not.

    :param fixed: names of the fields without which a row is another one to the cache.
    :param isolate: the name of the isolate key.
    :param columns: of the primary key unless it is composite, of shard key and isolate key.
    """

    fixed: frozenset[str]
    isolate: str | None
    columns: tuple[str | None, str | None, str | None]


@lru_cache(maxsize=1024)
def _shape(model: Any) -> KeyColumns:
    """The shape of a cached model, which may be one of an earlier migration."""
    concern = cached_model(model)
    assert concern is not None

    def column(field: Any) -> str | None:
        try:
            found: str | None = model._meta.get_field(field.name).column if field else None
        except FieldDoesNotExist:
            return None
        return found

    parts = [part.field.name for part in concern.pk_fields]
    if concern.key is not None:
        parts.append(concern.key.name)
    return KeyColumns(
        frozenset(parts),
        concern.isolate.name if concern.isolate is not None else None,
        (column(concern.pk), column(concern.key), column(concern.isolate)),
    )


class AffectedRows(NamedTuple):
    """Rows as tokens. None stands for what is not known, and for more than can be listed.

    :param isolates: None, too, if the type has none.
    """

    keys: tuple[str, ...] | None
    pks: tuple[str, ...] | None
    isolates: tuple[str, ...] | None


class TrackedWrite:
    """One write of a cached model, in a transaction."""

    def __init__(
        self, concern: CachedModel, compiler: Any, writes: TransactionMarkers, counted: bool
    ) -> None:
        self._concern = concern
        self._counted = counted
        self._compiler = compiler
        self._query = compiler.query
        self._meta = self._query.get_meta()
        self._connection = compiler.connection
        self._writes = writes
        self._place = concern.place(self._connection.alias)

    # -- What there is to tell -------------------------------------------------------

    def touch_all(self) -> None:
        self._touch(None, None, None)

    def _touch(
        self,
        key: str | None,
        pks: Iterable[str] | None,
        isolates: Iterable[str] | None,
    ) -> None:
        """Register rows of one shard key (of a global type, all have None)."""
        concern = self._concern
        scope = concern.scope(self._place, key)
        if concern.isolate is None or isolates is None:
            self._writes.touch(scope, pks, wide=concern.isolate is not None)
        elif key is None and concern.type.sharded:
            self._writes.touch(scope, None, wide=True)
        else:
            narrow = [concern.scope(self._place, key, isolate) for isolate in isolates]
            self._writes.touch(scope, pks, isolates=narrow)

    def _touch_rows(self, rows: AffectedRows, also: Iterable[str] | None = ()) -> None:
        """Register rows. ``also`` are isolate keys that they get; None: unknown."""
        if rows.isolates is None or also is None:
            isolates = None
        else:
            isolates = (*rows.isolates, *also)
        if not self._concern.type.sharded:
            self._touch(None, rows.pks, isolates)
        elif rows.keys is None:
            self.touch_all()
        else:
            for key in rows.keys:
                self._touch(key, rows.pks, isolates)

    def _field(self, field: Any) -> Any:
        """``field`` as the query's model has it; it may be one of an earlier migration.

        :raises FieldDoesNotExist: it has none.
        """
        return self._meta.get_field(field.name)

    # -- INSERT ----------------------------------------------------------------------

    def insert(self, execute: Callable[[], Any]) -> Any:
        concern, query = self._concern, self._query
        try:
            key = self._field(concern.key) if concern.key is not None else None
            isolate = self._field(concern.isolate) if concern.isolate is not None else None
        except FieldDoesNotExist:
            self.touch_all()
            return execute()
        # One that replaces what is there, or a part of it.
        upsert = query.on_conflict is OnConflict.UPDATE
        if upsert and key is not None and not _unique_within(query, key.name):
            # The row that is there may have another key.
            self.touch_all()
            return execute()
        try:
            result = execute()
        except BaseException:
            # Of several rows or statements some may be stored; mostly all is rolled back.
            self._touch_new(key, isolate, None, upsert)
            raise
        made = None if key is None else _made(self._compiler, query.objs, key, result)
        self._touch_new(key, isolate, made, upsert)
        return result

    def _touch_new(self, key: Any, isolate: Any, made: list[Any] | None, upsert: bool) -> None:
        """Register new rows, which have by now what their fields do before they are saved.

        :param made: the shard keys that the database made, if it did.
        :param upsert: other rows of the same shard keys may have been changed.
        """
        concern = self._concern
        touched: dict[str | None, set[str] | None] = {}
        for number, obj in enumerate(self._query.objs):
            token = None
            if key is not None:
                value = getattr(obj, key.attname)
                if made is not None and value is None:
                    value = made[number]
                token = concern.key_token(value)
            isolates = touched.setdefault(token, set())
            if isolate is not None and isolates is not None:
                held = type(isolate).pre_save in _TOLD_BY_ROW
                narrow = concern.isolate_token(getattr(obj, isolate.attname)) if held else None
                if narrow is None:
                    touched[token] = None
                else:
                    isolates.add(narrow)
        for token, isolates in touched.items():
            if token is None and key is not None:
                self.touch_all()
            elif upsert:
                self._touch(token, None, None)
            else:
                self._touch(token, (), isolates)

    # -- UPDATE and DELETE -------------------------------------------------------------

    def change(self, execute: Callable[[], Any]) -> Any:
        concern, query = self._concern, self._query
        moved = False
        new: Any = _ABSENT
        fixed, isolate, _ = _shape(query.model)
        for field, _, value in getattr(query, "values", ()):
            if field.name in fixed:
                moved = True
            elif field.name == isolate:
                new = value
        if moved:
            # Its old name and its new one: too rare to look closer.
            self.touch_all()
            return execute()
        also: Iterable[str] | None = ()
        if new is not _ABSENT:
            token = concern.isolate_token(new)
            also = None if token is None else (token,)
        rows = self._told()
        if self._is_enough(rows):
            self._touch_rows(rows, also)
            return execute()
        guess = self._guess(rows, new) if self._counted else None
        if guess is not None:
            guessed, conditions = guess
            where = query.where.clone()
            for name, value in conditions:
                query.add_filter(name, value)
            try:
                changed = execute()
            except BaseException:
                # Thrown into this thread it may come when the statement is done.
                self._touch_rows(guessed, also)
                raise
            if changed == 1:
                self._touch_rows(guessed, also)
                return changed
            query.where = where
        return self._read_and_change(rows, also, execute)

    def _guess(
        self, told: AffectedRows, new: Any
    ) -> tuple[AffectedRows, list[tuple[str, Any]]] | None:
        """What is probably true of the one row that the statement is about, and the conditions
        that make sure of it: its isolate key is not about to change, or is as its instance says.

        Of one row only: when the conditions do not hold, nothing has happened yet.
        """
        concern = self._concern
        if told.pks is None or len(told.pks) != 1 or len(self._query.alias_map) > 1:
            return None
        instance = _writing.get()
        if instance is not None and (
            instance._meta.concrete_model is not concern.model
            or concern.pk_token(instance.pk) != told.pks[0]
        ):
            instance = None
        held = instance.__dict__ if instance is not None else {}
        keys, isolates = told.keys, told.isolates
        conditions: list[tuple[str, Any]] = []
        if keys is None and concern.type.sharded:
            value = held.get(concern.key.attname)
            token = concern.key_token(value)
            if token is None:
                return None
            keys = (token,)
            conditions.append((concern.key.attname, value))
        if isolates is None and concern.isolate is not None:
            name = concern.isolate.attname
            value = new if new is not _ABSENT else held.get(name, _ABSENT)
            token = None if value is _ABSENT else concern.isolate_token(value)
            if token is None:
                return None
            isolates = (token,)
            conditions.append((name, value))
        return AffectedRows(keys, told.pks, isolates), conditions

    def _told(self) -> AffectedRows:
        """What the conditions tell."""
        concern = self._concern
        pk, key, isolate = columns = _shape(self._query.model).columns
        pinned = all_pinned(self._query, columns)
        if not pinned:
            return AffectedRows(None, None, None)

        def tokens(column: str | None, of: Callable[[Any], str | None]) -> tuple[str, ...] | None:
            values = pinned.get(column) if column is not None else None
            if values is None or len(values) > MAX_LISTED:
                return None
            found = tuple(map(of, values))
            return None if None in found else found  # type: ignore[return-value]  # no None in it

        return AffectedRows(
            tokens(key, concern.key_token),
            tokens(pk, concern.pk_token),
            tokens(isolate, concern.isolate_token),
        )

    def _is_enough(self, rows: AffectedRows) -> bool:
        concern = self._concern
        if (rows.keys is None and concern.type.sharded) or rows.pks is None:
            return False
        return concern.isolate is None or rows.isolates is not None

    def _read_and_change(
        self, told: AffectedRows, also: Iterable[str] | None, execute: Callable[[], Any]
    ) -> Any:
        try:
            found = self._read(told)
        except EmptyResultSet:
            return 0
        except (FieldDoesNotExist, FieldError, NotSupportedError):
            found = None
        if found is None:
            # Too many, or a query that cannot be asked so.
            self._touch_rows(AffectedRows(told.keys, None, told.isolates), also)
            return execute()
        if not found:
            return 0
        by_key: dict[str | None, list[tuple[str | None, str | None]]] = {}
        for key, pk, isolate in found:
            by_key.setdefault(key, []).append((pk, isolate))
        for key, rows in by_key.items():
            if key is None and self._concern.type.sharded:
                self.touch_all()
                continue
            isolates = {isolate for _, isolate in rows}
            pks = {pk for pk, _ in rows}
            self._touch_rows(
                AffectedRows(
                    None if key is None else (key,),
                    None if None in pks else tuple(pks),  # type: ignore[arg-type]  # no None in it
                    None if None in isolates else tuple(isolates),  # type: ignore[arg-type]  # no None in it
                ),
                also,
            )
        return execute()

    def _select(self, names: list[str]) -> Any:
        """The query of the same rows, which locks them; at most one more than can be listed."""
        query = self._query
        # As SQLUpdateCompiler.pre_sql_setup makes it.
        select: Any = query.chain(klass=Query)
        select.clear_ordering(force=True)
        select.clear_select_clause()
        if select.group_by is not None:
            # Rows with conditions on aggregates cannot be selected together with their fields.
            inner = select
            inner.add_fields([field.attname for field in self._meta.pk_fields])
            select = Query(query.model)
            select.add_filter("pk__in", inner)
        select.add_fields(names)
        select.distinct = False
        select.select_for_update = self._connection.features.has_select_for_update
        select.set_limits(high=MAX_LISTED + 1)
        return select

    def _read(self, told: AffectedRows) -> list[tuple[str | None, str | None, str | None]] | None:
        """Key, primary key and isolate key of the rows that match, which are then locked, and
        all that the statement will change; None for more than can be listed.

        :raises EmptyResultSet: no row can match.
        """
        concern, query, connection = self._concern, self._query, self._connection
        parts = [self._field(part.field) for part in concern.pk_fields]
        key = self._field(concern.key) if concern.key is not None else None
        isolate = self._field(concern.isolate) if concern.isolate is not None else None
        wanted = [*parts, *(field for field in (key, isolate) if field is not None)]
        select = self._select([field.attname for field in wanted])
        compiler = select.get_compiler(connection=connection)
        rows = [row for chunk in compiler.execute_sql(MULTI) for row in chunk]
        if len(rows) > MAX_LISTED:
            return None
        converters = compiler.get_converters([column for column, _, _ in compiler.select])
        if converters:
            rows = list(compiler.apply_converters(rows, converters))
        size = len(parts)
        pks = [tuple(row[:size]) if size > 1 else row[0] for row in rows]
        if rows and (told.pks is None or len(set(pks)) < len(told.pks)):
            # Rows that are not locked may come to match in between.
            query.add_filter("pk__in", list(dict.fromkeys(pks)))
        return [
            (
                concern.key_token(row[size]) if key is not None else None,
                concern.pk_token(pk),
                concern.isolate_token(row[-1]) if isolate is not None else None,
            )
            for row, pk in zip(rows, pks, strict=True)
        ]


# What these store is what the row has afterwards; other fields may keep it to themselves.
_TOLD_BY_ROW = frozenset({Field.pre_save, DateField.pre_save})


def _made(compiler: Any, objs: Sequence[Any], key: Any, result: Any) -> list[Any] | None:
    """Values of ``key`` that the INSERT made, in the order of ``objs``."""
    returned = list(compiler.returning_fields or ())
    names = [field.attname for field in returned]
    if key.attname not in names or len(result) != len(objs):
        return None
    place = names.index(key.attname)
    return [row[place] for row in result]


def _unique_within(query: Any, key: str) -> bool:
    """Whether a row that is there, and that a new one is in conflict with, has its ``key``."""
    meta = query.get_meta()
    # A primary key that the database counts is in conflict with none.
    counted = isinstance(meta.pk, AutoField) and meta.pk not in query.fields
    return all(
        key in names for names in _unique(query.model) if not (counted and meta.pk.name in names)
    )


@lru_cache(maxsize=1024)
def _unique(model: Any) -> tuple[frozenset[str], ...]:
    """The names of fields that are unique together; none for a constraint of expressions."""
    meta = model._meta
    found = [frozenset(names) for names in meta.unique_together]
    if isinstance(meta.pk, CompositePrimaryKey):
        found.append(frozenset(part.name for part in meta.pk.fields))
    found += [frozenset({field.name}) for field in meta.local_concrete_fields if field.unique]
    for constraint in meta.constraints:
        if isinstance(constraint, UniqueConstraint):
            found.append(frozenset(constraint.fields))
    return tuple(found)
