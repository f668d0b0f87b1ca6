"""Django's class that creates test databases, with methods that create and drop the schema of a
shard.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    def _nodb_cursor(self) -> Any:
        """Return a context manager that yields a cursor without a schema, on a session opened for
        it.
        """
        return self.connection._nodb_cursor()

    def create_schema(self, name: str, *, if_not_exists: bool = False) -> None:
        """Create a schema. Its character set and collation come from the ``TEST`` settings of the
        alias.
        """
        condition = "IF NOT EXISTS " if if_not_exists else ""
        with self._nodb_cursor() as cursor:
            cursor.execute(
                f"CREATE DATABASE {condition}{self._quoted(name)} {self.sql_table_creation_suffix()}"
            )

    def drop_schema(self, name: str) -> None:
        """Run ``DROP DATABASE IF EXISTS``, which deletes all tables and rows."""
        with self._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {self._quoted(name)}")

    def _quoted(self, name: str) -> str:
        return "`{}`".format(name.replace("`", "``"))
