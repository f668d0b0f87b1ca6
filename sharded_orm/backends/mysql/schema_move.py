"""Move a schema to another node: the steps that run on a single MariaDB or MySQL server.

On the new node, they create the tables of the schema. They also hide tables, which means that they
rename them, so that other processes do not find them. Later, they give hidden tables their usual
names again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.change_capture import CapturedTable
from sharded_orm.backends.fence_messages import is_deadlock
from sharded_orm.backends.mysql.lock_waits import LOCK_WAIT
from sharded_orm.backends.mysql.move_locks import tables_lock
from sharded_orm.backends.schema_move import NAMES, SchemaDefinition, SchemaMove, hidden_name
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed
from sharded_orm.mysql_flavor import MySQLFlavor

# Seconds between two attempts to rename the tables of a schema.
_BETWEEN: Final = 0.002
# Seconds to wait for another session that creates, hides or renames tables of the schema.
_PATIENCE: Final = 30.0
# Types of primary keys that a trigger can write as text into the journal, to record a changed row.
_RECORDABLE: Final = frozenset(
    {"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "char", "varchar", "tinytext",
     "text", "mediumtext", "longtext", "uuid", "inet4", "inet6", "date", "datetime", "time",
     "year"}
)  # fmt: skip

# Error code ER_ERROR_ON_RENAME. If the error's message contains the text _LOCK_DEADLOCK, a deadlock
# stopped the RENAME TABLE, which can be tried again.
_RENAME_FAILED: Final = 1025
_LOCK_DEADLOCK: Final = "errno: 149 "
# Matches, in the output of SHOW CREATE TABLE, the next AUTO_INCREMENT number of the table.
_COUNTER: Final = re.compile(r" AUTO_INCREMENT=\d+(?= )")


class MySQLSchemaMove(SchemaMove):
    """Moves a schema on MariaDB or MySQL.

    To hide the tables of the schema from other processes, one RENAME TABLE gives new names to all
    of them. The server renames either all tables or none.
    """

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection, confirm)
        self._flavor = MySQLFlavor.of(connection)
        self._rows("SET NAMES utf8mb4")
        # The default of a TIMESTAMP column is shown in the time zone of the session. Definitions of
        # two servers are compared, so all sessions use the same time zone.
        self._rows(
            "SET SESSION foreign_key_checks = 0, sql_mode = 'NO_ENGINE_SUBSTITUTION',"
            f" time_zone = '+00:00', lock_wait_timeout = {_PATIENCE:.0f}"
        )

    # ##### Definitions of the schema #####

    def _table_names(self) -> list[str]:
        return [str(name) for name, kind in self._rows("SHOW FULL TABLES") if kind == "BASE TABLE"]

    def _primary_key(self, table: str) -> tuple[str, ...]:
        rows = self._rows(
            "SELECT column_name FROM information_schema.statistics WHERE table_schema = DATABASE()"
            " AND table_name = %s AND index_name = 'PRIMARY' ORDER BY seq_in_index",
            table,
        )
        return tuple(str(name) for (name,) in rows)

    def _obstacles(self) -> Iterator[str]:
        for name, kind in self._rows("SHOW FULL TABLES"):
            if kind != "BASE TABLE":
                yield f"it has the {str(kind).lower()} {name!r}: only tables are moved"
        for kind, name in self._rows(
            "SELECT 'trigger', trigger_name FROM information_schema.triggers"
            " WHERE event_object_schema = DATABASE() UNION ALL"
            " SELECT LOWER(routine_type), routine_name FROM information_schema.routines"
            " WHERE routine_schema = DATABASE() UNION ALL"
            " SELECT 'event', event_name FROM information_schema.events"
            " WHERE event_schema = DATABASE()"
        ):
            if not str(name).startswith(OWN_PREFIX):
                yield f"it has the {kind} {name!r}: only tables are moved"
        for name, engine in self._rows(
            "SELECT table_name, engine FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND engine <> 'InnoDB'"
        ):
            yield f"the table {name!r} has the engine {engine}: only tables of InnoDB are moved"
        for name, column, kind in self._rows(
            "SELECT c.table_name, c.column_name, c.data_type FROM information_schema.columns c"
            " WHERE c.table_schema = DATABASE() AND c.column_key = 'PRI'"
        ):
            if str(kind).lower() not in _RECORDABLE and not str(name).startswith(OWN_PREFIX):
                yield (
                    f"a trigger cannot record changes of the table {name!r}, because the column"
                    f" {column!r} of its primary key is of the type {kind}"
                )
        for name, other in self._rows(
            "SELECT table_name, CONCAT(unique_constraint_schema, '.', referenced_table_name)"
            " FROM information_schema.referential_constraints WHERE constraint_schema = DATABASE()"
            " AND unique_constraint_schema <> DATABASE()"
        ):
            yield f"a foreign key of the table {name!r} leads to another schema ({other})"

    def definition(self) -> SchemaDefinition:
        names = {hidden: name for name, hidden in self.hidden().items()}
        statements = {}
        for table in self._table_names():
            if table in names or not table.startswith(OWN_PREFIX):
                ((_, statement),) = self._rows(f"SHOW CREATE TABLE {self._quote(table)}")
                for hidden, name in names.items():
                    statement = statement.replace(self._quote(hidden), self._quote(name))
                statements[names.get(table, table)] = (str(statement),)
        ((charset, collation),) = self._rows(
            "SELECT default_character_set_name, default_collation_name"
            " FROM information_schema.schemata WHERE schema_name = DATABASE()"
        )
        return SchemaDefinition(statements, f"CHARACTER SET {charset} COLLATE {collation}")

    def layout(self) -> Mapping[str, tuple[str, ...]]:
        hidden = self.hidden()
        layout = {}
        for name, (statement,) in self.definition().statements.items():
            # Make the definitions of hidden and visible tables comparable. The server has named
            # some constraints after the table ("photo_ibfk_1"), and renames them with the table. So
            # remove the table's name from the names of the constraints.
            for table in {name, hidden.get(name, name)}:
                statement = statement.replace(f"`{table}_ibfk_", "`ibfk_")
            layout[name] = (_COUNTER.sub("", statement),)
        return layout

    def identities(self) -> frozenset[str]:
        rows = self._rows(
            f"SELECT name, table_id FROM information_schema.{self._flavor.innodb_tables}"
            " WHERE SUBSTRING_INDEX(name, '/', 1)"
            " = CONVERT(CONVERT(DATABASE() USING filename) USING binary)"
        )
        hidden = set(self.hidden().values())
        return frozenset(
            str(identity)
            for path, identity in rows
            for name in [str(path).partition("/")[2]]
            if name in hidden or not name.startswith(OWN_PREFIX)
        )

    # ##### Hiding #####

    def build(self, definition: SchemaDefinition, tag: str) -> None:
        with self._exclusively(_PATIENCE):
            self._discard()
            self._rows(f"ALTER DATABASE {definition.defaults}")
            self._note_names(definition.statements, tag)
            for name, (statement,) in definition.statements.items():
                # A foreign key may refer to a table that exists only under its hidden name. The
                # server accepts this, because foreign key checks are off in this session. The
                # foreign key works as soon as that table gets its usual name.
                head = f"CREATE TABLE {self._quote(name)} ("
                if not statement.startswith(head):
                    raise MoveFailed(
                        f"The statement that creates {name!r} is not as expected: {statement!r}. Please"
                        " report this."
                    )
                hidden = self._quote(hidden_name(name, tag))
                self._rows(f"CREATE TABLE {hidden} ({statement.removeprefix(head)}")

    def hide(self, tables: Sequence[CapturedTable], tag: str, patience: float) -> float:
        with self._exclusively(patience):
            hidden = self.hidden()
            names = [table.name for table in tables if table.name not in hidden]
            self._note_names(names, tag)
            try:
                return self._rename_tables(
                    {name: hidden_name(name, tag) for name in names}, patience
                )
            except BaseException:
                # Old versions of the server do not undo a RENAME TABLE that fails half way. So give
                # the tables that were already renamed their old names again.
                self._show(patience)
                raise

    def show(self, patience: float) -> None:
        with self._exclusively(patience):
            self._show(patience)

    def discard(self) -> None:
        with self._exclusively(_PATIENCE):
            self._discard()
            if not self._rows("SHOW TABLES") and not self.obstacles():
                ((name,),) = self._rows("SELECT DATABASE()")
                self._rows(f"DROP DATABASE {self._quote(name)}")

    @contextmanager
    def _exclusively(self, patience: float) -> Iterator[None]:
        with tables_lock(self._rows, patience):
            self._confirm()
            yield

    def _show(self, patience: float) -> None:
        hidden = self.hidden()
        self._refuse_names_in_use(hidden)
        self._rename_tables({secret: name for name, secret in hidden.items()}, patience)
        self._rows(f"DROP TABLE IF EXISTS {self._quote(NAMES)}")

    def _discard(self) -> None:
        if tables := [*self.hidden().values(), *self._side_tables()]:
            self._rows(f"DROP TABLE {', '.join(map(self._quote, tables))}")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(NAMES)}")

    def _rename_tables(self, names: Mapping[str, str], patience: float) -> float:
        """Rename tables in one statement. If a lock stops the statement, try it again.

        Return the moment of ``time.monotonic()`` at which the successful attempt was sent.

        :param names: maps the present name of each table to its new name.
        :param patience: the number of seconds after which no new attempt begins.
        """
        deadline = time.monotonic() + patience
        if not names:
            return time.monotonic()
        pairs = ", ".join(
            f"{self._quote(name)} TO {self._quote(other)}" for name, other in names.items()
        )
        # Let each RENAME TABLE wait for table locks as briefly as possible. Other statements queue
        # behind it, and it may deadlock with transactions that use several of the tables. Do not
        # use NOWAIT instead, because it is replicated, and a replica would then not wait either. Do
        # not limit the waits for row locks of InnoDB, because the server must be able to wait for
        # these locks when it undoes a RENAME TABLE that has failed half way.
        self._rows(f"SET SESSION lock_wait_timeout = {self._flavor.least_lock_wait:d}")
        try:
            while True:
                began = time.monotonic()
                try:
                    self._rows(f"RENAME TABLE {pairs}")
                    return began
                except OperationalError as exc:
                    if time.monotonic() > deadline or not _may_rename_again(exc):
                        raise
                # Wait for a fixed time, because the server does not signal when a lock becomes
                # free.
                time.sleep(_BETWEEN)
        finally:
            self._rows(f"SET SESSION lock_wait_timeout = {_PATIENCE:.0f}")

    def _note_names(self, names: Iterable[str], tag: str) -> None:
        table = self._quote(NAMES)
        self._rows(
            f"CREATE TABLE IF NOT EXISTS {table} (name VARCHAR(64) CHARACTER SET utf8mb4 COLLATE"
            " utf8mb4_bin PRIMARY KEY, hidden VARCHAR(64) CHARACTER SET ascii NOT NULL)"
            " ENGINE=InnoDB"
        )
        for name in names:
            self._rows(f"REPLACE INTO {table} VALUES (%s, %s)", name, hidden_name(name, tag))

    def counters(self) -> dict[str, int]:
        names = {hidden: name for name, hidden in self.hidden().items()}
        rows = self._rows(
            "SELECT table_name, auto_increment FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND auto_increment IS NOT NULL"
        )
        return {names.get(str(name), str(name)): int(number) for name, number in rows}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        # Change a table only if its counter differs. The application's writes wait for the end of
        # the move, so this must be fast.
        present = self.counters()
        if all(present.get(name) == number for name, number in counters.items()):
            return
        with self._exclusively(_PATIENCE):
            for name, hidden in self.hidden().items():
                if name in counters and present.get(name) != counters[name]:
                    number = counters[name]
                    self._rows(f"ALTER TABLE {self._quote(hidden)} AUTO_INCREMENT = {number:d}")


def _may_rename_again(error: OperationalError) -> bool:
    """Whether RENAME TABLE can be tried again after ``error``, because a lock or a deadlock has
    stopped it.
    """
    number, text = error.args[0], str(error.args[-1])
    return (
        number == LOCK_WAIT
        or is_deadlock(error)
        or (number == _RENAME_FAILED and _LOCK_DEADLOCK in text)
    )
