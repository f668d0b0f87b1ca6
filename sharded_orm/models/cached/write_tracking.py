"""Finds out which rows of a cached model a write affects.

The cache needs the shard key, the isolate key (which divides the cached lists of a shard key) and
the primary key of each written row. For an INSERT, the keys come from the new instances; for an
UPDATE or DELETE, from the conditions of the statement. If the conditions do not determine a key,
the rows are first read and locked in the same transaction. The statement is then limited to these
rows, because it must not change a row that another transaction adds after the read.

``save()`` and ``delete()`` of an instance avoid this read: the keys of the instance are added to
the conditions of the statement. If no row matches these conditions, the keys were wrong, and the
rows are read after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, FieldError
from django.db import NotSupportedError
from django.db.models import DateField, Field
from django.db.models.constants import OnConflict
from django.db.models.sql import Query
from django.db.models.sql.constants import MULTI

from sharded_orm.cache.guards import MAX_LISTED
from sharded_orm.cache.markers import TransactionMarkers
from sharded_orm.models.cached.cached_model import CachedModel, cached_model
from sharded_orm.models.cached.conditions import all_pinned
from sharded_orm.models.cached.insert_keys import conflicts_within, returned_keys

_writing: ContextVar[Any] = ContextVar("sharded_orm_writing", default=None)


class writing:
    """Context manager for a block that saves or deletes ``instance``.

    The cache must know the keys of each written row. Within the block, they are taken from
    ``instance``, without a query, and added to the conditions of the statement. If the keys are
    wrong, the statement matches no row, and the keys are queried after all.

    This is a class, because a generator function with ``@contextmanager`` takes three times as
    long.
    """

    __slots__ = ("_instance", "_token")

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __enter__(self) -> None:
        self._token = _writing.set(self._instance)

    def __exit__(self, *exc_info: object) -> None:
        _writing.reset(self._token)


_ABSENT: Any = object()


class KeyColumns(NamedTuple):
    """The fields of a model that determine the names of its cache entries.

    :param fixed: names of the fields that identify a row in the cache: primary key and shard key.
    :param isolate: the name of the field of the isolate key, which divides the cached lists of a
        shard key; None if the model has no isolate key.
    :param columns: the columns of the primary key, the shard key and the isolate key, in this
        order. None for a key that the model does not have, and for a composite primary key.
    """

    fixed: frozenset[str]
    isolate: str | None
    columns: tuple[str | None, str | None, str | None]


@lru_cache(maxsize=1024)
def _key_columns(model: Any) -> KeyColumns:
    """Return the :class:`KeyColumns` of ``model``.

    :param model: a cached model, or the historical model that a migration makes of a cached model.
    """
    cached = cached_model(model)
    assert cached is not None

    def column(field: Any) -> str | None:
        try:
            name: str | None = model._meta.get_field(field.name).column if field else None
        except FieldDoesNotExist:
            return None
        return name

    parts = [part.field.name for part in cached.pk_fields]
    if cached.key is not None:
        parts.append(cached.key.name)
    return KeyColumns(
        frozenset(parts),
        cached.isolate.name if cached.isolate is not None else None,
        (column(cached.pk), column(cached.key), column(cached.isolate)),
    )


class AffectedRows(NamedTuple):
    """The keys of the rows that a write affects.

    Each key is a token, the text that represents it in names of cache entries. An attribute is None
    if its keys are unknown or too many to list, or if the model has no such key.

    :param keys: tokens of the shard keys.
    :param pks: tokens of the primary keys.
    :param isolates: tokens of the isolate keys.
    """

    keys: tuple[str, ...] | None
    pks: tuple[str, ...] | None
    isolates: tuple[str, ...] | None


class TrackedWrite:
    """One statement that writes rows of a cached model, inside of a transaction.

    :param compiler: Django's SQL compiler of the statement.
    :param markers: collects the affected rows, and announces their keys to the cache before COMMIT.
    :param counted: whether executing the statement returns the number of rows that matched.
    """

    def __init__(
        self, cached: CachedModel, compiler: Any, markers: TransactionMarkers, counted: bool
    ) -> None:
        self._cached = cached
        self._counted = counted
        self._compiler = compiler
        self._query = compiler.query
        self._meta = self._query.get_meta()
        self._connection = compiler.connection
        self._markers = markers
        self._place = cached.place(self._connection.alias)

    # -- Recording the affected rows ---------------------------------------------------

    def touch_all(self) -> None:
        self._touch(None, None, None)

    def _touch(
        self,
        key: str | None,
        pks: Iterable[str] | None,
        isolates: Iterable[str] | None,
    ) -> None:
        """Record in ``self._markers`` that rows with one shard key are affected.

        A *token* represents a value in the names of cache entries.

        :param key: the token of the shard key; None for a global model, or if the shard key is
            unknown.
        :param pks: tokens of the rows' primary keys; None for all rows with the shard key.
        :param isolates: tokens of the rows' isolate keys; None if they are unknown.
        """
        cached = self._cached
        scope = cached.scope(self._place, key)
        if cached.isolate is None or isolates is None:
            self._markers.touch(scope, pks, wide=cached.isolate is not None)
        elif key is None and cached.type.sharded:
            self._markers.touch(scope, None, wide=True)
        else:
            narrow = [cached.scope(self._place, key, isolate) for isolate in isolates]
            self._markers.touch(scope, pks, isolates=narrow)

    def _touch_rows(self, rows: AffectedRows, new_isolates: Iterable[str] | None = ()) -> None:
        """Record in ``self._markers`` that the write affects ``rows``.

        :param new_isolates: tokens of the isolate keys that the write gives to the rows. Empty (the
            default) if the write changes no isolate key; None if they are unknown.
        """
        if rows.isolates is None or new_isolates is None:
            isolates = None
        else:
            isolates = (*rows.isolates, *new_isolates)
        if not self._cached.type.sharded:
            self._touch(None, rows.pks, isolates)
        elif rows.keys is None:
            self.touch_all()
        else:
            for key in rows.keys:
                self._touch(key, rows.pks, isolates)

    def _field(self, field: Any) -> Any:
        """Return the field of the query's model that has the same name as ``field``.

        The two fields can be different objects, because the query's model may be a historical model
        of a migration, which has its own fields.

        :raises FieldDoesNotExist: the query's model has no field of this name.
        """
        return self._meta.get_field(field.name)

    # -- INSERT ----------------------------------------------------------------------

    def insert(self, execute: Callable[[], Any]) -> Any:
        cached, query = self._cached, self._query
        try:
            key = self._field(cached.key) if cached.key is not None else None
            isolate = self._field(cached.isolate) if cached.isolate is not None else None
        except FieldDoesNotExist:
            self.touch_all()
            return execute()
        upsert = query.on_conflict is OnConflict.UPDATE
        if upsert and key is not None and not conflicts_within(query, key.name):
            # The upsert may update a stored row whose shard key differs from that of the new row.
            # The shard key of the stored row is not known here, so all rows of the table count as
            # affected.
            self.touch_all()
            return execute()
        try:
            result = execute()
        except BaseException:
            # The failed INSERT may have stored some rows, and the caller may commit them. So the
            # rows count as affected.
            self._touch_new(key, isolate, None, upsert)
            raise
        keys = None if key is None else returned_keys(self._compiler, query.objs, key, result)
        self._touch_new(key, isolate, keys, upsert)
        return result

    def _touch_new(self, key: Any, isolate: Any, keys: list[Any] | None, upsert: bool) -> None:
        """Record in ``self._markers`` that the rows of an INSERT are affected.

        Call this after ``pre_save()`` of the fields, which may set attributes of the instances.

        :param key: the field of the shard key; None for a global model.
        :param isolate: the field of the isolate key; None if the model has no isolate key.
        :param keys: the shard keys that the database generated, one for each instance; None if the
            INSERT returned no generated shard keys.
        :param upsert: whether the INSERT may also have updated stored rows of the same shard keys.
            Nobody knows which rows, so all rows with these shard keys count as affected.
        """
        cached = self._cached
        touched: dict[str | None, set[str] | None] = {}
        for number, obj in enumerate(self._query.objs):
            token = None
            if key is not None:
                value = getattr(obj, key.attname)
                if keys is not None and value is None:
                    value = keys[number]
                token = cached.key_token(value)
            isolates = touched.setdefault(token, set())
            if isolate is not None and isolates is not None:
                isolate_token = None
                if type(isolate).pre_save in _SETS_ATTRIBUTE:
                    isolate_token = cached.isolate_token(getattr(obj, isolate.attname))
                if isolate_token is None:
                    touched[token] = None
                else:
                    isolates.add(isolate_token)
        for token, isolates in touched.items():
            if token is None and key is not None:
                self.touch_all()
            elif upsert:
                self._touch(token, None, None)
            else:
                self._touch(token, (), isolates)

    # -- UPDATE and DELETE -------------------------------------------------------------

    def change(self, execute: Callable[[], Any]) -> Any:
        cached, query = self._cached, self._query
        changes_identity = False
        new_isolate: Any = _ABSENT
        fixed, isolate, _ = _key_columns(query.model)
        for field, _, value in getattr(query, "values", ()):
            if field.name in fixed:
                changes_identity = True
            elif field.name == isolate:
                new_isolate = value
        if changes_identity:
            # The statement changes a primary key or shard key, so the names of cache entries
            # change, too. Because this is rare, the old and the new names are not determined: all
            # rows of the table count as affected.
            self.touch_all()
            return execute()
        new_isolates: Iterable[str] | None = ()
        if new_isolate is not _ABSENT:
            token = cached.isolate_token(new_isolate)
            new_isolates = None if token is None else (token,)
        rows = self._rows_by_conditions()
        if self._is_enough(rows):
            self._touch_rows(rows, new_isolates)
            return execute()
        guess = self._guess(rows, new_isolate) if self._counted else None
        if guess is not None:
            guessed_rows, conditions = guess
            where = query.where.clone()
            for name, value in conditions:
                query.add_filter(name, value)
            try:
                changed = execute()
            except BaseException:
                # In spite of the exception, the database may have executed the statement. A Unix
                # signal handler can raise an error after the statement was sent. So the rows count
                # as affected.
                self._touch_rows(guessed_rows, new_isolates)
                raise
            if changed == 1:
                self._touch_rows(guessed_rows, new_isolates)
                return changed
            query.where = where
        return self._read_and_change(rows, new_isolates, execute)

    def _guess(
        self, rows: AffectedRows, new_isolate: Any
    ) -> tuple[AffectedRows, list[tuple[str, Any]]] | None:
        """Guess those keys of the written row that are not in the conditions of the statement.

        The conditions must contain one primary key. The guessed shard key is that of the instance
        that is being saved or deleted. If the statement sets the isolate key, the guess is that the
        row already has this value. Otherwise, the guessed isolate key is that of the instance.

        :param rows: the keys that the conditions of the statement determine.
        :param new_isolate: the isolate key that the statement sets; ``_ABSENT`` if it sets none.
        :returns: a tuple: all keys of the row, and conditions to add to the statement, as pairs
            (attname, value). With these conditions, the statement changes no row if the guess is
            wrong. None instead of the tuple if a key cannot be guessed.
        """
        cached = self._cached
        if rows.pks is None or len(rows.pks) != 1 or len(self._query.alias_map) > 1:
            return None
        instance = _writing.get()
        if instance is not None and (
            instance._meta.concrete_model is not cached.model
            or cached.pk_token(instance.pk) != rows.pks[0]
        ):
            instance = None
        attributes = instance.__dict__ if instance is not None else {}
        keys, isolates = rows.keys, rows.isolates
        conditions: list[tuple[str, Any]] = []
        if keys is None and cached.type.sharded:
            value = attributes.get(cached.key.attname)
            token = cached.key_token(value)
            if token is None:
                return None
            keys = (token,)
            conditions.append((cached.key.attname, value))
        if isolates is None and cached.isolate is not None:
            name = cached.isolate.attname
            value = new_isolate if new_isolate is not _ABSENT else attributes.get(name, _ABSENT)
            token = None if value is _ABSENT else cached.isolate_token(value)
            if token is None:
                return None
            isolates = (token,)
            conditions.append((name, value))
        return AffectedRows(keys, rows.pks, isolates), conditions

    def _rows_by_conditions(self) -> AffectedRows:
        """Return the keys of the affected rows that the conditions of the statement contain.

        For example, if the conditions contain only shard keys, ``pks`` and ``isolates`` are None.
        """
        cached = self._cached
        pk, key, isolate = columns = _key_columns(self._query.model).columns
        pinned = all_pinned(self._query, columns)
        if not pinned:
            return AffectedRows(None, None, None)

        def tokens(
            column: str | None, token_of: Callable[[Any], str | None]
        ) -> tuple[str, ...] | None:
            values = pinned.get(column) if column is not None else None
            if values is None or len(values) > MAX_LISTED:
                return None
            tokens = tuple(map(token_of, values))
            return None if None in tokens else tokens  # type: ignore[return-value]  # an earlier test excludes None

        return AffectedRows(
            tokens(key, cached.key_token),
            tokens(pk, cached.pk_token),
            tokens(isolate, cached.isolate_token),
        )

    def _is_enough(self, rows: AffectedRows) -> bool:
        cached = self._cached
        if (rows.keys is None and cached.type.sharded) or rows.pks is None:
            return False
        return cached.isolate is None or rows.isolates is not None

    def _read_and_change(
        self,
        rows: AffectedRows,
        new_isolates: Iterable[str] | None,
        execute: Callable[[], Any],
    ) -> Any:
        try:
            matching = self._read(rows)
        except EmptyResultSet:
            return 0
        except (FieldDoesNotExist, FieldError, NotSupportedError):
            matching = None
        if matching is None:
            # The written rows are too many to list, or cannot be selected. So all rows with the
            # shard keys in the conditions count as affected. If the conditions contain no shard
            # key, all rows of the table count as affected.
            self._touch_rows(AffectedRows(rows.keys, None, rows.isolates), new_isolates)
            return execute()
        if not matching:
            return 0
        by_key: dict[str | None, list[tuple[str | None, str | None]]] = {}
        for key, pk, isolate in matching:
            by_key.setdefault(key, []).append((pk, isolate))
        for key, pairs in by_key.items():
            if key is None and self._cached.type.sharded:
                self.touch_all()
                continue
            isolates = {isolate for _, isolate in pairs}
            pks = {pk for pk, _ in pairs}
            self._touch_rows(
                AffectedRows(
                    None if key is None else (key,),
                    None if None in pks else tuple(pks),  # type: ignore[arg-type]  # an earlier test excludes None
                    None if None in isolates else tuple(isolates),  # type: ignore[arg-type]  # an earlier test excludes None
                ),
                new_isolates,
            )
        return execute()

    def _select(self, names: list[str]) -> Any:
        """Return a query that selects and locks the rows that the statement would change.

        The query returns at most MAX_LISTED + 1 rows. If it returns so many, there are too many
        rows to list.

        :param names: names of the fields to select.
        """
        query = self._query
        # To select the same rows as the statement, copy its query as Django's
        # SQLUpdateCompiler.pre_sql_setup() does.
        select: Any = query.chain(klass=Query)
        select.clear_ordering(force=True)
        select.clear_select_clause()
        if select.group_by is not None:
            # There are conditions on aggregates. So the query has a GROUP BY, and cannot select the
            # fields ``names``. Make it a subquery that selects only the primary keys.
            inner = select
            inner.add_fields([field.attname for field in self._meta.pk_fields])
            select = Query(query.model)
            select.add_filter("pk__in", inner)
        select.add_fields(names)
        select.distinct = False
        select.select_for_update = self._connection.features.has_select_for_update
        select.set_limits(high=MAX_LISTED + 1)
        return select

    def _read(self, known: AffectedRows) -> list[tuple[str | None, str | None, str | None]] | None:
        """Read and lock the rows that the statement would change; limit the statement to them.

        Costs one query. The primary keys of the rows are added to the conditions of the statement,
        unless the conditions contain exactly these primary keys already.

        :param known: the keys that the conditions of the statement determine.
        :returns: for each row, the tokens of the shard key, primary key and isolate key; a key
            without a token is None. None instead of the list if there are more than MAX_LISTED
            rows.
        :raises EmptyResultSet: no row can match the conditions.
        """
        cached, query, connection = self._cached, self._query, self._connection
        parts = [self._field(part.field) for part in cached.pk_fields]
        key = self._field(cached.key) if cached.key is not None else None
        isolate = self._field(cached.isolate) if cached.isolate is not None else None
        fields = [*parts, *(field for field in (key, isolate) if field is not None)]
        select = self._select([field.attname for field in fields])
        compiler = select.get_compiler(connection=connection)
        rows = [row for chunk in compiler.execute_sql(MULTI) for row in chunk]
        if len(rows) > MAX_LISTED:
            return None
        converters = compiler.get_converters([column for column, _, _ in compiler.select])
        if converters:
            rows = list(compiler.apply_converters(rows, converters))
        size = len(parts)
        pks = [tuple(row[:size]) if size > 1 else row[0] for row in rows]
        if rows and (known.pks is None or len(set(pks)) < len(known.pks)):
            # Without this condition, the statement might also change a row that was not read and
            # locked, because another transaction has made the row match the conditions after the
            # read.
            query.add_filter("pk__in", list(dict.fromkeys(pks)))
        return [
            (
                cached.key_token(row[size]) if key is not None else None,
                cached.pk_token(pk),
                cached.isolate_token(row[-1]) if isolate is not None else None,
            )
            for row, pk in zip(rows, pks, strict=True)
        ]


# The pre_save() methods of fields that leave the stored value in the attribute of the instance,
# where it can be read after the INSERT. Another pre_save() may store a value without setting the
# attribute.
_SETS_ATTRIBUTE = frozenset({Field.pre_save, DateField.pre_save})
