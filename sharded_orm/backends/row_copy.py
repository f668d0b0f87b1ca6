"""Copy the rows of a shard key into side tables, and publish them later: insert them into the real
tables.

*Side tables* are on the target shard, one for each real table, so queries do not see the rows
before they are published. A side table has the columns of its real table, and the number of the
copy to which the row belongs.

Each backend derives a class from :class:`RowCopy`. ``connection.row_copy()`` returns an object of
that class, which has a session of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import md5
from typing import Any, Final

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.row_access import Row, RowAccess, RowDigests, batches
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

#: The column in each side table (which keeps copied rows) with the number of the copy that a row
#: belongs to.
COPY: Final = "sharded_orm_copy"
#: The beginning of the names of side tables, in which copied rows are kept.
SIDE_PREFIX: Final = f"{OWN_PREFIX}rows_"
#: How many rows of an old copy one statement deletes at most.
DELETED: Final = 1000


@dataclass(frozen=True)
class ChangedRows:
    """Rows of a table that have changed since they were copied.

    :param pks: the primary keys of the rows, as the journal (the table of changed rows) stores
        them.
    :param rows: those rows that still exist, as another shard's :meth:`RowCopy.read_again` returns
        them.
    """

    table: CapturedTable
    pks: Sequence[Row]
    rows: Sequence[Row]


class RowCopy(RowAccess):
    """Copies the rows of one shard key into side tables of one shard, and publishes them. For one
    thread only.
    """

    def report_counts(self) -> None:
        """Make the server count the rows that this session has written, if it counts them later than
        other statements see them.
        """

    def claim(self, number: int) -> None:
        """Mark this session as one that works on a move, so that :meth:`ChangeCapture.end_sessions`
        finds it.

        :param number: the number of the move.
        """

    # ##### Side tables, which keep copied rows #####

    def prepare(self, tables: Iterable[CapturedTable]) -> None:
        """Create the missing side tables, in which copied rows are kept, for ``tables``."""
        for table in tables:
            for statement in self._side_statements(table):
                self._rows(statement)

    def put(self, table: CapturedTable, number: int, rows: Sequence[Row]) -> None:
        """Write copied rows into the side table of ``table``, which keeps them until they are
        published. They replace rows of the side table with the same primary keys.

        :param number: the number of the copy.
        :param rows: rows that another shard's :meth:`read` has returned.
        """
        self.remove(table, number, [self.pk_of(table, row) for row in rows])
        self._insert_copies(table, number, rows)

    def _insert_copies(self, table: CapturedTable, number: int, rows: Sequence[Row]) -> None:
        columns = self.columns(table)
        names = ", ".join([self._quote(COPY), *(self._quote(column.name) for column in columns)])
        marks = f"(%s, {', '.join(map(self._mark, columns))})"
        for batch in batches(rows):
            self._rows(
                f"INSERT INTO {self._side(table)} ({names}) VALUES"
                f" {', '.join([marks] * len(batch))}",
                *(value for row in batch for value in (number, *row)),
            )

    def remove(self, table: CapturedTable, number: int, pks: Iterable[Row]) -> None:
        """Delete the rows with the primary keys ``pks`` from a copy (in the side table of ``table``),
        if they are there.

        :param number: the number of the copy.
        """
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            self._rows(
                f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s AND {among}",
                number,
                *values,
            )

    def discard(self, tables: Iterable[CapturedTable], number: int) -> None:
        """Delete all rows of a copy from the side tables of ``tables``, where copied rows are kept.

        :param number: the number of the copy.
        """
        for table in tables:
            self._rows(f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s", number)

    def discard_everywhere(self, number: int) -> None:
        """Delete a copy of rows from all side tables, where copied rows are kept, in small batches.
        Also finds the rows if their table was migrated after they were copied.

        :param number: the number of the copy.
        """
        for name in self._side_tables():
            while self._delete_batch(self._quote(name), number):
                pass

    def copies(self) -> set[int]:
        """Return the numbers of all copies that have rows in the shard's side tables, where copied
        rows are kept. One statement for each side table.
        """
        column = self._quote(COPY)
        return {
            int(number)
            for name in self._side_tables()
            for (number,) in self._rows(f"SELECT DISTINCT {column} FROM {self._quote(name)}")
        }

    def publish(self, tables: Sequence[CapturedTable], number: int) -> None:
        """Insert the rows of a copy into the real tables, in one transaction.

        The side tables keep the copy.

        The fence with the same number, which makes triggers refuse writes of the key, must be closed.
        The triggers let the writes of this session pass, but no writes of other sessions.

        :raises MoveFailed: the fence is not closed. Nothing was inserted.
        :raises django.db.IntegrityError: a real table already has an id or unique value of the copy.
            Nothing was inserted.
        """
        with self._passing(number):
            for table in tables:
                self._publish(table, number)

    def _publish(self, table: CapturedTable, number: int) -> None:
        names = self._names(self._kept_columns(table))
        self._rows(
            f"INSERT INTO {self._quote(table.name)} ({names}){self._as_given} SELECT {names}"
            f" FROM {self._side(table)} WHERE {self._quote(COPY)} = %s",
            number,
        )
        self._advance_counters(table, number)

    def complete(
        self, number: int, changes: Sequence[ChangedRows], tables: Sequence[CapturedTable] = ()
    ) -> None:
        """Update a copy to a later state, and publish more of its tables, in one transaction.

        All tables but ``tables`` are published already, so their changes are made in the real
        tables, too. Only rows that this copy has published are changed there: a row with the same
        primary key may belong to another key.

        The fence with the same number must be closed. Its triggers let the changes of this session
        pass, and no others.

        :param changes: the changed rows. If the copy gives the rows of a table new primary keys,
            the table must be one of ``tables``.
        :param tables: the tables that are published now.
        :raises MoveFailed, django.db.IntegrityError: for the reasons that :meth:`publish` names.
            Nothing was changed.
        """
        with self._passing(number):
            # Delete all changed rows first, because two rows may have exchanged a unique value.
            for change in changes:
                if change.table not in tables:
                    self._delete_published(change.table, number, change.pks)
                self.remove(change.table, number, change.pks)
            for change in changes:
                if change.rows:
                    self._insert_copies(change.table, number, change.rows)
                    if change.table not in tables:
                        self._insert(change.table, change.rows)
                        self._advance_counters(change.table, number)
            for table in tables:
                self._publish(table, number)

    def _delete_published(self, table: CapturedTable, number: int, pks: Iterable[Row]) -> None:
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            copied = self._select_from(
                self._side(table), table, f"{self._quote(COPY)} = %s AND {among}", [number, *values]
            )
            self._delete(table, [self.pk_of(table, row) for row in copied])

    def set_aside(self, tables: Sequence[CapturedTable], number: int, key: Any) -> None:
        """Move all rows of a shard key into the side tables, out of sight, in one transaction. Can
        be repeated.

        The fence with the same number must be closed. Its triggers let the changes of this session
        pass, and no others.

        :param tables: a table with links (foreign keys that lead to the shard key) must come after
            the tables to which its links lead.
        :raises MoveFailed: the fence is not closed. Nothing was moved.
        """
        with self._passing(number):
            for table in tables:
                condition, params = self._of_key(table, key)
                names = self._names(self.columns(table))
                self._rows(
                    f"INSERT INTO {self._side(table)} ({self._quote(COPY)}, {names})"
                    f" SELECT %s, {names} FROM {self._quote(table.name)} WHERE {condition}",
                    number,
                    *params,
                )
            self._delete_rows(tables, key)

    def unpublish(self, tables: Sequence[CapturedTable], number: int, key: Any) -> None:
        """Delete the published rows of a shard key from the real tables, in one transaction.

        The side tables keep the copy.

        :param tables: a table with links (foreign keys that lead to the shard key) must come after
            the tables to which its links lead.
        :raises MoveFailed: the fence is not closed. Nothing was deleted.
        """
        with self._passing(number):
            self._delete_rows(tables, key)

    def _delete_rows(self, tables: Sequence[CapturedTable], key: Any) -> None:
        for table in reversed(tables):
            condition, params = self._of_key(table, key)
            self._rows(f"DELETE FROM {self._quote(table.name)} WHERE {condition}", *params)

    def withdraw(
        self, tables: Sequence[CapturedTable], number: int, key: Any, former: int | None = None
    ) -> bool:
        """Undo :meth:`publish`: delete the rows of a shard key, and its fence, in one transaction.

        A process that tries to publish the key later finds no fence, and fails.

        :param former: the number of an earlier fence that this move had taken over. It is restored
            as a closed fence.
        :return: False if the fence does not exist, so nothing was changed.
        :raises MoveFailed: the fence is open. Nothing was changed.
        """
        fences = self._quote(FENCES)
        if not self._rows(f"SELECT 1 FROM {fences} WHERE id = %s", number):
            return False
        with self._passing(number):
            self._delete_rows(tables, key)
            if former is None:
                self._rows(f"DELETE FROM {fences} WHERE id = %s", number)
            else:
                update = f"UPDATE {fences} SET id = %s, state = 'closed' WHERE id = %s"
                self._rows(update, former, number)
        return True

    def taken(self, table: CapturedTable, rows: Sequence[Row]) -> list[str]:
        """Return which primary keys and unique values of ``rows`` already exist in the real table.

        :param rows: rows that another shard's :meth:`read` has returned.
        :return: at most ten texts, one for each value that exists. A text names the columns of the
            value, and the primary key of the row that has the value on this shard.
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
            for batch in batches(value for value in values if None not in value):
                among, params = self._among(table, unique, batch)
                pks = ", ".join(map(self._quote, table.pks))
                there = self._rows(
                    f"SELECT {pks} FROM {self._quote(table.name)} WHERE {among} LIMIT 10", *params
                )
                what = f"{table.name} ({', '.join(unique)})"
                found += [f"{what} of row {', '.join(map(str, pk))}" for pk in there]
        return found[:10]

    def copy_digests(self, table: CapturedTable, number: int) -> RowDigests:
        """Return the digest of the rows of a copy. Equal rows have equal digests on every shard."""
        return self._digests(table, self._side(table), f"{self._quote(COPY)} = %s", [number])

    def copy_rows(self, table: CapturedTable, number: int) -> dict[Row, str]:
        """Return the digest of each row of a copy, as primary key -> digest."""
        return self._row_digests(table, self._side(table), f"{self._quote(COPY)} = %s", [number])

    # ##### Methods for backends to override #####

    @abstractmethod
    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        """Yield the columns of each unique index that has no condition and no expression."""

    def may_publish_early(self, table: CapturedTable) -> bool:
        """Whether rows of a moving key may be inserted into the real table before queries for the
        key use this shard.

        False if a unique index other than the primary key does not contain the shard key: a row of
        another key may have the same value. Indexes with a condition or an expression do not count.
        """
        uniques = (unique for unique in self._unique_columns(table.name) if unique != table.pks)
        return all(table.key in unique for unique in uniques)

    def _advance_counters(self, table: CapturedTable, number: int) -> None:
        """Make sure that the next generated ids are higher than those of the rows that were just
        published (inserted into the real table).

        Does nothing here: most databases raise the counter when a row with an id is inserted.
        """

    @abstractmethod
    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        """Return the names of the tables in which foreign keys make the database change rows.

        The foreign keys have the action CASCADE, SET NULL or SET DEFAULT. Some databases call no
        trigger for such a change.
        """

    @abstractmethod
    def _side_tables(self) -> list[str]:
        """Return the names of all tables on the shard in which copied rows are kept."""

    @abstractmethod
    def _delete_batch(self, side: str, number: int) -> int:
        """Delete at most :data:`DELETED` rows of a copy from ``side``, a side table for copied
        rows.

        Return how many rows were deleted.
        """

    @abstractmethod
    def _side_statements(self, table: CapturedTable) -> Iterator[str]: ...

    def _side(self, table: CapturedTable) -> str:
        # Make the columns part of the side table's name, because a migration may change the table
        # while old copies are kept.
        text = repr((table.name, self.columns(table)))
        digest = md5(text.encode(), usedforsecurity=False).hexdigest()[:16]
        return str(self._quote(f"{SIDE_PREFIX}{digest}"))

    @abstractmethod
    def _passing(self, number: int) -> AbstractContextManager[None]:
        """Run a ``with`` block in a transaction whose changes pass the triggers, although the fence
        is closed.

        Meanwhile, the triggers refuse writes of other sessions, or let them wait. Only one session
        passes a fence at a time.

        :param number: the number of the fence.
        :raises MoveFailed: the fence is not closed.
        """

    def _not_closed(self, number: int) -> MoveFailed:
        return MoveFailed(
            f"Fence {number} on {self._connection.alias!r} is not closed, so nothing was changed"
            " there: another process has ended or undone this move. Look at the move before you run"
            " it again."
        )
