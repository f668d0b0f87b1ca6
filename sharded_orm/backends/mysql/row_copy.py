"""Copy the rows of a shard key between servers of MariaDB or MySQL. To compare the copies, each
server computes digests of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sharded_orm.backends.change_capture import FENCES, CapturedTable
from sharded_orm.backends.move_locks import of_copier, of_fence
from sharded_orm.backends.mysql.move_locks import capture_lock, take_for_good
from sharded_orm.backends.row_access import CopiedColumn, RowDigests
from sharded_orm.backends.row_copy import COPY, DELETED, SIDE_PREFIX, RowCopy
from sharded_orm.backends.snapshot import OWN_PREFIX

#: A session variable that this library sets in sessions of its own, such as those that copy rows.
#: The triggers of a moving key then accept all changes of the session, even if the fence of the key
#: is closed. (The triggers on a side of a pair accept them only if the session also writes nothing
#: into the binary log.)
PASSES: Final = f"@{OWN_PREFIX}passes"
# Seconds to wait for another session that changes the rows of the same move.
_PATIENCE: Final = 50
# Column types whose values are copied as raw bytes, in the character set of the column.
_BYTES: Final = frozenset(
    {"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "binary",
     "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "geometry", "point", "linestring",
     "polygon", "multipoint", "multilinestring", "multipolygon", "geometrycollection"}
)  # fmt: skip

# Column types whose values are short and have no comma in their text. The digest of a row is
# computed from its values, joined by commas. Values of these types are joined as they are, and
# values of all other types are hashed first.
_SHORT: Final = frozenset(
    {"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "date", "time",
     "datetime", "timestamp", "year"}
)  # fmt: skip
_SESSION: Final = (
    "SET NAMES utf8mb4",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    # Both servers get the same settings. With the same time zone, a TIMESTAMP has the same text on
    # both. With this SQL mode, a row with the id 0 keeps it; otherwise it would get the next
    # AUTO_INCREMENT value.
    "SET SESSION time_zone = '+00:00', foreign_key_checks = 0,"
    " sql_mode = 'STRICT_ALL_TABLES,NO_AUTO_VALUE_ON_ZERO,ALLOW_INVALID_DATES'",
)


class MySQLRowCopy(RowCopy):
    """Copies rows on MariaDB or MySQL.

    Values are read and written as bytes, or as text made by the server. Python converts no values,
    so that none is changed.
    """

    _shared = " LOCK IN SHARE MODE"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        for statement in _SESSION:
            self._rows(statement)

    def claim(self, number: int) -> None:
        take_for_good(self._rows, of_copier(number))

    @contextmanager
    def _passing(self, number: int) -> Iterator[None]:
        # Take only a shared lock on the row of the fence. A writer of the key first locks rows of
        # the key, and then its trigger reads the fence. With an exclusive lock here, the writer
        # would wait for this session at the fence, while this session waits for the rows that the
        # writer has locked: a deadlock.
        fence = (
            f"SELECT 1 FROM {self._quote(FENCES)} WHERE id = %s AND state = 'closed'"
            " LOCK IN SHARE MODE"
        )
        alone = capture_lock(
            self._rows, of_fence(number), _PATIENCE, "changed the rows of the same move"
        )
        with alone, self._transaction():
            if not self._rows(fence, number):
                raise self._not_closed(number)
            self._rows(f"SET {PASSES} = 1")
            try:
                yield
            finally:
                self._rows(f"SET {PASSES} = NULL")

    def _read_columns(self, table: str) -> Iterator[CopiedColumn]:
        rows = self._rows(
            "SELECT column_name, data_type, extra, character_set_name, collation_name"
            " FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = %s ORDER BY ordinal_position",
            table,
        )
        for name, kind, extra, charset, collation in rows:
            if "GENERATED" not in str(extra).upper().replace("DEFAULT_GENERATED", ""):
                yield CopiedColumn(
                    str(name), str(kind).lower(), str(charset or ""), str(collation or "")
                )

    def _side_tables(self) -> list[str]:
        like = SIDE_PREFIX.replace("_", r"\_") + "%"
        return [str(name) for (name,) in self._rows("SHOW TABLES LIKE %s", like)]

    def _delete_batch(self, side: str, number: int) -> int:
        delete = f"DELETE FROM {side} WHERE {self._quote(COPY)} = %s LIMIT {DELETED:d}"
        return self._count_changed(delete, number)

    def _side_statements(self, table: CapturedTable) -> Iterator[str]:
        copy, pks = self._quote(COPY), ", ".join(map(self._quote, table.pks))
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._side(table)} ({copy} BIGINT NOT NULL,"
            f" PRIMARY KEY ({copy}, {pks})) ENGINE=InnoDB"
            f" SELECT 0 AS {copy}, {self._names(self.columns(table))} FROM {self._quote(table.name)} LIMIT 0"
        )

    def cascading(self, tables: Iterable[CapturedTable]) -> set[str]:
        rows = self._rows(
            "SELECT DISTINCT table_name FROM information_schema.referential_constraints"
            " WHERE constraint_schema = DATABASE() AND NOT (delete_rule IN ('RESTRICT', 'NO ACTION')"
            " AND update_rule IN ('RESTRICT', 'NO ACTION'))"
        )
        return {str(name) for (name,) in rows} & {table.name for table in tables}

    def _unique_columns(self, table: str) -> Iterator[tuple[str, ...]]:
        rows = self._rows(
            "SELECT index_name, column_name FROM information_schema.statistics"
            " WHERE table_schema = DATABASE() AND table_name = %s AND non_unique = 0"
            " ORDER BY index_name, seq_in_index",
            table,
        )
        for _, columns in groupby(rows, key=itemgetter(0)):
            names = tuple(row[1] for row in columns)
            # Leave out indexes on an expression: for an expression, MySQL returns NULL in place of
            # a column name.
            if None not in names:
                yield tuple(map(str, names))

    def _exact(self, column: CopiedColumn) -> str:
        name = self._quote(column.name)
        if column.kind in _BYTES:
            return f"CAST({name} AS BINARY)"
        if column.kind == "float":
            # The text of a FLOAT has only six digits. The multiplication makes a DOUBLE, whose text
            # has all digits.
            return f"CAST({name} * 1e0 AS CHAR)"
        if column.kind == "bit":
            return f"CAST({name} + 0 AS CHAR)"
        return f"CAST({name} AS CHAR)"

    def _mark(self, column: CopiedColumn) -> str:
        return "CAST(%s AS UNSIGNED)" if column.kind == "bit" else "%s"

    def _comparand(self, column: CopiedColumn) -> str:
        # Compare text in the column's collation, not as bytes, so that the comparison follows the
        # order of the index.
        if not column.charset:
            return "%s"
        return f"CONVERT(%s USING {column.charset}) COLLATE {column.collation}"

    def _key_condition(self, column: str) -> str:
        # The first comparison can use an index. But a collation may treat two different keys as
        # equal, so the second one compares the bytes.
        return f"({column} = %s AND CAST(CONVERT({column} USING utf8mb4) AS BINARY) = %s)"

    def _key_params(self, key: Any) -> list[Any]:
        return [key, str(key).encode()]

    def _row_digest(self, table: CapturedTable) -> str:
        # Join the values of a row by commas. No value contains a comma: it is either a hash, or of
        # a type without commas. So the joined texts of two rows are equal only if all their values
        # are equal.
        parts = []
        for column in self._kept_columns(table):
            name = self._quote(column.name)
            value = f"CAST({name}{' * 1e0' if column.kind == 'float' else ''} AS BINARY)"
            digest = value if column.kind in _SHORT else f"SHA2({value}, 256)"
            parts.append(f"COALESCE({digest}, 'NULL')")
        return f"SHA2(CONCAT_WS(',', {', '.join(parts)}), 256)"

    def _digests(
        self, table: CapturedTable, source: str, condition: str, params: list[Any]
    ) -> RowDigests:
        # Compute the digest in a subquery, because the server would otherwise compute it again for
        # each expression that uses it.
        number = "CAST(CONV(LEFT(digest, 16), 16, 10) AS UNSIGNED)"
        ((count, total),) = self._rows(
            f"SELECT COUNT(*), COALESCE(SUM({number}), 0) FROM (SELECT {self._row_digest(table)} digest"
            f" FROM {source} WHERE {condition}) digests",
            *params,
        )
        return RowDigests(int(count), f"{int(total):x}")
