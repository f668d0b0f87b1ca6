"""Schemas: create, drop."""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    """Django's test databases, and the primitives that make shards."""

    def _nodb_cursor(self) -> Any:
        """A cursor that is in no schema, on a session of its own."""
        return self.connection._nodb_cursor()

    def create_schema(self, name: str, *, if_not_exists: bool = False) -> None:
        """``CREATE DATABASE``, with the character set of the ``TEST`` settings if given."""
        condition = "IF NOT EXISTS " if if_not_exists else ""
        with self._nodb_cursor() as cursor:
            cursor.execute(
                f"CREATE DATABASE {condition}{self._quoted(name)} {self.sql_table_creation_suffix()}"
            )

    def drop_schema(self, name: str) -> None:
        """``DROP DATABASE IF EXISTS``: the tables and rows of ``name`` are gone."""
        with self._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {self._quoted(name)}")

    def _quoted(self, name: str) -> str:
        return "`{}`".format(name.replace("`", "``"))
