"""Records each write of a source in an outbox, and refuses writes of mirrors.

A source is a model whose rows are copied to other models, its mirrors. The outbox is a table on
each shard of the source, with the writes that must be delivered to mirrors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, FieldError
from django.db import NotSupportedError
from django.db.models.constants import OnConflict
from django.db.models.sql import Query
from django.db.models.sql.constants import MULTI
from django.db.models.sql.subqueries import DeleteQuery, InsertQuery, UpdateQuery

from sharded_orm.contrib.mirrors.declaration import Mirror, Source, declarations
from sharded_orm.contrib.mirrors.exceptions import MirrorReadOnly, WriteNotFollowed
from sharded_orm.contrib.mirrors.mirror_rows import is_writing
from sharded_orm.contrib.mirrors.outbox import BATCH, WrittenRow
from sharded_orm.contrib.mirrors.transaction import SourceChange, TransactionChanges
from sharded_orm.models.cached.insert_keys import returned_keys


def follower_of(model: Any) -> OutboxFollower | None:
    """Return the object that handles the ORM's writes of ``model``.

    Return None if the model is neither a source nor a mirror.
    """
    if not apps.models_ready:
        return None
    meta = getattr(model, "_meta", None)
    if meta is None:
        return None
    # The historical model of a migration is not in the registry of installed apps. Handle its
    # writes like those of the current model.
    if meta.apps is not apps:
        try:
            model = apps.get_model(meta.label)
        except LookupError:
            return None
    followed = declarations().get(model._meta.concrete_model)
    return None if followed is None else OutboxFollower(followed)


class OutboxFollower:
    """Records each write of a source in the outbox of its shard, and refuses writes of a mirror.

    The outbox is a table of writes that have to be delivered to mirrors.

    Implements :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower`. Thread-safe.
    """

    def __init__(self, followed: Source | Mirror) -> None:
        self._followed = followed

    @property
    def is_read_only(self) -> bool:
        return isinstance(self._followed, Mirror)

    def concerns(self, query: Any) -> bool:
        return True

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Run a statement, and record the rows that it changes in the same transaction.

        An UPDATE or DELETE costs one more query, which locks the rows. Each transaction sends one
        INSERT into the outbox per 500 changed rows. If the INSERT is for one row, and the backend
        can do so, the INSERT is sent with the COMMIT.

        :param compiler: the compiler of the statement.
        :param execute: runs the statement.
        :raises MirrorReadOnly: the statement writes a mirror.
        :raises WriteNotFollowed: it is unknown which rows the statement changes.
        """
        followed = self._followed
        if compiler.connection.shard.group != followed.options.group:
            # This database is no shard of the model, so no mirror has copies of its rows. It may
            # be, for example, the source of an import into shards.
            return execute()
        if isinstance(followed, Mirror):
            _refuse_write_of_mirror(followed)
            return execute()
        connection = compiler.connection
        changes = TransactionChanges.of(connection)
        change = changes.add(followed)
        write = SourceWrite(followed, compiler, change)
        query = compiler.query
        if isinstance(query, InsertQuery):
            rows, result = write.insert(execute)
        elif isinstance(query, UpdateQuery | DeleteQuery):
            rows, result = write.change(execute)
        else:
            raise WriteNotFollowed(
                f"A statement of {type(query).__name__} writes {followed.model.__name__}, which"
                f" {followed.what}, and it is unknown which rows it changes. Use save(), update() or"
                " delete()."
            )
        if rows:
            with _rolled_back_on_error(connection):
                changes.add_rows(change, rows)
        change.is_complete = True
        return result


def _refuse_write_of_mirror(mirror: Mirror) -> None:
    if is_writing():
        return
    source = mirror.source.model
    raise MirrorReadOnly(
        f"{mirror.model.__name__} is a mirror of {source._meta.label}: its rows follow those of the"
        f" source, and cannot be written by themselves. Write {source.__name__} instead. In a fixture,"
        f" leave {mirror.label} out; 'manage.py mirrors check --repair' mends rows."
    )


@contextmanager
def _rolled_back_on_error(connection: Any) -> Iterator[None]:
    """Roll the transaction back if the block fails, as ``Model.save_base()`` of Django does.

    If the caller commits in spite of this, :class:`TransactionChanges` raises an error.
    """
    try:
        yield
    except BaseException:
        connection.needs_rollback = True
        raise


class SourceWrite:
    """One statement that writes rows of a source, inside of a transaction."""

    def __init__(self, source: Source, compiler: Any, change: SourceChange) -> None:
        self._source = source
        self._change = change
        self._compiler = compiler
        self._query = compiler.query
        self._connection = compiler.connection

    def _fields(self, fields: Sequence[Any]) -> list[Any]:
        """Return the fields of the query's model that have the same names as ``fields``.

        ``fields`` belong to the source's model. In a migration, the query's model is a historical
        model instead, which has field objects of its own.
        """
        meta = self._query.get_meta()
        try:
            return [meta.get_field(field.name) for field in fields]
        except FieldDoesNotExist as exc:
            raise WriteNotFollowed(
                f"{meta.label} {self._source.what}, but this historical model of a migration does not have all"
                f" fields that say where they are: {exc}. Write the rows in a later migration."
            ) from exc

    def insert(self, execute: Callable[[], Any]) -> tuple[list[WrittenRow], Any]:
        source, query = self._source, self._query
        if query.on_conflict is OnConflict.UPDATE:
            raise WriteNotFollowed(
                f"bulk_create(update_conflicts=True) of {source.model.__name__} was refused: the model"
                f" {source.what}, and the database does not tell which stored rows it has updated. Use"
                " update_or_create(), or bulk_create() and bulk_update()."
            )
        pk, key = self._fields([source.pk, source.key])
        mirror_keys = self._fields(source.mirror_keys)
        result = self._executed(execute)
        pks = _stored_values(self._compiler, pk, result)
        keys = _stored_values(self._compiler, key, result)
        if None in pks or None in keys:
            self._connection.needs_rollback = True
            raise WriteNotFollowed(
                f"Rows of {source.model.__name__}, which {source.what}, were inserted, and the database"
                " has not returned their ids. Give the ids before."
            )
        if query.on_conflict is not None:
            return self._stored(pks), result
        rows = [
            WrittenRow(
                row_pk,
                row_key,
                _known_keys(obj, mirror_keys),
                source.epoch_of(row_key),
                True,
                _stored_row(source, obj),
            )
            for row_pk, row_key, obj in zip(pks, keys, query.objs, strict=True)
        ]
        return rows, result

    def _stored(self, pks: Sequence[Any]) -> list[WrittenRow]:
        """Lock and return the stored rows with the primary keys ``pks``.

        Used after an INSERT with ignore_conflicts, because the database does not report which rows
        it has inserted. Another transaction may have inserted some of the returned rows. They are
        then delivered twice, which does no harm. A row is missing if it was not inserted because of
        a conflict in another column than the primary key.
        """
        source = self._source
        mirror_keys = self._fields(source.mirror_keys)
        rows = []
        for start in range(0, len(pks), BATCH):
            select: Any = Query(self._query.model)
            select.add_filter("pk__in", list(pks[start : start + BATCH]))
            fields = [*self._fields([source.pk, source.key]), *mirror_keys]
            for pk, key, *values in self._locked(select, fields):
                keys = _keys_before_and_after(mirror_keys, values, {})
                rows.append(WrittenRow(pk, key, keys, source.epoch_of(key)))
        return rows

    def change(self, execute: Callable[[], Any]) -> tuple[list[WrittenRow], Any]:
        source, query = self._source, self._query
        new: dict[str, Any] = {
            field.attname: value for field, _, value in getattr(query, "values", ())
        }
        identity = self._fields([source.pk, source.key])
        mirror_keys = self._fields(source.mirror_keys)
        fields = [*identity, *mirror_keys]
        try:
            matching = self._read(fields)
        except EmptyResultSet:
            return [], execute()
        except (FieldError, NotSupportedError) as exc:
            raise WriteNotFollowed(
                f"A statement writes {source.model.__name__}, which {source.what}, and its rows cannot be"
                f" selected first: {exc}. Select their ids yourself, and write the rows by their ids."
            ) from exc
        for position, field in enumerate(identity):
            # Refuse the update only if it changes a primary key or shard key. Setting the present
            # value is allowed, because in migrations save() writes all columns, changed or not.
            if field.attname in new and any(
                _plain(field, new[field.attname]) != row[position] for row in matching
            ):
                raise WriteNotFollowed(
                    f"update() of {field.name!r} was refused: it identifies rows of"
                    f" {source.model.__name__}, which {source.what}. Create rows with new ids and delete these."
                )
        rows = [
            WrittenRow(
                pk, key, _keys_before_and_after(mirror_keys, values, new), source.epoch_of(key)
            )
            for pk, key, *values in matching
        ]
        return rows, self._execute_on([row.pk for row in rows], execute)

    def _read(self, fields: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Read and lock the rows that the statement would change."""
        query = self._query
        # The query is copied in the same way as in SQLUpdateCompiler.pre_sql_setup() of Django.
        select: Any = query.chain(klass=Query)
        select.clear_ordering(force=True)
        select.clear_select_clause()
        if select.group_by is not None or len(select.alias_map) > 1:
            # Let a subquery select the primary keys, and lock the rows in an outer query. With FOR
            # UPDATE, a query with joins would also lock rows of other tables, and databases refuse
            # it for a query with GROUP BY.
            inner = select
            inner.add_fields([fields[0].attname])
            inner.distinct = False
            select = Query(query.model)
            select.add_filter("pk__in", inner)
        return self._locked(select, fields)

    def _locked(self, select: Any, fields: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Read ``fields`` of the rows of ``select``, and lock the rows."""
        select.add_fields([field.attname for field in fields])
        select.distinct = False
        select.select_for_update = self._connection.features.has_select_for_update
        compiler = select.get_compiler(connection=self._connection)
        rows = [row for chunk in compiler.execute_sql(MULTI) for row in chunk]
        converters = compiler.get_converters([column for column, _, _ in compiler.select])
        return list(compiler.apply_converters(rows, converters)) if converters else rows

    def _execute_on(self, pks: Sequence[Any], execute: Callable[[], Any]) -> Any:
        """Run the statement for the rows that were read, and for no other rows.

        The primary keys of these rows are added to the conditions. Otherwise the statement might
        also change other rows: after the rows were read, another transaction may have changed a
        row, so that it matches the conditions now.
        """
        if not pks:
            return 0
        query, changed = self._query, 0
        where = query.where
        try:
            for start in range(0, len(pks), BATCH):
                query.where = where.clone()
                query.add_filter("pk__in", list(pks[start : start + BATCH]))
                changed += self._executed(execute) or 0
        finally:
            query.where = where
        return changed

    def _executed(self, execute: Callable[[], Any]) -> Any:
        # Mark the change as incomplete until its rows are in the outbox. A transaction with an
        # incomplete change is never committed, so no change is committed without its outbox rows.
        # (The handler of a signal of the operating system can raise an error at any point, even
        # after the statement has taken effect.)
        self._change.is_complete = False
        with _rolled_back_on_error(self._connection):
            return execute()


def _stored_values(compiler: Any, field: Any, result: Any) -> list[Any]:
    """Return the value of ``field`` in each row that an INSERT has stored.

    :param result: what the INSERT has returned.
    :returns: one value per row, as a query would return it; None for a value that is not known.
    """
    objs = compiler.query.objs
    # Convert the values, because the caller may have assigned "7" instead of 7, or the text of a
    # UUID.
    values = [_plain(field, getattr(obj, field.attname)) for obj in objs]
    if None not in values:
        return values
    returned = returned_keys(compiler, objs, field, result) or [None] * len(values)
    return [
        generated if value is None else value
        for value, generated in zip(values, returned, strict=True)
    ]


def _stored_row(source: Source, obj: Any) -> dict[str, Any] | None:
    """Return the stored values of ``obj``, by the names of the copied fields, after its INSERT.

    Return None if they cannot be read from ``obj``, for example because the database
    computes one of them. A delivery then reads the row.
    """
    if type(obj) is not source.model or not source.keeps_values:
        # ``obj`` may be an instance of a different class, such as a migration's model with other
        # fields. Then a delivery has to read the row.
        return None
    values = {name: obj.__dict__.get(name) for name in source.copied}
    if any(hasattr(value, "resolve_expression") for value in values.values()):
        return None
    return values


def _known_keys(obj: Any, fields: Sequence[Any]) -> dict[str, frozenset[Any]]:
    keys = {}
    for field in fields:
        value = _plain(field, getattr(obj, field.attname, None))
        if value is not None:
            keys[field.attname] = frozenset([value])
    return keys


def _keys_before_and_after(
    fields: Sequence[Any], values: Sequence[Any], new: dict[str, Any]
) -> dict[str, frozenset[Any]]:
    keys = {}
    for field, before in zip(fields, values, strict=True):
        after = _plain(field, new.get(field.attname))
        keys[field.attname] = frozenset(key for key in (before, after) if key is not None)
    return keys


def _plain(field: Any, value: Any) -> Any:
    """Return the form of ``value`` that a query returns after it was written to ``field``, such as
    7 for "7".

    Return None if only the database knows this form, for example because ``value`` is an
    expression. If this is the value of a mirror's shard key, the delivery reads the row.
    """
    if value is None or hasattr(value, "resolve_expression"):
        return None
    if hasattr(value, "_meta"):
        value = getattr(value, field.target_field.attname)
    try:
        return field.to_python(value)
    except Exception:
        # The field cannot convert ``value``. The database will refuse it, or store something else.
        return None
