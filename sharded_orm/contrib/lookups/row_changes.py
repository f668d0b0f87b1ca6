"""Writes the entries of lookups whenever the ORM writes rows.

For example, an UPDATE changes an email address from A to B. The entry of B is committed before the
row, and the entry of A is removed after the row is committed. So there is no moment at which a
committed row lacks an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import EmptyResultSet, FieldDoesNotExist
from django.db.models import Case, When
from django.db.models.expressions import Col
from django.db.models.functions import Cast
from django.db.models.lookups import Exact
from django.db.models.sql import Query
from django.db.models.sql.subqueries import InsertQuery, UpdateQuery
from django.db.models.sql.where import WhereNode

from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.declaration import ModelLookup, lookups_of, plain_value
from sharded_orm.contrib.lookups.entries import Place
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.reservation import reserve, value_taken
from sharded_orm.contrib.lookups.states import is_known_to_be_served
from sharded_orm.contrib.lookups.transaction import EntryChange, TransactionEntries
from sharded_orm.models.cached.insert_keys import returned_keys
from sharded_orm.routing.where_clause import compares_as

#: The largest number of rows that one ``update()`` of a field with a lookup may change.
MAX_UPDATED = 5000


def follower_of(model: Any) -> RowFollower | None:
    """Return the object that writes lookup entries whenever the ORM writes rows of ``model``.

    A lookup entry stores which shard key the row with a certain value has. Return None if the model
    declares no ``ShardMeta.lookups``.
    """
    lookups = lookups_of(model)
    return RowFollower(lookups) if lookups else None


@dataclass(frozen=True)
class FollowedRow:
    """A stored row that an UPDATE or DELETE will change.

    All values are prepared for the database.

    :param values: the values of the fields that have lookups, in the order of the lookups.
    """

    pk: Any
    key: Any
    values: Sequence[Any]


class RowFollower:
    """Writes lookup entries for each statement that changes rows of one model.

    A lookup entry stores which shard key the row with a certain value has.

    Implements :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower`.
    """

    def __init__(self, lookups: Sequence[ModelLookup]) -> None:
        self._lookups = lookups

    def concerns(self, query: Any) -> bool:
        """Whether the statement may change which entries its rows need.

        False for an ``update()`` that sets neither the primary key, nor the shard key, nor a field
        with a lookup.
        """
        if not isinstance(query, UpdateQuery) or any(each.problem for each in self._lookups):
            return True
        names = {lookup.field.name for lookup in self._lookups}
        names |= {self._lookups[0].key.name, query.get_meta().pk.name}
        values: Any = query.values  # type: ignore[attr-defined]  # the stubs lack it
        return any(field.name in names for field, _, _ in values)

    def needs_transaction(self, compiler: Any) -> bool:
        """Whether the statement must be sent in a transaction, before its entries are written.

        False for an INSERT of rows with known primary keys, if all its entries are of unique
        lookups. Then the entries can be written first, and the INSERT is sent in autocommit, which
        saves a round trip.
        """
        query = compiler.query
        is_insert = isinstance(query, InsertQuery)
        if not is_insert or query.on_conflict is not None:
            return True
        pk = query.get_meta().pk.attname
        if any(getattr(obj, pk) is None for obj in query.objs):
            return True
        # If a lookup is not unique, send the INSERT first, in a transaction. Another transaction
        # may be deleting an earlier row with the same primary key and value. Both rows have the
        # same entry, which the other transaction removes at its end. The INSERT waits for that end,
        # so the entry of the new row is written afterwards.
        return any(
            lookup.problem is not None
            or not is_known_to_be_served(lookup)
            or (
                not lookup.unique
                and any(getattr(obj, lookup.field.attname, None) is not None for obj in query.objs)
            )
            for lookup in self._lookups
        )

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Run the statement, and write the entries of the rows that it changes.

        :param compiler: the compiler of the statement.
        :param execute: runs the statement.
        :raises LookupValueTaken: another row has the value of a unique lookup, or an open
            transaction may write such a row.
        :raises LookupRefused: it is not known which values the rows get.
        """
        if compiler.connection.shard.group != self._lookups[0].options.group:
            # This database is no shard of the model, so the lookups have no entries for its rows.
            # It may be, for example, the source of an import into shards.
            return execute()
        for lookup in self._lookups:
            if lookup.problem is not None:
                raise LookupRefused(
                    f"{lookup.model.__name__} cannot be written: its lookup by {lookup.field.name!r}"
                    f" {lookup.problem}. 'manage.py check' has the remedy."
                )
        query = compiler.query
        if isinstance(query, InsertQuery):
            return self._insert(compiler, execute)
        if isinstance(query, UpdateQuery):
            return self._update(compiler, execute)
        return self._delete(compiler, execute)

    def _watcher(self, compiler: Any) -> TransactionEntries:
        if compiler.connection.in_two_phase:
            # Refuse a commit in two phases. If the database session of a transaction has ended,
            # lookups take the transaction for finished. But a prepared transaction outlives its
            # session, and may be committed later.
            raise LookupRefused(
                f"{self._lookups[0].model.__name__} has lookups, which cannot follow a commit in two"
                " phases. Write its rows in a block of their own, without two_phase=True."
            )
        return TransactionEntries.of(compiler.connection)

    # -- INSERT -----------------------------------------------------------------------------

    def _insert(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        query = compiler.query
        if query.on_conflict is not None:
            raise LookupRefused(
                f"bulk_create() of {query.model.__name__} with ignore_conflicts or update_conflicts"
                " cannot be followed by its lookups: which rows are stored is not known. Leave the"
                " option out, or use get_or_create() or update_or_create()."
            )
        meta, objs = query.get_meta(), query.objs
        key = meta.get_field(self._lookups[0].key.name)
        columns = [(lookup, self._column(query, lookup)) for lookup in self._lookups]

        def values_of_fields() -> list[list[Any]]:
            return [
                [None if field is None else _new_value(query, field, obj) for obj in objs]
                for _, field in columns
            ]

        def new_values(pks: Sequence[Any], values: list[list[Any]]) -> list[Any]:
            return [
                (lookup, _prepared(meta.pk, pk), _new_value(query, key, obj), value)
                for (lookup, _), of_lookup in zip(columns, values, strict=True)
                for obj, pk, value in zip(objs, pks, of_lookup, strict=True)
                if value is not None
            ]

        if compiler.connection.get_autocommit():  # See needs_transaction().
            own = TransactionEntries(compiler.connection)
            with own.statement() as statement:
                pks = [getattr(obj, meta.pk.attname) for obj in objs]
                self._add(compiler, own, statement, new_values(pks, values_of_fields()))
                statement.is_sent = True
                return execute()
        watcher = self._watcher(compiler)
        with watcher.change() as change:
            values = values_of_fields()
            result = execute()
            pks = [getattr(obj, meta.pk.attname) for obj in objs]
            if any(pk is None for pk in pks):
                pks = returned_keys(compiler, objs, meta.pk, result) or pks
            self._add(compiler, watcher, change, new_values(pks, values))
        return result

    def _column(self, query: Any, lookup: ModelLookup) -> Any:
        """Return the field of ``lookup`` in the query's model.

        Return None if the query's model is a historical model of a migration without this field.
        """
        try:
            field = query.get_meta().get_field(lookup.field.name)
        except FieldDoesNotExist:
            return None
        if field not in query.fields:
            raise LookupRefused(
                f"The INSERT leaves {lookup.name!r} to the database, and its lookup must know the value."
            )
        return field

    def _add(
        self,
        compiler: Any,
        watcher: TransactionEntries,
        change: EntryChange,
        new: Sequence[tuple[ModelLookup, Any, Any, Any]],
    ) -> None:
        """Write the lookup entries of new values.

        :param new: tuples (lookup, primary key of the row, shard key of the row, new value).
        """
        rows: dict[Place, tuple[ModelLookup, str]] = {}
        for lookup, pk, key, value in new:
            key_text = lookup.key_text(key)
            place = Place(lookup.name, lookup.text(value), lookup.slot(pk, key_text))
            if lookup.unique and place in rows:
                raise value_taken(lookup, place, "two rows of one statement would have it")
            rows[place] = lookup, key_text
        if rows:
            reserve(compiler.connection, watcher, change, rows)

    # -- UPDATE and DELETE ------------------------------------------------------------------

    def _update(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        query = compiler.query
        names = {lookup.field.name: number for number, lookup in enumerate(self._lookups)}
        new_values, new_key = {}, None
        for field, _, value in query.values:
            if field.name == query.get_meta().pk.name:
                raise self._fixed(query)
            if field.name == self._lookups[0].key.name:
                new_key = _new_values(query, field, value)
            if field.name in names:
                new_values[names[field.name]] = _new_values(query, field, value)
        watcher = self._watcher(compiler)
        with watcher.change() as change:
            rows = self._rows(compiler, MAX_UPDATED + 1)
            if len(rows) > MAX_UPDATED:
                raise LookupRefused(
                    f"update() would change a field with a lookup in more than {MAX_UPDATED} rows of"
                    f" {query.model.__name__} on {compiler.connection.alias!r}. Update fewer at a time."
                )
            # Accept a statement that sets the shard key to its present value, because in
            # migrations, save() writes all columns, changed or not.
            if new_key is not None and any(new_key(row.pk) != row.key for row in rows):
                raise self._fixed(query)
            result = _execute_on(query, rows, execute)
            new, old = [], []
            for number, value_of in new_values.items():
                lookup = self._lookups[number]
                for row in rows:
                    value, former = value_of(row.pk), row.values[number]
                    if value == former:
                        continue
                    if value is not None:
                        new.append((lookup, row.pk, row.key, value))
                    if former is not None:
                        old.append(_place(lookup, row, former))
            self._add(compiler, watcher, change, new)
            _mark(watcher, change, old)
        return result

    def _fixed(self, query: Any) -> LookupRefused:
        return LookupRefused(
            f"The primary key and the shard key of {query.model.__name__} are parts of its lookups, so"
            " update() cannot change them. Create new rows and delete the old ones."
        )

    def _delete(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        watcher = self._watcher(compiler)
        with watcher.change() as change:
            rows = self._rows(compiler, None)
            result = _execute_on(compiler.query, rows, execute)
            old = [
                _place(lookup, row, row.values[number])
                for number, lookup in enumerate(self._lookups)
                for row in rows
                if row.values[number] is not None
            ]
            _mark(watcher, change, old)
        return result

    def _rows(self, compiler: Any, limit: int | None) -> list[FollowedRow]:
        """Read and lock the rows that the statement would change. One query."""
        query, connection = compiler.query, compiler.connection
        meta = query.get_meta()
        fields = [meta.pk, meta.get_field(self._lookups[0].key.name)]
        positions: list[int | None] = []
        for lookup in self._lookups:
            try:
                fields.append(meta.get_field(lookup.field.name))
                positions.append(len(fields) - 1)
            except FieldDoesNotExist:
                # The query's model belongs to a migration and does not have the field.
                positions.append(None)
        select = _select(query, connection, [field.attname for field in fields], limit)
        try:
            rows = list(select.get_compiler(connection=connection).results_iter())
        except EmptyResultSet:
            return []
        return [
            FollowedRow(
                row[0],
                fields[1].get_prep_value(row[1]),
                [None if n is None else fields[n].get_prep_value(row[n]) for n in positions],
            )
            for row in ([fields[0].get_prep_value(row[0]), *row[1:]] for row in rows)
        ]


def _select(query: Any, connection: Any, names: list[str], limit: int | None) -> Query:
    """Return a query that reads and locks the rows that an UPDATE or DELETE would change."""
    # The query is copied in the same way as in SQLUpdateCompiler.pre_sql_setup() of Django.
    select: Any = query.chain(klass=Query)
    select.clear_ordering(force=True)
    select.clear_select_clause()
    joins = any(select.alias_refcount[a] for a in select.alias_map if a != select.base_table)
    if select.group_by is not None or joins:
        # Let a subquery find the primary keys, and lock the rows in an outer query. With FOR
        # UPDATE, a query with joins would also lock rows of the joined tables, and databases refuse
        # it for a query with aggregates.
        inner = select
        inner.add_fields([query.get_meta().pk.attname])
        select = Query(query.model)
        select.add_filter("pk__in", inner)
    select.add_fields(names)
    select.distinct = False
    select.select_for_update = connection.features.has_select_for_update
    select.set_limits(high=limit)
    return select  # type: ignore[no-any-return]  # typed Any, because the stubs of Query lack some attributes


def _execute_on(query: Any, rows: Sequence[FollowedRow], execute: Callable[[], Any]) -> int:
    """Run an UPDATE or DELETE for the locked ``rows`` only. Return the number of changed rows.

    The conditions of the statement are replaced by the primary keys of ``rows``. Otherwise the
    statement could also change a row that has come to match the conditions since the rows were
    read, and no entries would be written for that row. One statement per :data:`MAX_UPDATED` rows.
    """
    number = 0
    for alias in query.alias_map:
        if alias != query.base_table:
            # Remove the join. Only the conditions of the query needed it, and primary keys replace
            # these conditions below.
            query.alias_refcount[alias] = 0
    for start in range(0, len(rows), MAX_UPDATED):
        query.clear_where()
        query.add_filter("pk__in", [row.pk for row in rows[start : start + MAX_UPDATED]])
        number += execute() or 0
    return number


def _place(lookup: ModelLookup, row: FollowedRow, value: Any) -> Place:
    return Place(lookup.name, lookup.text(value), lookup.slot(row.pk, lookup.key_text(row.key)))


def _mark(watcher: TransactionEntries, change: EntryChange, old: Sequence[Place]) -> None:
    if old:
        change.note_tables(old)
        change.has_old = True
        change.tokens_by_place.update(dict.fromkeys(old, change.old))
        entries.mark(old, change.old, watcher.writer)


def _prepared(field: Any, value: Any) -> Any:
    if value is None:
        raise LookupRefused(
            f"The database has not returned the {field.name!r} of new rows, and their lookups need it."
            " Save the rows one by one."
        )
    return field.get_prep_value(value)


def _new_value(query: Any, field: Any, obj: Any) -> Any:
    # Compute the value in the same way as SQLInsertCompiler of Django.
    value = getattr(obj, field.attname) if query.raw else field.pre_save(obj, add=True)
    return plain_value(field, value)


def _new_values(query: Any, field: Any, value: Any) -> Callable[[Any], Any]:
    """Return a function that maps the primary key of a row to the row's new value of ``field``.

    :param value: what the UPDATE sets the field to. This is a value for all rows, or the expression
        ``CASE WHEN pk = 1 THEN … WHEN pk = 2 THEN …`` that ``bulk_update()`` builds.
    """
    expression = value
    if type(expression) is Cast:
        (expression,) = expression.get_source_expressions()
    if type(expression) is not Case:
        plain = plain_value(field, value)
        return lambda pk: plain
    by_pk = {}
    for when in expression.cases:
        compared = _compared_pk(query, when.condition) if type(when) is When else None
        if compared is None:
            # The condition does not compare the primary key, so only the database can compute the
            # new values. plain_value() raises LookupRefused for such an expression.
            plain_value(field, value)
        by_pk[compared] = plain_value(field, when.result)
    # Rows whose primary keys are in none of the WHEN conditions get the default.
    default = plain_value(field, expression.default)
    return lambda pk: by_pk.get(pk, default)


def _compared_pk(query: Any, condition: Any) -> Any:
    """Return the value of a condition ``pk = value``; None for any other condition."""
    if type(condition) is not WhereNode or condition.negated or len(condition.children) != 1:
        return None
    compared: Any = condition.children[0]
    if not compares_as(Exact, compared) or type(compared.lhs) is not Col:
        return None
    if compared.lhs.target is not query.get_meta().pk or not compared.rhs_is_direct_value():
        return None
    return compared.rhs
