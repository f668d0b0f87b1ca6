"""Schemas: create, drop, clone."""

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

    def schema_exists(self, name: str) -> bool:
        with self._nodb_cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM information_schema.schemata WHERE schema_name = %s", [name]
            )
            return cursor.fetchone() is not None

    def clone_schema(self, source: str, target: str) -> None:
        """Make ``target`` a copy of ``source``: tables, then views, then rows.

        ``target`` is created if it does not exist and must not hold tables of these names.
        Triggers and routines are not copied.
        """
        with self._nodb_cursor() as cursor:
            cursor.execute(
                "SELECT default_character_set_name, default_collation_name"
                " FROM information_schema.schemata WHERE schema_name = %s", [source],
            )  # fmt: skip
            charset, collation = cursor.fetchone()
            cursor.execute(
                f"CREATE DATABASE IF NOT EXISTS {self._quoted(target)}"
                f" CHARACTER SET {charset} COLLATE {collation}"
            )
            tables, views = self._definitions(cursor, source)
            cursor.execute(f"USE {self._quoted(target)}")
            # Tables refer to each other in any order.
            cursor.execute("SET foreign_key_checks = 0")
            for table, definition in tables.items():
                # No parameters: a definition may contain a percent sign.
                cursor.execute(definition)
                self._copy_rows(cursor, source, table)
            for definition in views.values():
                cursor.execute(definition)

    def _definitions(self, cursor: Any, schema: str) -> tuple[dict[str, str], dict[str, str]]:
        cursor.execute(
            "SELECT table_name, table_type FROM information_schema.tables"
            " WHERE table_schema = %s ORDER BY table_name", [schema],
        )  # fmt: skip
        tables: dict[str, str] = {}
        views: dict[str, str] = {}
        kinds = cursor.fetchall()
        # Unqualified, so that the names in the definitions are unqualified as well.
        cursor.execute(f"USE {self._quoted(schema)}")
        for name, kind in kinds:
            cursor.execute(f"SHOW CREATE TABLE {self._quoted(name)}")
            row = cursor.fetchone()
            (views if kind == "VIEW" else tables)[name] = row[1]
        return tables, views

    def _copy_rows(self, cursor: Any, source: str, table: str) -> None:
        name = f"{self._quoted(source)}.{self._quoted(table)}"
        cursor.execute(f"SELECT 1 FROM {name} LIMIT 1")
        if cursor.fetchone() is None:
            return
        # Generated columns cannot be inserted into.
        cursor.execute(
            "SELECT column_name FROM information_schema.columns"
            " WHERE table_schema = %s AND table_name = %s AND extra NOT LIKE %s"
            " ORDER BY ordinal_position", [source, table, "%GENERATED%"],
        )  # fmt: skip
        columns = ", ".join(self._quoted(column) for (column,) in cursor.fetchall())
        cursor.execute(
            f"INSERT INTO {self._quoted(table)} ({columns}) SELECT {columns} FROM {name}"
        )

    def _quoted(self, name: str) -> str:
        return "`{}`".format(name.replace("`", "``"))
