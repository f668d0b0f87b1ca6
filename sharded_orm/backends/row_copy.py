"""Copies of all rows of a shard key, byte by byte, and a comparison that shares nothing with them.

Copies lie in *side tables*: one per table, on the shard, beside the real one. So queries never see
them. A side table has the columns of its table and the number of the copy, but no other constraint.

Each backend derives a class from :class:`RowCopy`; ``connection.row_copy()`` opens one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import md5
from typing import Any, Final, Self

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

#: The column of a side table with the number of the copy.
COPY: Final = "sharded_orm_copy"
#: Beginning of the names of side tables.
SIDE_PREFIX: Final = f"{OWN_PREFIX}rows_"
BATCH: Final = 200
#: Rows of an old copy that one statement deletes.
DELETED: Final = 1000

Row = tuple[Any, ...]


@dataclass(frozen=True)
class CopiedColumn:
    """A column that is copied. Generated columns are not: the database computes them.

    :param kind: the type's name as the database gives it, in lower case.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class RowDigests:
    """What the server says about rows: their number, and a digest that does not depend on their order."""

    count: int
    digest: str


class RowCopy(ABC):
    """Reads, copies and compares the rows of one key on one shard. For one thread only.

    It has a session of its own, without foreign key checks. As a context manager, it closes the
    session at the end of the block.

    :param connection: a connection object of Django's own backend, which is used for nothing else.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._quote = connection.ops.quote_name
        self._columns: dict[str, tuple[CopiedColumn, ...]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def _count_changed(self, sql: str, *params: Any) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params)
            return int(cursor.rowcount)

    def _run(self, sql: str, *params: Any) -> list[Row]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            return list(cursor.fetchall()) if cursor.description else []

    # ##### Rows of a key #####

    def read(self, table: CapturedTable, key: Any, limit: int, after: Row = ()) -> list[Row]:
        """Return rows of a key in the order of the primary key, as :meth:`put` takes them.

        :param after: the primary key of the last row that was read, as :meth:`pk_of` returns it.
        """
        condition, params = self._of_key(table, key)
        if after:
            pks = ", ".join(map(self._quote, table.pks))
            marks = ", ".join(["%s"] * len(after))
            condition, params = f"{condition} AND ({pks}) > ({marks})", [*params, *after]
        return self._select(table, condition, params, limit)

    def read_again(self, table: CapturedTable, key: Any, pks: Iterable[Row]) -> list[Row]:
        """Return those rows with the given primary keys that exist and belong to the key."""
        rows, (condition, params) = [], self._of_key(table, key)
        for batch in _batches(pks):
            among, values = self._among(table.pks, batch)
            rows += self._select(table, f"{condition} AND {among}", [*params, *values], None)
        return rows

    def pk_of(self, table: CapturedTable, row: Row) -> Row:
        names = [column.name for column in self.columns(table)]
        return tuple(row[names.index(pk)] for pk in table.pks)

    # ##### Side tables #####

    def prepare(self, tables: Iterable[CapturedTable]) -> None:
        """Create the side tables of ``tables`` that do not exist."""
        for table in tables:
            for statement in self._side_statements(table):
                self._run(statement)

    def put(self, table: CapturedTable, number: int, rows: Sequence[Row]) -> None:
        """Write rows into the side table, in place of those that the copy has with these keys.

        :param rows: rows that another shard's :meth:`read` has returned.
        """
        self.remove(table, number, [self.pk_of(table, row) for row in rows])
        columns = self.columns(table)
        names = ", ".join([self._quote(COPY), *(self._quote(column.name) for column in columns)])
        marks = f"(%s, {', '.join(map(self._mark, columns))})"
        for batch in _batches(rows):
            self._run(
                f"INSERT INTO {self._side(table)} ({names}) VALUES"
                f" {', '.join([marks] * len(batch))}",
                *(value for row in batch for value in (number, *row)),
            )

    def remove(self, table: CapturedTable, number: int, pks: Iterable[Row]) -> None:
        """Remove rows from a copy; those that it does not have are ignored."""
        for batch in _batches(pks):
            among, values = self._among(table.pks, batch)
            self._run(
                f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s AND {among}",
                number,
                *values,
            )

    def discard(self, tables: Iterable[CapturedTable], number: int) -> None:
        """Remove a copy."""
        for table in tables:
            self._run(f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s", number)

    def discard_everywhere(self, number: int) -> None:
        """Remove a copy from all side tables in small batches, also if its table was changed since."""
        for name in self._side_tables():
            while self._delete_batch(self._quote(name), number):
                pass

    def copies(self) -> set[int]:
        """Return the numbers of all copies on the shard. One statement per side table."""
        column = self._quote(COPY)
        return {
            int(number)
            for name in self._side_tables()
            for (number,) in self._run(f"SELECT DISTINCT {column} FROM {self._quote(name)}")
        }

    def publish(self, tables: Sequence[CapturedTable], number: int) -> None:
        """Insert the rows of a copy into the real tables, in one transaction. The copy stays.

        The fence with the same number must be closed. It lets these rows pass, and nobody else's.

        :raises MoveFailed: the fence is not closed. Nothing was inserted.
        :raises django.db.IntegrityError: a table has an id or unique value of the copy. Nothing was
            inserted.
        """
        with self._passing(number):
            for table in tables:
                names = self._names(self._kept_columns(table))
                self._run(
                    f"INSERT INTO {self._quote(table.name)} ({names}) SELECT {names}"
                    f" FROM {self._side(table)} WHERE {self._quote(COPY)} = %s",
                    number,
                )

    def set_aside(self, tables: Sequence[CapturedTable], number: int, key: Any) -> None:
        """Move all rows of a key into the side tables, in one transaction. Can be repeated.

        The fence with the same number must be closed. It lets this session pass, and nobody else.

        :param tables: a table with links after those to which the links lead.
        :raises MoveFailed: the fence is not closed. Nothing was moved.
        """
        with self._passing(number):
            for table in tables:
                condition, params = self._of_key(table, key)
                names = self._names(self.columns(table))
                self._run(
                    f"INSERT INTO {self._side(table)} ({self._quote(COPY)}, {names})"
                    f" SELECT %s, {names} FROM {self._quote(table.name)} WHERE {condition}",
                    number,
                    *params,
                )
            for table in reversed(tables):
                condition, params = self._of_key(table, key)
                self._run(f"DELETE FROM {self._quote(table.name)} WHERE {condition}", *params)

    def withdraw(
        self, tables: Sequence[CapturedTable], number: int, key: Any, former: int | None = None
    ) -> bool:
        """Delete the rows of a key together with its fence, in one transaction.

        Undoes :meth:`publish`. A process that would publish later finds no fence.

        :param former: the number of an earlier fence that was taken over. It is restored, closed.
        :return: False if there is no such fence, so nothing was changed.
        :raises MoveFailed: the fence is open. Nothing was changed.
        """
        fences = self._quote(FENCES)
        if not self._run(f"SELECT 1 FROM {fences} WHERE id = %s", number):
            return False
        with self._passing(number):
            for table in reversed(tables):
                condition, params = self._of_key(table, key)
                self._run(f"DELETE FROM {self._quote(table.name)} WHERE {condition}", *params)
            if former is None:
                self._run(f"DELETE FROM {fences} WHERE id = %s", number)
            else:
                update = f"UPDATE {fences} SET id = %s, state = 'closed' WHERE id = %s"
                self._run(update, former, number)
        return True

    def taken(self, table: CapturedTable, rows: Sequence[Row]) -> list[str]:
        """Return which primary keys and unique values of ``rows`` the real table has already.

        :param rows: rows that another shard's :meth:`read` has returned.
        :return: for each such row the columns, and the primary key of the row that is there; at most
            ten.
        """
        names = [column.name for column in self.columns(table)]
        uniques = [] if table.fresh_ids else [table.pks]
        uniques += [unique for unique in self._unique_columns(table.name) if unique != table.pks]
        found: list[str] = []
        for unique in uniques:
            if not set(unique) <= set(names) or (table.fresh_ids and set(unique) <= set(table.pks)):
                continue
            indexes = [names.index(column) for column in unique]
            values = [tuple(row[index] for index in indexes) for row in rows]
            for batch in _batches(value for value in values if None not in value):
                among, params = self._among(unique, batch)
                pks = ", ".join(map(self._quote, table.pks))
                there = self._run(
                    f"SELECT {pks} FROM {self._quote(table.name)} WHERE {among} LIMIT 10", *params
                )
                what = f"{table.name} ({', '.join(unique)})"
                found += [f"{what} of row {', '.join(map(str, pk))}" for pk in there]
        return found[:10]

    # ##### Comparison #####

    def key_digests(self, table: CapturedTable, key: Any) -> RowDigests:
        """Digest the rows of a key in the real table. The server computes it from every column."""
        return self._digests(table, self._quote(table.name), *self._of_key(table, key))

    def copy_digests(self, table: CapturedTable, number: int) -> RowDigests:
        """Digest the rows of a copy. Equal rows give equal digests, on whatever shard they are."""
        return self._digests(table, self._side(table), f"{self._quote(COPY)} = %s", [number])

    def key_rows(self, table: CapturedTable, key: Any) -> dict[Row, str]:
        """Return the digest of each row of a key, by primary key, to name the rows that differ.

        Rows whose primary keys are fresh are named by their other columns.
        """
        return self._row_digests(table, self._quote(table.name), *self._of_key(table, key))

    def copy_rows(self, table: CapturedTable, number: int) -> dict[Row, str]:
        """Return the digest of each row of a copy, as :meth:`key_rows` does."""
        return self._row_digests(table, self._side(table), f"{self._quote(COPY)} = %s", [number])

    # ##### What the backends know #####

    def columns(self, table: CapturedTable) -> tuple[CopiedColumn, ...]:
        """Return the columns that are copied, in the order of the table."""
        if table.name not in self._columns:
            self._columns[table.name] = tuple(self._read_columns(table.name))
        return self._columns[table.name]

    @abstractmethod
    def _read_columns(self, table: str) -> Iterator[CopiedColumn]: ...

    @abstractmethod
    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        """Return the names of those tables whose rows the database changes by foreign key actions.

        The actions are CASCADE, SET NULL and SET DEFAULT. On some databases no trigger sees them.
        """

    @abstractmethod
    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        """Yield the columns of each unique index that has no condition and no expression."""

    @abstractmethod
    def _side_tables(self) -> list[str]:
        """Return the names of all side tables on the shard."""

    @abstractmethod
    def _delete_batch(self, side: str, number: int) -> int:
        """Delete at most :data:`DELETED` rows of a copy. Return how many were deleted."""

    @abstractmethod
    def _side_statements(self, table: CapturedTable) -> Iterator[str]: ...

    @abstractmethod
    def _exact(self, column: CopiedColumn) -> str:
        """Return SQL for the value of a column, from which nothing is lost on the way to Python."""

    @abstractmethod
    def _mark(self, column: CopiedColumn) -> str:
        """Return the parameter's mark in an INSERT of such a value."""

    @abstractmethod
    def _key_condition(self, column: str) -> str:
        """Return SQL that compares the column with the shard key, exactly."""

    @abstractmethod
    def _key_params(self, key: Any) -> list[Any]: ...

    @abstractmethod
    def _digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> RowDigests: ...

    @abstractmethod
    def _row_digest(self, table: CapturedTable) -> str:
        """Return SQL for the digest of a row."""

    def _row_digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> dict[Row, str]:
        kinds = {column.name: column for column in self.columns(table)}
        names = table.pks
        if table.fresh_ids:
            names = tuple(column.name for column in self._kept_columns(table))
        pks = ", ".join(self._exact(kinds[name]) for name in names)
        rows = self._run(
            f"SELECT {self._row_digest(table)}, {pks} FROM {source} WHERE {condition}", *params
        )
        return {tuple(row[1:]): str(row[0]) for row in rows}

    def _select(
        self, table: CapturedTable, condition: str, params: list[Any], limit: int | None
    ) -> list[Row]:
        values = ", ".join(map(self._exact, self.columns(table)))
        order = ", ".join(map(self._quote, table.pks))
        sql = f"SELECT {values} FROM {self._quote(table.name)} WHERE {condition} ORDER BY {order}"
        return self._run(sql if limit is None else f"{sql} LIMIT {limit:d}", *params)

    def _of_key(self, table: CapturedTable, key: Any) -> tuple[str, list[Any]]:
        """Return a condition for the rows of a key, and its parameters."""
        condition = self._key_condition(self._quote(table.key))
        for link in reversed(table.links):
            condition = (
                f"{self._quote(link.column)} IN (SELECT {self._quote(link.target)}"
                f" FROM {self._quote(link.table)} WHERE {condition})"
            )
        return condition, self._key_params(key)

    def _among(self, columns: Sequence[str], rows: Sequence[Row]) -> tuple[str, list[Any]]:
        """Return a condition for the rows with given values of ``columns``, and its parameters."""
        values = [value for row in rows for value in row]
        if len(columns) == 1:
            return f"{self._quote(columns[0])} IN ({', '.join(['%s'] * len(rows))})", values
        one = " AND ".join(f"{self._quote(column)} = %s" for column in columns)
        return f"({' OR '.join([f'({one})'] * len(rows))})", values

    def _names(self, columns: Iterable[CopiedColumn]) -> str:
        return ", ".join(self._quote(column.name) for column in columns)

    def _kept_columns(self, table: CapturedTable) -> tuple[CopiedColumn, ...]:
        """Return the columns whose values are the same on every shard."""
        columns = self.columns(table)
        if not table.fresh_ids:
            return columns
        return tuple(column for column in columns if column.name not in table.pks)

    def _side(self, table: CapturedTable) -> str:
        # The columns are part of the name, because a migration may change the table while old
        # copies are kept.
        text = repr((table.name, self.columns(table)))
        digest = md5(text.encode(), usedforsecurity=False).hexdigest()[:16]
        return str(self._quote(f"{SIDE_PREFIX}{digest}"))

    @abstractmethod
    def _passing(self, number: int) -> AbstractContextManager[None]:
        """A transaction in which the triggers let the changes of this session pass.

        Others see the fence closed, or wait. Only one session passes a fence at a time.

        :raises MoveFailed: the fence is not closed.
        """

    def _not_closed(self, number: int) -> MoveFailed:
        return MoveFailed(
            f"Fence {number} on {self._connection.alias!r} is not closed, so nothing was changed"
            " there: another process has ended or undone this move. Look at the move before you run"
            " it again."
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run(self._begin)
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            self._run("ROLLBACK")
            raise

    _begin = "START TRANSACTION"


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    rows = list(values)
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]
