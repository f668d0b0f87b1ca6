"""Creates test shards on MySQL and MariaDB.

The template is a schema that is migrated. Its definitions and rows are read once. Each test shard
is created from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db.backends.base.base import NO_DB_ALIAS
from django.db.utils import load_backend

from sharded_orm import database_settings
from sharded_orm.testing.clones import ServerCloner
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard

# Matches the AUTO_INCREMENT counter in a CREATE TABLE statement. The counter is removed before the
# statements of a test shard and of the template are compared, because it differs from shard to
# shard.
_AUTO_INCREMENT = re.compile(r" AUTO_INCREMENT=\d+")


@dataclass
class _Template:
    """The tables and rows of the template schema, from which test shards are cloned."""

    #: The end of the CREATE DATABASE statement for a test shard: the character set and the collation.
    suffix: str = ""
    #: Maps the name of each table and view to the statement that creates it.
    definitions: dict[str, str] = field(default_factory=dict)
    #: Maps the name of each table that has rows to a pair: the statement that inserts one row, and
    #: the list of the rows.
    rows: dict[str, tuple[str, list[Any]]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    #: Names of the tables with AUTO_INCREMENT.
    numbered: list[str] = field(default_factory=list)


class MySQLCloner(ServerCloner):
    """Creates each test shard as a schema on the shard's node.

    The template, the migrated schema from which the shards are cloned, may be on any node.
    """

    def __init__(self) -> None:
        super().__init__()
        self._template = _Template()

    def create_template(self, template: Shard, *, keep: bool) -> None:
        with self._cursor(template) as cursor:
            if not keep:
                cursor.execute(f"DROP DATABASE IF EXISTS {_quoted(template.schema)}")
            suffix = cursor.db.creation.sql_table_creation_suffix()
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS {_quoted(template.schema)} {suffix}")

    def load_template(self, template: Shard) -> None:
        loaded = _Template()
        with self._cursor(template) as cursor:
            cursor.execute(
                "SELECT default_character_set_name, default_collation_name"
                " FROM information_schema.schemata WHERE schema_name = %s",
                [template.schema],
            )
            loaded.suffix = "CHARACTER SET {} COLLATE {}".format(*cursor.fetchone())
            loaded.definitions = _definitions(cursor, template.schema)
            for table in loaded.definitions:
                columns = _writable_columns(cursor, template.schema, table)
                names = ", ".join(_quoted(column) for column, _ in columns)
                if any(numbered for _, numbered in columns):
                    loaded.numbered.append(table)
                if not columns:
                    continue  # A view.
                loaded.tables.append(table)
                cursor.execute(f"SELECT {names} FROM {_quoted(table)}")
                if rows := list(cursor.fetchall()):
                    marks = ", ".join(["%s"] * len(columns))
                    insert = f"INSERT INTO {_quoted(table)} ({names}) VALUES ({marks})"
                    loaded.rows[table] = (insert, rows)
        self._template = loaded

    def clone(self, shard: Shard, *, keep: bool) -> None:
        schema = _quoted(shard.schema)
        with self._cursor(shard) as cursor:
            if keep and self._has_same_tables(cursor, shard):
                self._restore(cursor, shard)
                return
            cursor.execute(f"DROP DATABASE IF EXISTS {schema}")
            cursor.execute(f"CREATE DATABASE {schema} {self._template.suffix}")
            cursor.execute(f"USE {schema}")
            for definition in self._template.definitions.values():
                cursor.execute(definition)
            self._insert_rows(cursor)
            self._begin_counters(cursor, shard, self._template.tables)

    def _has_same_tables(self, cursor: Any, shard: Shard) -> bool:
        cursor.execute("SHOW DATABASES LIKE %s", [_like(shard.schema)])
        return bool(cursor.fetchone()) and (
            _definitions(cursor, shard.schema) == self._template.definitions
        )

    def restore(self, shard: Shard) -> None:
        with self._cursor(shard) as cursor:
            self._restore(cursor, shard)

    def _restore(self, cursor: Any, shard: Shard) -> None:
        tables = self._template.tables
        if not tables:
            return
        cursor.execute(f"USE {_quoted(shard.schema)}")
        cursor.execute(
            "SELECT " + ", ".join(f"EXISTS(SELECT 1 FROM {_quoted(table)})" for table in tables)
        )
        for table, filled in zip(tables, cursor.fetchone(), strict=True):
            if filled:
                cursor.execute(f"DELETE FROM {_quoted(table)}")
        self._insert_rows(cursor)
        self._begin_counters(cursor, shard, self._template.tables)

    def _insert_rows(self, cursor: Any) -> None:
        for insert, rows in self._template.rows.values():
            cursor.executemany(insert, rows)

    def reset_sequences(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            with self._cursor(shard) as cursor:
                cursor.execute(f"USE {_quoted(shard.schema)}")
                for table in self._template.numbered:
                    cursor.execute(f"ALTER TABLE {_quoted(table)} AUTO_INCREMENT = 1")
                self._begin_counters(cursor, shard, self._template.tables)

    def _drop(self, cursor: Any, schemas: Collection[str]) -> None:
        cursor.execute("SHOW DATABASES")
        for (schema,) in cursor.fetchall():
            if schema in schemas:
                cursor.execute(f"DROP DATABASE {_quoted(schema)}")

    def _open(self, shard: Shard) -> Any:
        settings = complete({**database_settings.shard_settings(shard), "NAME": None})
        engine = load_backend(settings["ENGINE"])
        cursor: Any = engine.DatabaseWrapper(settings, NO_DB_ALIAS).cursor()
        # Switch off foreign key checks, because a table may refer to a table that is created later.
        cursor.execute("SET foreign_key_checks = 0")
        return cursor


def _definitions(cursor: Any, schema: str) -> dict[str, str]:
    """Return a dict that maps the name of each table and view to its ``CREATE`` statement.

    Views come last, because they refer to tables. The statements do not contain the name of the
    schema.
    """
    cursor.execute(f"USE {_quoted(schema)}")
    cursor.execute("SHOW FULL TABLES")
    kinds = sorted(cursor.fetchall(), key=lambda row: (row[1] == "VIEW", row[0]))
    definitions = {}
    for name, _ in kinds:
        cursor.execute(f"SHOW CREATE TABLE {_quoted(name)}")
        definitions[name] = _AUTO_INCREMENT.sub("", cursor.fetchone()[1], count=1)
    return definitions


def _writable_columns(cursor: Any, schema: str, table: str) -> list[tuple[str, bool]]:
    """Return a pair (name, whether it has AUTO_INCREMENT) for each column that INSERT can write.

    Generated columns are left out. For a view, the list is empty.
    """
    cursor.execute(
        "SELECT c.column_name, c.extra LIKE %s FROM information_schema.columns c"
        " JOIN information_schema.tables t USING (table_schema, table_name)"
        " WHERE c.table_schema = %s AND c.table_name = %s AND t.table_type <> 'VIEW'"
        " AND c.extra NOT LIKE %s ORDER BY c.ordinal_position",
        ["%auto_increment%", schema, table, "%GENERATED%"],
    )
    return [(name, bool(numbered)) for name, numbered in cursor.fetchall()]


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


def _like(name: str) -> str:
    return name.replace("\\", "\\\\").replace("_", "\\_").replace("%", "\\%")
