"""Copy the rows of a shard key to another shard in two steps.

First the rows are copied into *side tables* on the target shard, while the application still uses
the source shard. Queries of the application do not see side tables. Later the rows are *published*:
inserted into the tables of the models. There is one side table for each of these tables. It has the
same columns, and one more: the number of the copy to which a row belongs.

Each backend derives a class from :class:`RowCopy`. ``connection.row_copy()`` returns an object of
that class, which has a session of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import md5
from typing import Any, ClassVar, Final

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.row_access import Row, RowAccess, batches
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

#: The name of a column that only side tables have. It contains the number of the copy to which a
#: row belongs.
COPY: Final = "sharded_orm_copy"
#: How the names of side tables begin. A side table keeps copied rows until they are published.
SIDE_PREFIX: Final = f"{OWN_PREFIX}rows_"
#: One DELETE statement deletes at most this number of rows of an old copy, so that its transaction
#: is short.
DELETED: Final = 1000


@dataclass(frozen=True)
class ChangedRows:
    """The rows of a table that have changed since they were copied.

    :param pks: the primary keys of the changed rows, as the journal (a table that triggers fill)
        stores them.
    :param rows: the present state of these rows, as :meth:`RowCopy.read_again` returns it on the
        source shard. Deleted rows are missing.
    """

    table: CapturedTable
    pks: Sequence[Row]
    rows: Sequence[Row]


class RowCopy(RowAccess):
    """Copies the rows of one shard key into the side tables of a shard, and publishes them: inserts
    them into the tables of the models. For one thread only.
    """

    #: SQL that follows a SELECT, to lock the rows against changes until the end of the transaction.
    #: Empty if the database does so by itself, or checks foreign keys at the end.
    _shared: ClassVar[str] = ""

    def report_counts(self) -> None:
        """Make the server count the rows that this session has written. Without this call, some
        servers count them only seconds later.
        """

    def claim(self, number: int) -> None:
        """Mark this session as one of a move, so that :meth:`ChangeCapture.end_sessions` can end it
        if another process takes the move over.

        :param number: the number of the move.
        """

    # ##### Side tables, which keep copied rows #####

    def prepare(self, tables: Iterable[CapturedTable]) -> None:
        """Create the side tables for ``tables`` that do not exist yet. Copied rows are kept there
        until they are published.
        """
        for table in tables:
            for statement in self._side_statements(table):
                self._rows(statement)

    def put(self, table: CapturedTable, number: int, rows: Sequence[Row]) -> None:
        """Write copied rows into the side table of ``table``. They replace rows of the same copy
        with the same primary keys.

        :param number: the number of the copy.
        :param rows: the rows that :meth:`read` has returned on the source shard.
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
        """Delete rows of a copy from the side table of ``table``. Primary keys that it does not
        have are ignored.

        :param number: the number of the copy.
        :param pks: the primary keys of the rows.
        """
        for batch in batches(pks):
            among, values = self._among(table, table.pks, batch)
            self._rows(
                f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s AND {among}",
                number,
                *values,
            )

    def discard(self, tables: Iterable[CapturedTable], number: int) -> None:
        """Delete all rows of a copy from the side tables of ``tables``.

        :param number: the number of the copy.
        """
        for table in tables:
            self._rows(f"DELETE FROM {self._side(table)} WHERE {self._quote(COPY)} = %s", number)

    def discard_everywhere(self, number: int) -> None:
        """Delete all rows of a copy from all side tables of the shard, in small batches.

        This includes old side tables: if a migration changes the table of a model, the next copy
        uses a new side table, and the old one stays.

        :param number: the number of the copy.
        """
        for name in self._side_tables():
            while self._delete_batch(self._quote(name), number):
                pass

    def copies(self) -> set[int]:
        """Return the numbers of all copies that have rows in side tables of the shard. One
        statement for each side table.
        """
        column = self._quote(COPY)
        return {
            int(number)
            for name in self._side_tables()
            for (number,) in self._rows(f"SELECT DISTINCT {column} FROM {self._quote(name)}")
        }

    def publish(self, tables: Sequence[CapturedTable], number: int) -> None:
        """Publish a copy: insert its rows into the tables of the models, in one transaction.

        The rows also stay in the side tables. The fence with the same number must be closed: its
        triggers refuse the writes of all other sessions for the shard key, but accept those of this
        session.

        :raises MoveFailed: the fence is not closed, or rows refer to copies of global rows that the
            shard lacks. Nothing was inserted.
        :raises django.db.IntegrityError: a table already has an id or unique value of the copy.
            Nothing was inserted.
        """
        with self._passing(number):
            for table in tables:
                self._require_copies(table, number)
            for table in tables:
                self._publish(table, number)

    def _require_copies(self, table: CapturedTable, number: int) -> None:
        """Check that the shard has all copies of global rows to which the rows of a copy refer.

        The session checks no foreign keys, because rows are inserted in any order. A copy may be
        missing because it is late, or because its global row is being deleted. This method also
        locks the copies until the end of the transaction. So a deletion that comes later waits, and
        is then refused, because it finds the published rows.

        :raises MoveFailed: a copy is missing.
        """
        rows = f"{self._side(table)} copied"
        condition = f"copied.{self._quote(COPY)} = %s"
        for link in table.copies:
            column = f"copied.{self._quote(link.column)}"
            target = f"parent.{self._quote(link.target)}"
            ((missing,),) = self._rows(
                f"SELECT COUNT({column}) - COUNT({target}) FROM {rows}"
                f" LEFT JOIN {self._quote(link.table)} parent ON {target} = {column}"
                f" WHERE {condition}{self._shared}",
                number,
            )
            if missing:
                raise MoveFailed(
                    f"{missing} rows of {table.name!r} refer by {link.column!r} to rows of"
                    f" {link.table!r} that {self._connection.alias!r} lacks, so nothing was published"
                    " there: the copies are late, or the global rows are being deleted. Run 'manage.py"
                    " mirrors relay --once', and move the key again."
                )

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
        """Bring a copy up to date, and publish the tables that are not published yet, in one
        transaction.

        A move may have published some tables early, see :meth:`may_publish_early`. ``tables`` are
        the tables that are left. First, the changes are made in the side tables of all tables. If a
        table was published early, the changes are also made in the table itself. There, only rows
        of this copy are deleted, because another shard key may have a row with the same primary
        key. Last, ``tables`` are published.

        The fence with the same number must be closed. Its triggers then accept only the changes of
        this session.

        :param changes: the rows that have changed on the source shard since they were copied. If
            the move gives the rows of a table new primary keys, the table must be one of
            ``tables``.
        :param tables: the tables that are published now.
        :raises MoveFailed, django.db.IntegrityError: for the reasons that :meth:`publish` names.
            Nothing was changed.
        """
        with self._passing(number):
            # First delete all changed rows, then insert their new states. If each row were replaced
            # alone, two rows that have exchanged a unique value would violate the constraint.
            for change in changes:
                if change.table not in tables:
                    self._delete_published(change.table, number, change.pks)
                self.remove(change.table, number, change.pks)
            for change in changes:
                if change.rows:
                    self._insert_copies(change.table, number, change.rows)
            for table in dict.fromkeys([*(change.table for change in changes), *tables]):
                self._require_copies(table, number)
            for change in changes:
                if change.rows and change.table not in tables:
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
        """Move all rows of a shard key from the models' tables into their side tables, where no
        query sees them.

        One transaction. Can be repeated. The fence with the same number must be closed. Its
        triggers then accept only the changes of this session.

        :param tables: the models' tables. Rows are deleted from the last table first. If a table
            has no column with the shard key, its rows are found by foreign keys that lead to a
            table with one. So it must come after all tables to which these foreign keys lead.
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
        """Delete the published rows of a shard key from the models' tables, in one transaction. The
        side tables keep them.

        :param tables: the models' tables, in the order that :meth:`set_aside` demands.
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
        """Undo :meth:`publish`: delete the rows of a shard key and its fence, in one transaction.

        If another process tries to publish the key later, it finds no fence, and fails.

        :param former: None to delete the fence. Otherwise the fence is kept closed and gets the
            number ``former``. Pass it if an earlier move of the key had left the fence under that
            number, before the present move took the fence over and renumbered it.
        :return: False if the fence does not exist. Nothing was changed then.
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
        """Return the conflicts that would prevent the insertion of ``rows`` into ``table``. In a
        conflict, another row of the table already has a primary key or unique value of ``rows``.

        :param rows: the rows that :meth:`read` has returned on the source shard.
        :return: at most ten texts, one for each conflict, such as ``app_photo (slug) of row 17``:
            the table, the columns, and the primary key of the row that has the value on this shard.
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

    # ##### Methods for backends to override #####

    @abstractmethod
    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        """Yield the columns of each unique index of ``table``. Indexes with a condition or an
        expression are left out.
        """

    def may_publish_early(self, table: CapturedTable) -> bool:
        """Whether a move may insert the rows of a key into ``table`` while queries for the key
        still use the source shard.

        True if each unique index, apart from the primary key, contains the shard key. If one does
        not, a row of another key may have the same value, and the INSERT would fail. Indexes with a
        condition or an expression do not count.
        """
        uniques = (unique for unique in self._unique_columns(table.name) if unique != table.pks)
        return all(table.key in unique for unique in uniques)

    def _advance_counters(self, table: CapturedTable, number: int) -> None:
        """Raise the counter that generates the ids of ``table``, so that it does not generate an id
        of the rows that were just published (inserted with their ids).

        Does nothing here, because most databases raise the counter by themselves when a row with an
        id is inserted.
        """

    @abstractmethod
    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        """Return the names of those ``tables`` whose rows a foreign key with CASCADE, SET NULL or
        SET DEFAULT may change without calling their triggers. A move would miss such changes.

        Empty on PostgreSQL, which calls the triggers for such changes.
        """

    @abstractmethod
    def _side_tables(self) -> list[str]:
        """Return the names of all side tables on the shard. Copied rows are kept there until they
        are published.
        """

    @abstractmethod
    def _delete_batch(self, side: str, number: int) -> int:
        """Delete at most :data:`DELETED` rows of a copy from the side table ``side``. Return how
        many rows were deleted.
        """

    @abstractmethod
    def _side_statements(self, table: CapturedTable) -> Iterator[str]: ...

    def _side(self, table: CapturedTable) -> str:
        # The name of the side table contains a hash of the columns. So if a migration changes the
        # table, the next move creates a new side table, and old copies stay in the old one.
        text = repr((table.name, self.columns(table)))
        digest = md5(text.encode(), usedforsecurity=False).hexdigest()[:16]
        return str(self._quote(f"{SIDE_PREFIX}{digest}"))

    @abstractmethod
    def _passing(self, number: int) -> AbstractContextManager[None]:
        """Run a ``with`` block in a transaction that may write although a fence is closed.

        Writes of other sessions are refused meanwhile, or wait. Only one session at a time can run
        such a block for a fence.

        :param number: the number of the fence.
        :raises MoveFailed: the fence is not closed.
        """

    def _not_closed(self, number: int) -> MoveFailed:
        return MoveFailed(
            f"Fence {number} on {self._connection.alias!r} is not closed, so nothing was changed"
            " there: another process has ended or undone this move. Look at the move before you run"
            " it again."
        )
