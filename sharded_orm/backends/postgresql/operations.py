"""Django's ``DatabaseOperations`` for PostgreSQL, with the methods that this package adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.backends.postgresql import operations

from sharded_orm.backends.operations import OperationsMixin

_COUNTERS = """
    SELECT pg_catalog.pg_get_serial_sequence(%s, a.attname)
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = %s::pg_catalog.regclass
    AND a.attnum > 0 AND NOT a.attisdropped
    AND pg_catalog.pg_get_serial_sequence(%s, a.attname) IS NOT NULL
"""


class DatabaseOperations(OperationsMixin, operations.DatabaseOperations):
    def show_definition_sql(self, table: str) -> str:
        # Describe the table by a query, because the server does not know psql's command \\d.
        return (
            "SELECT column_name, data_type, column_default FROM information_schema.columns"
            f" WHERE table_schema = current_schema() AND table_name = {_literal(table)}"
        )

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        for table, first in firsts.items():
            name = '"{}"'.format(table.replace('"', '""'))
            cursor.execute(_COUNTERS, [name, name, name])
            for (sequence,) in cursor.fetchall():
                cursor.execute(
                    f"SELECT pg_catalog.setval(%s, %s, false) FROM {sequence}"
                    " WHERE CASE WHEN is_called THEN last_value + 1 ELSE last_value END < %s",
                    [sequence, first, first],
                )


def _literal(text: str) -> str:
    return "'{}'".format(text.strip('"').replace("'", "''"))
