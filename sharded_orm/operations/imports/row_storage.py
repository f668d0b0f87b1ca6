"""Store the rows of an import's source (the unsharded database) on one shard.

Two workers may store the same rows, even at the same time: the shard then has each row once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import ForeignKey

from sharded_orm.backends.features import features_of
from sharded_orm.models.sharding.options import group_of
from sharded_orm.operations.exceptions import ImportConflict
from sharded_orm.operations.imports.source_tables import LOOK_UPS, SourceRow, SourceTable
from sharded_orm.operations.imports.stored_columns import differing_names
from sharded_orm.operations.relations import batched

#: The largest number of rows in one INSERT, and the largest total length of the texts and binary
#: values in it.
_INSERT_ROWS, _INSERT_SIZE = 500, 1 << 20
#: The largest number of rows of a shard that one message names.
EXAMPLES = 3


@dataclass
class Stored:
    """Counts of what has happened to the rows of one range.

    :param copied: rows that were inserted.
    :param equal: rows that the shard had already, with the same values.
    :param updated: rows of the shard that were overwritten with the values of the source.
    :param differing: rows that the shard had already, with other values than on the source. They
        were left as they are.
    :param waiting: references to rows that the shard does not have yet.
    :param examples: sentences about some rows of ``differing`` and references of ``waiting``.
    """

    copied: int = 0
    equal: int = 0
    updated: int = 0
    differing: int = 0
    waiting: int = 0
    examples: list[str] = field(default_factory=list)

    def add_example(self, text: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(text)


class ShardTable:
    """The table on one shard into which rows of ``table`` are imported.

    While rows are stored, the database does not check foreign keys, because a row may be stored
    before the row to which it refers. :meth:`note_waiting` finds references to missing rows.

    :param alias: the alias of the shard.
    :param update: whether to overwrite a row of the shard if its values differ from those on the
        source. False leaves the row as it is.
    """

    def __init__(self, table: SourceTable, alias: str, *, update: bool) -> None:
        self._table = table
        self._alias = alias
        self._update = update
        self._connection: Any = connections[alias]

    def store(self, rows: Sequence[SourceRow], stored: Stored) -> None:
        """Insert each row of ``rows`` that the shard does not have.

        If the shard has a row already, compare the values. If they differ and ``update`` is set,
        overwrite the row of the shard.

        :raises ImportConflict: the shard has a different row with the same primary key.
        :raises IntegrityError: a constraint of the table refuses a row.
        """
        self._refuse_rows_of_others(rows)
        missing = self._compare(rows, stored)
        if missing:
            try:
                self._insert(missing)
            except IntegrityError:
                # Another worker may have inserted some of these rows since they were looked up.
                # That is harmless, so look again which of them exist.
                there = self._table.stored(self._alias, [row.pk for row in missing])
                # If none of the rows is on the shard, no other worker has inserted them, and the
                # error has another cause. For example, a row to insert has the key "A", the shard
                # has the key "a", and the column's collation takes both for equal.
                if not any(row.pk in there for row in missing):
                    raise
                self.store(missing, stored)
                return
            stored.copied += len(missing)

    def _compare(self, rows: Sequence[SourceRow], stored: Stored) -> list[SourceRow]:
        """Compare ``rows`` with the rows of the shard, and return those that the shard does not
        have.
        """
        there = self._table.stored(self._alias, [row.pk for row in rows])
        missing, differing = [], []
        for row in rows:
            values = there.get(row.pk)
            if values is None:
                missing.append(row)
            elif names := differing_names(self._table.columns, row.values, values):
                self._refuse_other_row(row, values, names)
                differing.append((row, names))
            else:
                stored.equal += 1
        if differing and self._update:
            stored.updated += self._overwrite([row for row, _ in differing])
            return missing
        stored.differing += len(differing)
        for row, names in differing:
            stored.add_example(
                f"{self._table.label}(pk={row.pk!r}) differs from its row on {self._alias!r} in"
                f" {', '.join(names)}"
            )
        return missing

    def _refuse_other_row(
        self, row: SourceRow, values: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Raise an error if the shard has a different row with the primary key of ``row``.

        An update would overwrite that row. Two rows are different if their shard keys differ. If
        only other values differ, it is the same row.

        :param values: the values of the shard's row.
        :param names: the names of the columns whose values differ.
        """
        table = self._table
        # Compare the shard keys of the two rows. A row of an automatic many-to-many table has no
        # column for its shard key. In such a table, two rows are different if any of their columns
        # differ, because they then connect different rows.
        own = [table.key_field.attname] if table.owner is None else names
        for name, before, there in zip(
            [column.name for column in table.columns], row.values, values, strict=True
        ):
            if name in own and name in names:
                raise ImportConflict(
                    f"{table.label}(pk={row.pk!r}) has {name}={before!r} on {table.alias!r}, but"
                    f" {self._alias!r} has a row with this primary key and {name}={there!r}."
                    " Neither was changed. Delete one of them, or give it another primary key."
                )

    def _refuse_rows_of_others(self, rows: Sequence[SourceRow]) -> None:
        """Raise an error if a row would be attached to the wrong parent on the shard.

        A row may get its shard key from its parent, to which a foreign key refers. The shard may
        have another row with the primary key of that parent, and with another shard key. The row
        would then belong to this other parent. Costs one query for each 500 rows.
        """
        table, link = self._table, self._table.key_link
        if link is None:
            return
        place = [column.field for column in table.columns].index(link)
        target, key = link.target_field.attname, table.key_field
        for batch in batched(rows, LOOK_UPS):
            related = SourceTable(link.related_model, self._alias).query()
            found = related.filter(**{f"{target}__in": {row.values[place] for row in batch}})
            keys = dict(found.values_list(target, key.attname))
            for row in batch:
                there = key.get_prep_value(keys.get(row.values[place]))
                if there is not None and there != row.key:
                    raise ImportConflict(
                        f"{table.label}(pk={row.pk!r}) belongs to {link.name}={row.values[place]!r}"
                        f" with the shard key {row.key!r} on {table.alias!r}, but on {self._alias!r}"
                        f" that row has the key {there!r}. Neither was changed. Delete one of them,"
                        " or give it another primary key."
                    )

    # ##### Removing #####

    def remove(self, anchors: Mapping[Any, set[Any]], dependents: Sequence[SourceTable]) -> int:
        """Delete rows from this shard in one transaction, with the rows of other tables that get
        their shard key from them.

        The anchor of a row (:attr:`SourceTable.anchor_field`) is its shard key, or the foreign key
        to the parent row that has the shard key. A row is deleted only if its anchor on this shard
        is one of the given old anchors. If it has another anchor here, it may have been stored
        again since, and belong to this shard.

        :param anchors: maps the primary key of each row to delete to the anchors that the row had
            before.
        :param dependents: tables that may get their shard key from this table, directly or through
            other tables.
        :returns: the number of deleted rows, including those of ``dependents``.
        """
        removed = 0
        with self._transaction() as cursor:
            for batch in batched(anchors, LOOK_UPS):
                self._lock(cursor, batch)
                there = self._table.anchors(self._alias, batch)
                doomed = [pk for pk, anchor in there.items() if anchor in anchors[pk]]
                removed += self._delete(cursor, doomed, dependents)
        return removed

    def _delete(self, cursor: Any, pks: Sequence[Any], dependents: Sequence[SourceTable]) -> int:
        removed = len(pks)
        for table in dependents if pks else ():
            if table.key_link is not None and table.key_link.related_model is self._table.model:
                other = ShardTable(table, self._alias, update=self._update)
                rows = table.linked_pks(self._alias, self._table, pks)
                removed += other._delete(cursor, rows, dependents)
        for pk in pks:
            condition, params = self._pk_condition(pk)
            cursor.execute(f"DELETE FROM {self._name} WHERE {condition}", params)
        return removed

    # ##### Writing #####

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A context manager for a transaction without checks of foreign keys. Yields a cursor."""
        # Switch off the check of foreign keys before the transaction begins, because SQLite cannot
        # switch it off inside a transaction.
        with self._connection.constraint_checks_disabled():
            with transaction.atomic(using=self._alias), self._connection.cursor() as cursor:
                if statement := features_of(self._connection).foreign_keys_off:
                    cursor.execute(statement)
                yield cursor

    def _insert(self, rows: Sequence[SourceRow]) -> None:
        table = self._table
        zero = [row for row in rows if self._is_counted_zero(row)]
        with self._transaction() as cursor:
            for batch in self._batches([row for row in rows if row not in zero]):
                self._insert_batch(cursor, batch)
            for row in zero:
                # The primary key of this row is 0, and in an INSERT, MySQL would replace the 0 by a
                # new number. So insert the row with a free primary key, and then set the key to 0
                # by an UPDATE.
                column = table.columns[self._pk_place]
                free = self._lowest_pk(cursor) - 1
                values = list(row.values)
                values[self._pk_place] = free
                self._insert_batch(cursor, [SourceRow(free, tuple(values), row.key)])
                name = self._quote(column.column)
                cursor.execute(f"UPDATE {self._name} SET {name} = 0 WHERE {name} = %s", [free])

    def _insert_batch(self, cursor: Any, rows: Sequence[SourceRow]) -> None:
        columns, connection = self._table.columns, self._connection
        names = ", ".join(self._quote(column.column) for column in columns)
        tuples, params = [], []
        for row in rows:
            parts = []
            for column, value in zip(columns, row.values, strict=True):
                parameter = column.parameter(value, connection)
                parts.append(column.placeholder(parameter, connection))
                params.append(parameter)
            tuples.append(f"({', '.join(parts)})")
        cursor.execute(f"INSERT INTO {self._name} ({names}) VALUES {', '.join(tuples)}", params)

    def _batches(self, rows: Sequence[SourceRow]) -> Iterator[list[SourceRow]]:
        fields = [column.field for column in self._table.columns]
        limit = max(min(self._connection.ops.bulk_batch_size(fields, rows), _INSERT_ROWS), 1)
        batch: list[SourceRow] = []
        size = 0
        for row in rows:
            row_size = sum(len(value) for value in row.values if isinstance(value, str | bytes))
            if batch and (len(batch) == limit or size + row_size > _INSERT_SIZE):
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += row_size
        if batch:
            yield batch

    def _overwrite(self, rows: Sequence[SourceRow]) -> int:
        """Overwrite rows of the shard with the present values of the import's source.

        The source is read again, because ``rows`` may be outdated. Return the number of changed
        rows.
        """
        table, updated = self._table, 0
        with self._transaction() as cursor:
            for batch in batched(rows, LOOK_UPS):
                # Lock the rows of the shard first, and then read the source. Two workers may
                # overwrite the same row. The worker that gets the lock last then also has the
                # newest values, so old values never replace newer ones.
                self._lock(cursor, [row.pk for row in batch])
                pks = [row.pk for row in batch]
                there = table.stored(self._alias, pks)
                for row in table.read(table.query().filter(pk__in=pks)):
                    values = there.get(row.pk)
                    if values is None:
                        continue
                    names = differing_names(table.columns, row.values, values)
                    self._refuse_other_row(row, values, names)
                    if names:
                        self._write(cursor, row)
                        updated += 1
        return updated

    def _lock(self, cursor: Any, pks: Sequence[Any]) -> None:
        name = self._quote(self._table.columns[self._pk_place].column)
        for pk in pks:
            condition, params = self._pk_condition(pk)
            cursor.execute(f"UPDATE {self._name} SET {name} = {name} WHERE {condition}", params)

    def _write(self, cursor: Any, row: SourceRow) -> None:
        sets, params = [], []
        for column, value in zip(self._table.columns, row.values, strict=True):
            if column.name in self._table.pk_names:
                continue
            parameter = column.parameter(value, self._connection)
            placeholder = column.placeholder(parameter, self._connection)
            sets.append(f"{self._quote(column.column)} = {placeholder}")
            params.append(parameter)
        condition, pk_params = self._pk_condition(row.pk)
        cursor.execute(
            f"UPDATE {self._name} SET {', '.join(sets)} WHERE {condition}", [*params, *pk_params]
        )

    def _pk_condition(self, pk: Any) -> tuple[str, list[Any]]:
        values = pk if len(self._table.pk_names) > 1 else (pk,)
        parts, params = [], []
        for name, value in zip(self._table.pk_names, values, strict=True):
            (column,) = (column for column in self._table.columns if column.name == name)
            parts.append(f"{self._quote(column.column)} = %s")
            params.append(column.parameter(value, self._connection))
        return " AND ".join(parts), params

    # ##### The primary key 0 #####

    @property
    def _pk_place(self) -> int:
        names = [column.name for column in self._table.columns]
        return names.index(self._table.pk_names[0])

    def _is_counted_zero(self, row: SourceRow) -> bool:
        """Return whether the row has the primary key 0 and an INSERT would replace it by a new
        number.
        """
        return (
            type(row.pk) is int and row.pk == 0 and not self._connection.features.allows_auto_pk_0
        )

    def _lowest_pk(self, cursor: Any) -> int:
        column = self._quote(self._table.columns[self._pk_place].column)
        cursor.execute(f"SELECT MIN({column}) FROM {self._name}")
        (lowest,) = cursor.fetchone()
        return min(lowest or 0, 0)

    @property
    def _name(self) -> str:
        return self._quote(self._table.model._meta.db_table)

    def _quote(self, name: str) -> str:
        quoted: str = self._connection.ops.quote_name(name)
        return quoted.replace("%", "%%")

    # ##### Foreign keys #####

    def note_waiting(self, rows: Iterable[SourceRow], stored: Stored) -> None:
        """Count the references from ``rows`` to rows that this shard does not have yet.

        Adds the count, and examples, to ``stored``. Only foreign keys to models of the same group
        are checked. Costs one query for each such foreign key and 500 values.
        """
        rows = list(rows)
        for place, column in enumerate(self._table.columns):
            reference: Any = column.field
            if not isinstance(reference, ForeignKey) or not column.field.db_constraint:
                continue
            if group_of(reference.related_model) != self._table.options.group:
                continue
            related = SourceTable(reference.related_model, self._alias)
            target = reference.target_field.attname
            values = {row.values[place] for row in rows} - {None}
            there: set[Any] = set()
            for batch in batched(values, LOOK_UPS):
                found = related.query().filter(**{f"{target}__in": batch})
                there.update(found.values_list(target, flat=True))
            for row in rows:
                if row.values[place] in values - there:
                    stored.waiting += 1
                    stored.add_example(
                        f"{self._table.label}(pk={row.pk!r}) refers by {reference.name!r} to"
                        f" {related.label}({target}={row.values[place]!r}), which is not on"
                        f" {self._alias!r}"
                    )
