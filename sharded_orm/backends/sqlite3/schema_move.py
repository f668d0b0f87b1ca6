"""Move a shard that is an SQLite file to another folder.

The shard has a file in the old folder and one in the new folder. In each, its tables can be
created, hidden (renamed, so that other processes do not find them) and shown (given their real
names again).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.schema_move import NAMES, SchemaDefinition, SchemaMove, hidden_name
from sharded_orm.backends.snapshot import OWN_PREFIX

# Seconds for which Python's driver waits for a lock, unless OPTIONS has a "timeout".
_DRIVERS_TIMEOUT = 5.0
# A table can be moved only if the declared type of each column of its primary key contains one of
# these words. A trigger can write values of these types to the journal (the table of changed rows)
# without any loss.
_RECORDABLE = ("int", "char", "text", "clob", "date", "time")
_QUOTED = re.compile(r'"(\w+)"')


class SQLiteSchemaMove(SchemaMove):
    """The tables of one shard's SQLite file. To hide them, one transaction renames all of them."""

    # False, because REPLACE deletes rows without calling the triggers of DELETE.
    triggers_see_all = False

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection, confirm)
        self._rows("PRAGMA foreign_keys = OFF")
        # Seconds to wait for other writers when hidden tables are created or dropped. The
        # application does not use the file then, so the usual timeout is enough.
        self._patience = float(connection.settings_dict["OPTIONS"].get("timeout", _DRIVERS_TIMEOUT))

    # ##### Definitions of the schema #####

    def _table_names(self) -> list[str]:
        rows = self._rows(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
            " ESCAPE '\\' ORDER BY name"
        )
        return [str(name) for (name,) in rows]

    def _columns(self, table: str) -> list[tuple[Any, ...]]:
        return self._rows(f"PRAGMA table_info({self._quote(table)})")

    def _primary_key(self, table: str) -> tuple[str, ...]:
        columns = sorted((row for row in self._columns(table) if row[5]), key=lambda row: row[5])
        return tuple(str(row[1]) for row in columns)

    def _obstacles(self) -> Iterator[str]:
        for kind, name in self._rows(
            "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
        ):
            if not str(name).startswith(OWN_PREFIX):
                yield f"it has the {kind} {name!r}: only tables are moved"
        for name, statement in self._rows(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
        ):
            if str(statement).upper().lstrip().startswith("CREATE VIRTUAL"):
                yield f"the table {name!r} is virtual: only ordinary tables are moved"
        for table in self.tables():
            for row in self._columns(table.name):
                kind = str(row[2]).lower()
                if row[5] and not any(part in kind for part in _RECORDABLE):
                    yield (
                        f"a trigger cannot record changes of the table {table.name!r}, because the"
                        f" column {row[1]!r} of its primary key is of the type {kind!r}"
                    )

    def definition(self) -> SchemaDefinition:
        names = {hidden: name for name, hidden in self.hidden().items()}
        statements: dict[str, tuple[str, ...]] = {}
        rows = self._rows(
            "SELECT tbl_name, sql FROM sqlite_master WHERE type IN ('table', 'index')"
            " AND sql IS NOT NULL AND tbl_name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            " ORDER BY type = 'index', name"
        )
        for table, statement in rows:
            if table in names or not str(table).startswith(OWN_PREFIX):
                for hidden, name in names.items():
                    statement = statement.replace(hidden, name)
                name = names.get(table, str(table))
                statements[name] = (*statements.get(name, ()), str(statement))
        return SchemaDefinition(statements)

    def layout(self) -> Mapping[str, tuple[str, ...]]:
        # Remove the quotes around names. SQLite adds quotes when it renames a table, so a table
        # that was hidden and shown again would otherwise seem to differ.
        return {
            name: tuple(_QUOTED.sub(r"\1", statement) for statement in statements)
            for name, statements in self.definition().statements.items()
        }

    def identities(self) -> frozenset[str]:
        # On other databases, an identity changes when TRUNCATE empties a table without calling its
        # triggers. SQLite has no such statement, so return only the definitions of the tables.
        return frozenset(map(repr, self.layout().items()))

    # ##### Hiding #####

    def build(self, definition: SchemaDefinition, tag: str) -> None:
        with self._exclusively(self._patience):
            self._discard()
            for statements in definition.statements.values():
                for statement in statements:
                    self._rows(statement)
            self._hide(list(definition.statements), tag)

    def hide(self, tables: Sequence[CapturedTable], tag: str, patience: float) -> float:
        began = time.monotonic()
        with self._exclusively(patience):
            hidden = self.hidden()
            self._hide([table.name for table in tables if table.name not in hidden], tag)
        return began

    def show(self, patience: float) -> None:
        with self._exclusively(patience):
            names = self.hidden()
            self._refuse_names_in_use(names)
            for name, hidden in names.items():
                self._rename_table(hidden, name)
            self._rows(f"DROP TABLE IF EXISTS {self._quote(NAMES)}")

    def discard(self) -> None:
        with self._exclusively(self._patience):
            self._discard()
            # Create the table of hidden names, even without any name in it. It tells other
            # processes that the shard is not in this file.
            self._hide([], "")

    def _hide(self, names: Sequence[str], tag: str) -> None:
        table = self._quote(NAMES)
        self._rows(
            f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, hidden TEXT NOT NULL)"
        )
        for name in names:
            hidden = hidden_name(name, tag)
            self._rows(f"REPLACE INTO {table} VALUES (%s, %s)", name, hidden)
            self._rename_table(name, hidden)

    def _discard(self) -> None:
        for table in [*self.hidden().values(), *self._side_tables()]:
            self._rows(f"DROP TABLE {self._quote(table)}")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(NAMES)}")

    def _rename_table(self, name: str, other: str) -> None:
        self._rows(f"ALTER TABLE {self._quote(name)} RENAME TO {self._quote(other)}")

    @contextmanager
    def _exclusively(self, patience: float) -> Iterator[None]:
        self._rows(f"PRAGMA busy_timeout = {max(1, int(patience * 1000)):d}")
        self._rows("BEGIN IMMEDIATE")
        try:
            self._confirm()
            yield
            self._rows("COMMIT")
        except BaseException:
            self._rows("ROLLBACK")
            raise

    def counters(self) -> dict[str, int]:
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'"):
            return {}
        names = {hidden: name for name, hidden in self.hidden().items()}
        rows = self._rows("SELECT name, seq FROM sqlite_sequence")
        return {names.get(str(name), str(name)): int(number) for name, number in rows}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        with self._exclusively(self._patience):
            present = self.counters()
            for name, hidden in self.hidden().items():
                if name not in counters or present.get(name) == counters[name]:
                    continue
                statement = "INSERT INTO sqlite_sequence (seq, name) VALUES (%s, %s)"
                if name in present:
                    statement = "UPDATE sqlite_sequence SET seq = %s WHERE name = %s"
                self._rows(statement, counters[name], hidden)
