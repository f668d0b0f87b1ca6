"""The fence of the passive side of a pair of MariaDB servers: triggers that refuse writes.

Each trigger calls one function of the schema, which says whether writes are refused. So one ``CREATE
OR REPLACE FUNCTION`` closes or opens all tables at the same moment. A transaction that has called the
function keeps the metadata lock on it until it ends. So the statement waits for all transactions that
have written, and later writes wait for the statement.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from django.db import DatabaseError, OperationalError

from sharded_orm.backends.fence_messages import SIDE_MARKER, SQLSTATE
from sharded_orm.backends.mysql.capture_lock import tables_lock
from sharded_orm.backends.mysql.lock_waits import LockWaits
from sharded_orm.backends.mysql.locked_changes import LockedChanges
from sharded_orm.backends.mysql.row_copy import PASSES
from sharded_orm.backends.side_fence import FUNCTION, TRIGGER_PREFIX, SideFence
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.mysql_flavor import MySQLFlavor

# SQL for whether a session is stopped by a fence. A session that sets the variable and logs nothing is
# not: it changes the schema of one side only, and so its rows of ``django_migrations``.
_STOPPED: Final = f"({PASSES} IS NULL OR @@SESSION.sql_log_bin)"
_EVENTS: Final = ("INSERT", "UPDATE", "DELETE")
# Seconds to wait for a lock that another session holds for a long time.
_PATIENCE: Final = 30
_UNKNOWN_TABLE: Final = 1146  # ER_NO_SUCH_TABLE
_UNKNOWN_FUNCTION: Final = 1305  # ER_SP_DOES_NOT_EXIST
_NO_SUPER: Final = 1419  # ER_BINLOG_CREATE_ROUTINE_NEED_SUPER
# Error codes for a missing privilege: on the schema, on a table, on the server and on a function.
_DENIED: Final = frozenset({1044, 1142, 1227, 1370})


class MySQLSideFence(SideFence):
    """The fence of one shard on one MariaDB server."""

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection, confirm)
        self._locks = LockWaits(self._rows, MySQLFlavor.of(connection), _PATIENCE)
        self._changes = LockedChanges(connection, self._rows, self._locks)
        self._rows("SET NAMES utf8mb4")
        # Never write to the binary log: the other server of the pair must not get this fence.
        self._rows("SET SESSION sql_log_bin = 0")
        self._rows(f"SET SESSION lock_wait_timeout = {_PATIENCE:d}")

    # ##### Queries #####

    def is_closed(self) -> bool:
        try:
            ((value,),) = self._rows(f"SELECT {self._quote(FUNCTION)}()")
        except OperationalError as exc:
            if exc.args[0] != _UNKNOWN_FUNCTION:
                raise
            return False
        return bool(value)

    def open_tables(self) -> list[str]:
        rows = self._rows(
            "SELECT t.table_name, COUNT(g.trigger_name) FROM information_schema.tables t"
            " LEFT JOIN information_schema.triggers g ON g.event_object_schema = t.table_schema AND"
            " g.event_object_table = t.table_name AND LEFT(g.trigger_name, %s) = %s"
            " WHERE t.table_schema = DATABASE() AND t.table_type = 'BASE TABLE' GROUP BY t.table_name",
            len(TRIGGER_PREFIX),
            TRIGGER_PREFIX,
        )
        return sorted(
            str(name)
            for name, count in rows
            if count < len(_EVENTS) and not str(name).startswith(OWN_PREFIX)
        )

    def _triggers(self) -> list[tuple[str, str]]:
        """Return the table and the name of each trigger of the fence."""
        rows = self._rows(
            "SELECT event_object_table, trigger_name FROM information_schema.triggers"
            " WHERE event_object_schema = DATABASE() AND LEFT(trigger_name, %s) = %s",
            len(TRIGGER_PREFIX),
            TRIGGER_PREFIX,
        )
        return [(str(table), str(name)) for table, name in rows]

    def obstacles(self) -> list[str]:
        tables = self._rows(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
            " AND table_type = 'BASE TABLE' AND engine <> 'InnoDB'"
        )
        # InnoDB calls no triggers for rows that a foreign key changes. Inside the schema, the trigger of
        # the table that begins the change refuses it.
        keys = self._rows(
            "SELECT table_name, CONCAT(unique_constraint_schema, '.', referenced_table_name)"
            " FROM information_schema.referential_constraints WHERE constraint_schema = DATABASE()"
            " AND unique_constraint_schema <> DATABASE()"
        )
        return [
            *(
                f"the table {table!r} is not of InnoDB, so a refused statement could be executed in part:"
                " ALTER TABLE … ENGINE = InnoDB"
                for (table,) in tables
            ),
            *(
                f"a foreign key of the table {table!r} leads to another schema ({other}), from where"
                " changes come without triggers: drop it"
                for table, other in keys
            ),
        ]

    def privilege_problems(self) -> list[str]:
        # The server checks privileges before it looks for the table or the function. As neither
        # exists, nothing is changed.
        missing = self._quote(f"{OWN_PREFIX}probe_{secrets.token_hex(4)}")
        problems = []
        for statement, privileges in (
            (
                f"CREATE TRIGGER {missing} BEFORE INSERT ON {missing} FOR EACH ROW BEGIN END",
                "TRIGGER",
            ),
            (f"LOCK TABLES {missing} WRITE", "SELECT and LOCK TABLES"),
            (f"DROP FUNCTION {missing}", "CREATE ROUTINE, ALTER ROUTINE and EXECUTE"),
        ):
            try:
                self._rows(statement)
            except DatabaseError as exc:
                if exc.args[0] == _NO_SUPER:
                    problems.append(
                        "set log_bin_trust_function_creators = ON on the server, or grant SUPER to the"
                        f" OPERATOR account ({exc.args[-1]})"
                    )
                elif exc.args[0] in _DENIED:
                    problems.append(
                        f"the OPERATOR account needs {privileges} on the schemas of shards"
                        f" ({exc.args[-1]})"
                    )
                elif exc.args[0] not in (_UNKNOWN_TABLE, _UNKNOWN_FUNCTION):
                    raise
        return problems

    # ##### Changes #####

    def prepare(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        with self._exclusively(patience):
            self._create_triggers(deadline)

    def _create_triggers(self, deadline: float) -> None:
        # Without the function, the triggers would refuse all writes.
        self._rows(f"CREATE FUNCTION IF NOT EXISTS {self._function(is_closed=False)}")
        triggers = self._triggers()
        for table in self.open_tables():
            # A killed process may have left some of the triggers.
            drops = [self._drop(name) for each, name in triggers if each == table]
            creates = [self._trigger(table, event) for event in _EVENTS]
            self._changes.change(table, deadline, *drops, *creates)

    def close(self, patience: float) -> None:
        with self._exclusively(patience):
            self._set(time.monotonic() + patience, is_closed=True)

    def open(self, patience: float) -> None:
        with self._exclusively(patience):
            self._set(time.monotonic() + patience, is_closed=False)

    def remove(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        with self._exclusively(patience):
            triggers = self._triggers()
            if triggers:
                self._set(deadline, is_closed=False)
            for table in sorted({table for table, _ in triggers}):
                drops = [self._drop(name) for each, name in triggers if each == table]
                self._changes.change(table, deadline, *drops)
            drop = f"DROP FUNCTION IF EXISTS {self._quote(FUNCTION)}"
            self._locks.attempt(deadline, partial(self._rows, drop))

    @contextmanager
    def _exclusively(self, patience: float) -> Iterator[None]:
        with tables_lock(self._rows, patience):
            self._confirm()
            yield

    def _set(self, deadline: float, *, is_closed: bool) -> None:
        statement = f"CREATE OR REPLACE FUNCTION {self._function(is_closed=is_closed)}"
        self._locks.attempt(deadline, partial(self._rows, statement))

    def _function(self, *, is_closed: bool) -> str:
        return f"{self._quote(FUNCTION)}() RETURNS INT NO SQL RETURN {is_closed:d}"

    def _trigger(self, table: str, event: str) -> str:
        # The name is random, because a table keeps its triggers when it is renamed.
        name = f"{TRIGGER_PREFIX}{secrets.token_hex(8)}_{event.lower()}"
        return (
            f"CREATE TRIGGER {self._quote(name)} BEFORE {event} ON {self._quote(table)} FOR EACH ROW"
            f" BEGIN IF {_STOPPED} AND {self._quote(FUNCTION)}() THEN SIGNAL SQLSTATE '{SQLSTATE}'"
            f" SET MESSAGE_TEXT = '{SIDE_MARKER}'; END IF; END"
        )

    def _drop(self, name: str) -> str:
        return f"DROP TRIGGER IF EXISTS {self._quote(name)}"
