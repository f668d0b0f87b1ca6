"""Compare rows of the two servers of a pair by hashes, and copy rows from one of the servers to the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.mysql.row_copy import MySQLRowCopy
from sharded_orm.backends.row_access import BATCH, Row, RowDigests


class MySQLSideRows(MySQLRowCopy):
    """A session of its own that reads or fills whole tables on one server of a pair. For one thread
    only.
    """

    @contextmanager
    def snapshot(self) -> Iterator[str]:
        """Return a context manager in whose block :meth:`digest` reads all rows as they were at one
        moment.

        It yields the position in the server's binary log at this moment.
        """
        self._rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self._rows("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            place = {
                str(name).lower(): value
                for name, value in self._rows("SHOW STATUS LIKE 'binlog_snapshot_%'")
            }
            ((position,),) = self._rows(
                "SELECT BINLOG_GTID_POS(%s, %s)",
                place["binlog_snapshot_file"],
                int(place["binlog_snapshot_position"]),
            )
            yield str(position)
        finally:
            self._rows("COMMIT")

    def digest(self, schema: str, table: str, columns: Sequence[str]) -> RowDigests:
        """Return a digest of all rows of a table, to compare them with those of the other server.
        Reads the whole table.

        :param columns: the columns to compare. Generated columns are left out.
        """
        self._use(schema)
        kinds = {column.name: column for column in self._read_columns(table)}
        self._columns[table] = tuple(kinds[name] for name in columns if name in kinds)
        return self.range_digests(CapturedTable(table, (), ""), (), ())

    def _use(self, schema: str) -> None:
        self._rows(f"USE {self._quote(schema)}")
        # Forget the columns that were read for the earlier schema. They are cached by the name of
        # the table, and each schema has tables of the same names.
        self._columns.clear()

    def table(self, schema: str, name: str) -> CapturedTable:
        """Make ``schema`` the current schema. Return its table ``name`` as an object that
        :meth:`rows_by_pk` takes.

        :raises LookupError: the table has no primary key.
        """
        self._use(schema)
        pks = tuple(
            str(column)
            for (column,) in self._rows(
                "SELECT column_name FROM information_schema.statistics WHERE table_schema = %s"
                " AND table_name = %s AND index_name = 'PRIMARY' ORDER BY seq_in_index",
                schema,
                name,
            )
        )
        if not pks:
            raise LookupError(name)
        return CapturedTable(name, pks, "", fence="whole")

    def rows_by_pk(self, table: CapturedTable, pks: Iterable[Row]) -> dict[Row, dict[str, Any]]:
        """Return the rows that exist with the primary keys ``pks``.

        The result maps the primary key of each row to a dict of column name -> value.
        """
        names = [column.name for column in self.columns(table)]
        return {
            self.pk_of(table, row): dict(zip(names, row, strict=True))
            for row in self.read_again(table, None, pks)
        }

    def create_closed(self, schema: str, name: str, definition: str, constraint: str) -> None:
        """Drop a table and create it again, without rows, to fill it from the other server.

        The new table has a constraint that refuses all rows. Only :meth:`fill` can insert rows,
        until :meth:`accept_rows` drops the constraint.

        :param definition: the statement that creates the table.
        :param constraint: the name for the constraint.
        """
        self._use(schema)
        refusal = f" (\n  CONSTRAINT {self._quote(constraint)} CHECK (1 = 0),\n"
        self._rows(f"DROP TABLE IF EXISTS {self._quote(name)}")
        self._rows(definition.replace(" (\n", refusal, 1))

    def fill(self, schema: str, name: str, source: Self, check: Callable[[], None]) -> None:
        """Copy all rows of a table from ``source``, the other server, into the empty table of this
        server.

        Costs two statements for each 200 rows.

        :param check: called before each 200 rows. It raises an error if this process must stop, for
            example because another one has taken over.
        :raises django.db.IntegrityError: the table is not empty.
        """
        self._use(schema)
        self._rows("SET SESSION check_constraint_checks = 0")
        table = source.table(schema, name)
        rows = source.read(table, None, BATCH)
        while rows:
            check()
            self.store(table, rows)
            rows = source.read(table, None, BATCH, source.pk_of(table, rows[-1]))

    def accept_rows(self, name: str, constraint: str, counter: int | None) -> None:
        """Drop the constraint with which :meth:`create_closed` has created the table, so that it
        takes rows.

        :param counter: the table's next AUTO_INCREMENT value; None if the table has none.
        """
        following = "" if counter is None else f", AUTO_INCREMENT = {counter:d}"
        self._rows(
            f"ALTER TABLE {self._quote(name)} DROP CONSTRAINT {self._quote(constraint)}{following}"
        )

    def has_values(self, schema: str, table: str, columns: Sequence[str]) -> bool:
        """Whether any row has a value other than the column's default in one of ``columns``. If
        ``columns`` is empty, return whether the table has any row.

        Reads the whole table in the worst case.
        """
        name = f"{self._quote(schema)}.{self._quote(table)}"
        tests = [f"NOT {quoted} <=> DEFAULT({quoted})" for quoted in map(self._quote, columns)]
        condition = " OR ".join(tests) or "1 = 1"
        ((answer,),) = self._rows(f"SELECT EXISTS (SELECT 1 FROM {name} WHERE {condition})")
        return bool(answer)
