"""Read the rows of a shard with exact values, to copy them to another shard or to compare them.

For a comparison, each server computes digests (hashes) of its rows, so that the rows need not be
sent.

Each backend derives a class from :class:`~sharded_orm.backends.row_copy.RowCopy`, which also writes
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.own_session import OwnSession

#: The largest number of rows that one statement reads or writes.
BATCH: Final = 200

Row = tuple[Any, ...]


@dataclass(frozen=True)
class CopiedColumn:
    """A column whose values are copied to another shard. Generated columns are left out, because
    the database computes their values.

    :param kind: the name of the type in lower case, as the database returns it, such as
        ``varchar``.
    :param charset: the character set; "" if the type has none.
    :param collation: the collation; "" if the type has none.
    """

    name: str
    kind: str
    charset: str = ""
    collation: str = ""


@dataclass(frozen=True)
class RowDigests:
    """The number of rows in a set of rows, and a digest (hash) of all of them. The server computes
    both.

    The order of the rows does not change the digest. So two shards have the same rows if both
    values are equal.
    """

    count: int
    digest: str


class RowAccess(OwnSession, ABC):
    """Reads, writes and compares rows on one shard. The session checks no foreign keys.

    Several threads may use the same object, but only one at a time.
    """

    #: SQL that follows the column names in an INSERT, such as OVERRIDING SYSTEM VALUE. With it,
    #: copied rows keep their ids. Without it, PostgreSQL refuses an INSERT of ids into a column
    #: that is GENERATED ALWAYS.
    _as_given: ClassVar[str] = ""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        # The caller compares two shards at the same time, in two threads. This call makes Django
        # allow other threads to use this connection.
        connection.inc_thread_sharing()
        self._columns: dict[str, tuple[CopiedColumn, ...]] = {}

    def _count_changed(self, sql: str, *params: Any) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    # ##### Rows of a shard key #####

    def read(self, table: CapturedTable, key: Any, limit: int, after: Row = ()) -> list[Row]:
        """Return rows of a shard key, sorted by primary key, for :meth:`RowCopy.put`.

        Call it in a loop to read the rows in batches. Each call continues after the last row of the
        call before.

        :param limit: the largest number of rows to return.
        :param after: the primary key of the last row of the call before, as :meth:`pk_of` returns
            it. Empty for the first call.
        """
        condition, params = self._of_key(table, key)
        behind, values = self._behind(table, after)
        condition, params = f"{condition} AND {behind}", [*params, *values]
        return self._select(table, condition, params, limit)

    def read_again(self, table: CapturedTable, key: Any, pks: Iterable[Row]) -> list[Row]:
        """Return those rows of a shard key whose primary keys are in ``pks``. Rows that were
        deleted meanwhile are missing in the result.
        """
        # Collect the rows in a dict, so that no row is returned twice. ``pks`` may have the same
        # primary key twice, as a number and as text.
        found: dict[Row, Row] = {}
        condition, params = self._of_key(table, key)
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            rows = self._select(table, f"{condition} AND {among}", [*params, *values], None)
            found |= {self.pk_of(table, row): row for row in rows}
        return list(found.values())

    def pk_of(self, table: CapturedTable, row: Row) -> Row:
        names = [column.name for column in self.columns(table)]
        return tuple(row[names.index(pk)] for pk in table.pks)

    # ##### Rows of whole tables #####

    def store(self, table: CapturedTable, rows: Sequence[Row], gone: Iterable[Row] = ()) -> None:
        """Write rows into ``table`` itself, not into its side table, in one transaction.

        :param rows: rows that another shard's :meth:`read` has returned.
        :param gone: primary keys of rows to delete first.
        :raises django.db.IntegrityError: another row has a primary key or unique value of ``rows``.
            Nothing was changed.
        """
        with self._transaction():
            self._delete(table, gone)
            self._insert(table, rows)

    def _delete(self, table: CapturedTable, pks: Iterable[Row]) -> None:
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            self._rows(f"DELETE FROM {self._quote(table.name)} WHERE {among}", *values)

    def _insert(self, table: CapturedTable, rows: Iterable[Row]) -> None:
        columns = self.columns(table)
        name, marks = self._quote(table.name), f"({', '.join(map(self._mark, columns))})"
        for batch in batches(rows):
            self._rows(
                f"INSERT INTO {name} ({self._names(columns)}){self._as_given} VALUES"
                f" {', '.join([marks] * len(batch))}",
                *(value for row in batch for value in row),
            )

    def boundary(self, table: CapturedTable, after: Row, size: int) -> Row:
        """Return the primary key of the row that comes ``size`` rows after the primary key
        ``after``, in the order of primary keys. Return an empty tuple if fewer than ``size`` rows
        follow.

        A comparison calls this to divide a table into ranges of ``size`` rows.
        """
        condition, params = self._behind(table, after)
        name = self._quote(table.name)
        kinds = {column.name: column for column in self.columns(table)}
        pks = ", ".join(self._exact(kinds[pk]) for pk in table.pks)
        rows = self._rows(
            f"SELECT {pks} FROM {name} WHERE {condition} {self._order(table, name)}"
            f" LIMIT 1 OFFSET {size - 1:d}",
            *params,
        )
        return rows[0] if rows else ()

    def range_digests(self, table: CapturedTable, after: Row, until: Row) -> RowDigests:
        """Return one digest of all rows in a range of primary keys.

        The range begins after ``after``, or with the first row if ``after`` is empty. It ends with
        ``until``, which it includes, or with the last row if ``until`` is empty.
        """
        return self._digests(table, self._quote(table.name), *self._range(table, after, until))

    def range_rows(self, table: CapturedTable, after: Row, until: Row) -> dict[Row, str]:
        """Return a dict that maps the primary key of each row in a range to the digest of the row.

        The parameters are those of :meth:`range_digests`.
        """
        return self._row_digests(table, self._quote(table.name), *self._range(table, after, until))

    def rows_of(self, table: CapturedTable, pks: Iterable[Row]) -> dict[Row, str]:
        """Return a dict that maps each primary key of ``pks`` whose row exists to the digest of the
        row.
        """
        found: dict[Row, str] = {}
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            found |= self._row_digests(table, self._quote(table.name), among, values)
        return found

    def _range(self, table: CapturedTable, after: Row, until: Row) -> tuple[str, list[Any]]:
        condition, params = self._behind(table, after)
        if until:
            further, values = self._compared(table, "<=", until)
            condition, params = f"{condition} AND {further}", [*params, *values]
        return condition, params

    def _behind(self, table: CapturedTable, after: Row) -> tuple[str, list[Any]]:
        return self._compared(table, ">", after) if after else ("1 = 1", [])

    def _compared(self, table: CapturedTable, operator: str, pk: Row) -> tuple[str, list[Any]]:
        """Return an SQL condition such as ``id > %s``, and its parameters. It compares the primary
        key with ``pk``.
        """
        names, marks = list(map(self._quote, table.pks)), self._comparands(table, table.pks)
        if len(names) == 1:
            return f"{names[0]} {operator} {marks[0]}", list(pk)
        # MariaDB uses no index for a comparison of several columns at once, such as (a, b) > (1,
        # 2). So add a comparison of the first column, such as a >= 1, which can use an index.
        condition = f"({', '.join(names)}) {operator} ({', '.join(marks)})"
        return f"({names[0]} {operator[0]}= {marks[0]} AND {condition})", [pk[0], *pk]

    def _comparands(self, table: CapturedTable, columns: Iterable[str]) -> list[str]:
        kinds = {column.name: column for column in self.columns(table)}
        return [self._comparand(kinds[name]) for name in columns]

    # ##### Comparison #####

    def key_digests(self, table: CapturedTable, key: Any) -> RowDigests:
        """Return the number and the digest of a shard key's rows in ``table``. The server computes
        the digest from all columns.

        Rows in the side table of ``table``, where moves keep copied rows, do not count.
        """
        return self._digests(table, self._quote(table.name), *self._of_key(table, key))

    def key_rows(self, table: CapturedTable, key: Any) -> dict[Row, str]:
        """Return a dict that maps the primary key of each row of a shard key to a digest of the
        row.

        Two such dicts show which rows differ between two shards. If a move gives the rows new
        primary keys, the dict is keyed by the values of all other columns instead.
        """
        return self._row_digests(table, self._quote(table.name), *self._of_key(table, key))

    # ##### Methods for backends to override #####

    def columns(self, table: CapturedTable) -> tuple[CopiedColumn, ...]:
        """Return the columns whose values are copied, sorted by name.

        They are sorted because the same table may have its columns in another order on another
        shard. For example, a migration has added a column at the end of an old table, while a newer
        table was created with this column in the middle.
        """
        if table.name not in self._columns:
            columns = sorted(self._read_columns(table.name), key=attrgetter("name"))
            self._columns[table.name] = tuple(columns)
        return self._columns[table.name]

    @abstractmethod
    def _read_columns(self, table: str) -> Iterator[CopiedColumn]: ...

    @abstractmethod
    def _exact(self, column: CopiedColumn) -> str:
        """Return an SQL expression that selects the value of a column in an exact form.

        For example, a floating-point number might otherwise arrive rounded.
        """

    @abstractmethod
    def _mark(self, column: CopiedColumn) -> str:
        """Return the SQL placeholder with which an INSERT stores a value of the column that was
        read in the form of :meth:`_exact`.
        """

    def _comparand(self, column: CopiedColumn) -> str:
        """Return the SQL placeholder for a value with which the column is compared.

        The comparison must follow the column's collation, as its index and ORDER BY do.
        """
        return "%s"

    @abstractmethod
    def _key_condition(self, column: str) -> str:
        """Return an SQL condition that is true if ``column`` has exactly the given shard key. A
        collation that ignores case, for example, must not make it true for another key.
        """

    @abstractmethod
    def _key_params(self, key: Any) -> list[Any]: ...

    @abstractmethod
    def _digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> RowDigests: ...

    @abstractmethod
    def _row_digest(self, table: CapturedTable) -> str:
        """Return an SQL expression that computes the digest of one row."""

    def _row_digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> dict[Row, str]:
        kinds = {column.name: column for column in self.columns(table)}
        names = table.pks
        if table.fresh_ids:
            names = tuple(column.name for column in self._kept_columns(table))
        pks = ", ".join(self._exact(kinds[name]) for name in names)
        rows = self._rows(
            f"SELECT {self._row_digest(table)}, {pks} FROM {source} WHERE {condition}", *params
        )
        return {tuple(row[1:]): str(row[0]) for row in rows}

    def _select(
        self, table: CapturedTable, condition: str, params: list[Any], limit: int | None
    ) -> list[Row]:
        return self._select_from(self._quote(table.name), table, condition, params, limit)

    def _select_from(
        self,
        source: str,
        table: CapturedTable,
        condition: str,
        params: list[Any],
        limit: int | None = None,
    ) -> list[Row]:
        """Return rows of ``source``, which is either ``table`` itself or its side table."""
        values = ", ".join(map(self._exact, self.columns(table)))
        sql = f"SELECT {values} FROM {source} WHERE {condition} {self._order(table, source)}"
        return self._rows(sql if limit is None else f"{sql} LIMIT {limit:d}", *params)

    def _order(self, table: CapturedTable, source: str) -> str:
        # Write table.column, because the query also selects an expression with the name of the
        # column: the value as text. ORDER BY with the name alone would sort by this text.
        return f"ORDER BY {', '.join(f'{source}.{self._quote(pk)}' for pk in table.pks)}"

    def _of_key(self, table: CapturedTable, key: Any) -> tuple[str, list[Any]]:
        if table.fence is not None:
            # The table is copied as a whole, for example because its shard moves to another node.
            # So select all rows, whatever their shard keys are.
            return "1 = 1", []
        condition = self._key_condition(self._quote(table.key))
        for link in reversed(table.links):
            condition = (
                f"{self._quote(link.column)} IN (SELECT {self._quote(link.target)}"
                f" FROM {self._quote(link.table)} WHERE {condition})"
            )
        return condition, self._key_params(key)

    def _among(
        self, table: CapturedTable, columns: Sequence[str], rows: Sequence[Row]
    ) -> tuple[str, list[Any]]:
        """Return an SQL condition that selects the rows with one of the given values, and its
        parameters.

        :param columns: the columns that are compared, such as those of the primary key.
        :param rows: tuples with a value for each of ``columns``.
        """
        values = [value for row in rows for value in row]
        marks = self._comparands(table, columns)
        if len(columns) == 1:
            return f"{self._quote(columns[0])} IN ({', '.join(marks * len(rows))})", values
        one = " AND ".join(
            f"{self._quote(column)} = {mark}" for column, mark in zip(columns, marks, strict=True)
        )
        return f"({' OR '.join([f'({one})'] * len(rows))})", values

    def _names(self, columns: Iterable[CopiedColumn]) -> str:
        return ", ".join(self._quote(column.name) for column in columns)

    def _kept_columns(self, table: CapturedTable) -> tuple[CopiedColumn, ...]:
        """Return the columns that a row keeps when it is published (inserted into the table of its
        model). These are all columns, except the primary key if a move gives the rows new primary
        keys.
        """
        columns = self.columns(table)
        if not table.fresh_ids:
            return columns
        return tuple(column for column in columns if column.name not in table.pks)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._rows(self._begin)
        try:
            yield
            self._rows("COMMIT")
        except BaseException:
            self._rows("ROLLBACK")
            raise

    _begin = "START TRANSACTION"


def batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    rows = list(values)
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]
