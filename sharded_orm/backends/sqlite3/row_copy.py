"""Copy the rows of a shard key between SQLite files. Compare rows by digests of their values and of
the types of these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.row_access import CopiedColumn, RowDigests
from sharded_orm.backends.row_copy import COPY, DELETED, SIDE_PREFIX, RowCopy

# How many arguments this module passes to an SQL function at most. SQLite allows at least 100,
# unless it was built with a lower limit.
_ARGUMENTS = 50


class SQLiteRowCopy(RowCopy):
    _begin = "BEGIN IMMEDIATE"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        connection.ensure_connection()
        connection.connection.create_function("sharded_orm_digest", -1, _digest, deterministic=True)
        self._rows("PRAGMA foreign_keys = OFF")

    @contextmanager
    def _passing(self, number: int) -> Iterator[None]:
        # The triggers would refuse the writes of this block, too, because the fence is closed. So
        # give the fence the state "passes", with which its triggers let all writes pass. The
        # transaction closes the fence again before it commits, so other sessions never see this
        # state.
        fence = f"UPDATE {self._quote(FENCES)} SET state = %s WHERE id = %s"
        with self._transaction():
            if self._count_changed(f"{fence} AND state = 'closed'", "passes", number) != 1:
                raise self._not_closed(number)
            yield
            self._rows(fence, "closed", number)

    def _read_columns(self, table: str) -> Iterator[CopiedColumn]:
        for _, name, kind, *_, hidden in self._rows(f"PRAGMA table_xinfo({self._quote(table)})"):
            if not hidden:
                yield CopiedColumn(str(name), str(kind).lower())

    def _side_tables(self) -> list[str]:
        names = self._rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        return [str(name) for (name,) in names if str(name).startswith(SIDE_PREFIX)]

    def _delete_batch(self, side: str, number: int) -> int:
        rows = f"SELECT rowid FROM {side} WHERE {self._quote(COPY)} = %s LIMIT {DELETED:d}"
        return self._count_changed(f"DELETE FROM {side} WHERE rowid IN ({rows})", number)

    def _side_statements(self, table: CapturedTable) -> Iterator[str]:
        # CREATE TABLE … AS SELECT gives each column the type affinity of the selected column. So
        # the side table stores copied values with their old types.
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._side(table)} AS SELECT CAST(0 AS INTEGER)"
            f" {self._quote(COPY)}, {self._names(self.columns(table))} FROM {self._quote(table.name)} WHERE 0"
        )
        side = self._side(table).strip('"')
        pks = ", ".join(map(self._quote, table.pks))
        yield (
            f"CREATE UNIQUE INDEX IF NOT EXISTS {self._quote(side + '_pk')} ON {self._side(table)}"
            f" ({self._quote(COPY)}, {pks})"
        )

    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        return {
            table.name
            for table in tables
            for row in self._rows(f"PRAGMA foreign_key_list({self._quote(table.name)})")
            if not {row[5], row[6]} <= {"NO ACTION", "RESTRICT"}
        }

    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        for _, name, is_unique, _, is_partial in self._rows(
            f"PRAGMA index_list({self._quote(table)})"
        ):
            columns = self._rows(f"PRAGMA index_info({self._quote(name)})")
            names = tuple(row[2] for row in columns)
            if is_unique and not is_partial and None not in names:
                yield tuple(map(str, names))

    def _exact(self, column: CopiedColumn) -> str:
        return (
            # The "+" makes the column an expression, which has no declared type. Otherwise, Python
            # would convert the value by the declared type.
            f"+{self._quote(column.name)}"
        )

    def _mark(self, column: CopiedColumn) -> str:
        return "%s"

    def _key_condition(self, column: str) -> str:
        return f"{column} = %s COLLATE BINARY"

    def _key_params(self, key: Any) -> list[Any]:
        return [key]

    def _row_digest(self, table: CapturedTable) -> str:
        names = [self._quote(column.name) for column in self._kept_columns(table)]
        values = [f"typeof({n}), CASE typeof({n}) WHEN 'text' THEN CAST({n} AS BLOB) ELSE {n} END"
                  for n in names]  # fmt: skip
        parts = [
            f"sharded_orm_digest({', '.join(values[start : start + _ARGUMENTS // 2])})"
            for start in range(0, len(values), _ARGUMENTS // 2)
        ]
        return parts[0] if len(parts) == 1 else f"sharded_orm_digest({', '.join(parts)})"

    def _digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> RowDigests:
        rows = self._rows(
            f"SELECT {self._row_digest(table)} FROM {source} WHERE {condition}", *params
        )
        total = 0
        for (digest,) in rows:
            total += int(digest[:32], 16)
        return RowDigests(len(rows), f"{total:x}")


def _digest(*values: Any) -> str:
    return sha256(repr(values).encode("utf-8", "surrogateescape")).hexdigest()
