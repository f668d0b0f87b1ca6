"""Digests of the rows on one side of a pair, to compare them with the other side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.mysql.row_copy import MySQLRowCopy
from sharded_orm.backends.row_access import RowDigests


class MySQLSideRows(MySQLRowCopy):
    """A session of its own that reads whole tables on one side of a pair. For one thread only."""

    @contextmanager
    def snapshot(self) -> Iterator[str]:
        """A context manager in whose block :meth:`digest` reads the rows of one moment.

        It yields the position of this moment in the server's log of changes.
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
        """Return the digest of all rows of a table. Reads the whole table.

        :param columns: the columns to compare. Generated columns are left out.
        """
        self._rows(f"USE {self._quote(schema)}")
        kinds = {column.name: column for column in self._read_columns(table)}
        self._columns[table] = tuple(kinds[name] for name in columns if name in kinds)
        return self.range_digests(CapturedTable(table, (), ""), (), ())
