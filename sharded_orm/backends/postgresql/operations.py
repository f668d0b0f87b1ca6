"""Django's ``DatabaseOperations`` for PostgreSQL, with the additions of this package."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from django.db import DatabaseError
from django.db.backends.postgresql import operations

from sharded_orm.backends.operations import OperationsMixin
from sharded_orm.backends.postgresql.sql_quotes import literal

_COUNTERS = """
    SELECT pg_catalog.pg_get_serial_sequence(%s, a.attname)
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = %s::pg_catalog.regclass
    AND a.attnum > 0 AND NOT a.attisdropped
    AND pg_catalog.pg_get_serial_sequence(%s, a.attname) IS NOT NULL
"""
# returning_columns() makes an INSERT fail if its id must be refused. To this end, the server casts
# a text to a number: the text _REFUSED, followed by the id. The error message of the failed cast
# contains this text, in any language.
#
# The id is cast to text before it is appended. With another type, || would be an SQL function,
# which the server would have to parse for each INSERT.
_REFUSED = "sharded_orm refuses id "
_REFUSED_ID = re.compile(rf'"{_REFUSED}(-?\d+)"')


class DatabaseOperations(OperationsMixin, operations.DatabaseOperations):
    checks_returned_ids: ClassVar[bool] = True

    @staticmethod
    def refused_id(error: DatabaseError) -> int | None:
        match = _REFUSED_ID.search(str(error))
        return int(match[1]) if match else None

    def returning_columns(self, fields: Iterable[Any]) -> tuple[str, tuple[()]]:
        # Unlike Django's method, which only names the columns, make the server also check the ids.
        # If a field has a range as its attribute ``returned_ids``, the server refuses an id outside
        # of it.
        if not fields:
            return "", ()
        columns = []
        for field in fields:
            column = (
                f"{self.quote_name(field.model._meta.db_table)}.{self.quote_name(field.column)}"
            )
            ids: range | None = getattr(field, "returned_ids", None)
            if ids is not None:
                column = (
                    f"CASE WHEN {column} BETWEEN {ids.start} AND {ids.stop - 1} THEN {column}"
                    f" ELSE CAST('{_REFUSED}' || CAST({column} AS text) AS bigint) END"
                )
            columns.append(column)
        return f"RETURNING {', '.join(columns)}", ()

    #: Django before 6.0 calls the method by this name.
    return_insert_columns = returning_columns

    def show_definition_sql(self, table: str) -> str:
        # Use information_schema: the command \d works in psql only, and this must be SQL.
        name = literal(table.strip('"'))
        return (
            "SELECT column_name, data_type, column_default FROM information_schema.columns"
            f" WHERE table_schema = current_schema() AND table_name = {name}"
        )

    def set_counter_sql(self, table: str, column: str, following: str) -> str:
        name = literal(self.quote_name(table))
        return (
            f"SELECT setval(pg_get_serial_sequence({name}, {literal(column)}), {following}, false)"
        )

    def tables_among(self, cursor: Any, tables: Collection[str]) -> list[str]:
        # Overrides the base class's method, whose query is slow with many schemas: it reads the
        # catalog's rows about all of them.
        cursor.execute(
            "SELECT t FROM pg_catalog.unnest(%s::text[]) t"
            " WHERE pg_catalog.to_regclass(pg_catalog.quote_ident(t)) IS NOT NULL",
            [list(tables)],
        )
        return [name for (name,) in cursor.fetchall()]

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        for table, first in firsts.items():
            name = '"{}"'.format(table.replace('"', '""'))
            cursor.execute(_COUNTERS, [name, name, name])
            for (sequence,) in cursor.fetchall():
                # Call setval(first - 1, true). After setval(first, false), the sequence would count
                # as unused, and the schema's snapshot could not show its next value. If first is 1,
                # use false, because the sequence cannot be set to 0.
                cursor.execute(
                    f"SELECT pg_catalog.setval(%s, %s, %s) FROM {sequence}"
                    " WHERE CASE WHEN is_called THEN last_value + 1 ELSE last_value END < %s",
                    [sequence, max(first - 1, 1), first > 1, first],
                )
