"""Django's ``DatabaseOperations`` for SQLite, with the methods that this package adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.backends.sqlite3 import operations

from sharded_orm.backends.operations import OperationsMixin


class DatabaseOperations(OperationsMixin, operations.DatabaseOperations):
    def show_definition_sql(self, table: str) -> str:
        return f"SELECT sql FROM sqlite_master WHERE tbl_name = '{table}'"

    def set_counter_sql(self, table: str, column: str, following: str) -> str:
        return f"UPDATE sqlite_sequence SET seq = {following} - 1 WHERE name = '{table}'"

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        for table, first in firsts.items():
            # Subtract 1, because sqlite_sequence stores the last generated number, not the next one.
            name, last = "'{}'".format(table.replace("'", "''")), first - 1
            cursor.execute(
                f"UPDATE sqlite_sequence SET seq = {last} WHERE name = {name} AND seq < {last}"
            )
            cursor.execute(
                f"INSERT INTO sqlite_sequence (name, seq) SELECT {name}, {last} WHERE NOT EXISTS"
                f" (SELECT 1 FROM sqlite_sequence WHERE name = {name})"
            )
