"""The fence of one side of a pair of MariaDB servers: triggers that refuse writes on the passive
side.

All triggers of a schema call the same SQL function, which returns whether writes are refused. So a
single ``CREATE OR REPLACE FUNCTION`` closes or opens all tables of the schema at the same moment.

In each transaction that writes, a trigger calls the function, and the transaction then keeps a
metadata lock on the function until it ends. So ``CREATE OR REPLACE FUNCTION`` first waits for the
end of all transactions that have written. New writes wait behind the statement.
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
from sharded_orm.backends.move_locks import SWITCH
from sharded_orm.backends.mysql.lock_waits import LockWaits
from sharded_orm.backends.mysql.move_locks import held, tables_lock
from sharded_orm.backends.mysql.row_copy import PASSES
from sharded_orm.backends.mysql.trigger_changes import LockedChanges
from sharded_orm.backends.side_fence import EPOCH, FUNCTION, TRIGGER_PREFIX, SideFence
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.mysql_flavor import MySQLFlavor

# SQL condition that is true if a closed fence refuses the writes of the session. It is false for a
# session that has set the variable PASSES and writes nothing into the binary log. A migration uses
# such a session: it changes the schema on this server only, and inserts a row of
# ``django_migrations``.
_STOPPED: Final = f"({PASSES} IS NULL OR @@SESSION.sql_log_bin)"
#: The events for which each table has a trigger.
EVENTS: Final = ("INSERT", "UPDATE", "DELETE")
# Seconds to wait for a lock on a table or function that another session holds.
_PATIENCE: Final = 30
# Seconds to wait for the lock that switching() holds while the active side changes. A write that
# the fence has refused waits until nobody holds this lock, and is then tried again.
_SWITCH_PATIENCE: Final = 0.5
_UNKNOWN_TABLE: Final = 1146  # ER_NO_SUCH_TABLE
#: ER_SP_DOES_NOT_EXIST
UNKNOWN_FUNCTION: Final = 1305
_NO_SUPER: Final = 1419  # ER_BINLOG_CREATE_ROUTINE_NEED_SUPER

# Error codes for a missing privilege: on the schema, on a table, on the server or on a function.
_DENIED: Final = frozenset({1044, 1142, 1227, 1370})


class MySQLSideFence(SideFence):
    """The fence of one shard on one server of a pair."""

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection, confirm)
        self._locks = LockWaits(self._rows, MySQLFlavor.of(connection), _PATIENCE)
        self._changes = LockedChanges(connection, self._rows, self._locks)
        self._rows("SET NAMES utf8mb4")
        # Never write to the binary log, because the other server of the pair must not get this
        # fence.
        self._rows("SET SESSION sql_log_bin = 0")
        self._rows(f"SET SESSION lock_wait_timeout = {_PATIENCE:d}")

    # ##### Queries #####

    def is_closed(self) -> bool:
        return self._answer() == 1

    def _answer(self) -> int | None:
        """Return what the SQL function of the fence returns: 1 if the fence is closed, and 0 if it
        is open.

        Return None if the function does not exist, so the schema has no fence.
        """
        try:
            ((value,),) = self._rows(f"SELECT {self._quote(FUNCTION)}()")
        except OperationalError as exc:
            if exc.args[0] != UNKNOWN_FUNCTION:
                raise
            return None
        return int(value)

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
            if count < len(EVENTS) and not str(name).startswith(OWN_PREFIX)
        )

    def _triggers(self) -> list[tuple[str, str]]:
        """Return the triggers of the fence as pairs (table, name of the trigger)."""
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
        # If a foreign key with CASCADE changes rows, InnoDB calls no triggers for these rows. This
        # is no problem if both tables are in this schema, because the fence refuses the change of
        # the first table, so nothing cascades. But if the foreign key leads to a table of another
        # schema, a change there could change rows here, although the fence is closed.
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
        # Try the statements with a table and a function that do not exist, so that nothing is
        # changed. The server checks privileges before it looks for them.
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
                elif exc.args[0] not in (_UNKNOWN_TABLE, UNKNOWN_FUNCTION):
                    raise
        return problems

    # ##### Changes #####

    def prepare(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        with self._exclusively(patience):
            self._create_triggers(deadline)

    def _create_triggers(self, deadline: float) -> None:
        # Create the function before the triggers. If they called a function that does not exist
        # yet, all writes would fail.
        self._rows(f"CREATE FUNCTION IF NOT EXISTS {self._function(is_closed=False)}")
        triggers = self._triggers()
        for table in self.open_tables():
            # Drop the table's triggers first: a killed process may have created some of them.
            drops = [self._drop(name) for each, name in triggers if each == table]
            creates = [self._trigger(table, event) for event in EVENTS]
            self._changes.change(table, deadline, *drops, *creates)

    def close(self, patience: float) -> None:
        with self._exclusively(patience):
            self._set(time.monotonic() + patience, is_closed=True)

    def open(self, patience: float) -> None:
        with self._exclusively(patience):
            self._open(time.monotonic() + patience)

    def _open(self, deadline: float) -> None:
        # Do not replace the function if the fence is open already. CREATE OR REPLACE FUNCTION
        # waits for open transactions, and new writes wait behind it. Calling the function waits for
        # nothing.
        if self._answer() != 0:
            self._set(deadline, is_closed=False)

    @contextmanager
    def switching(self) -> Iterator[None]:
        # If another process still holds the lock after _SWITCH_PATIENCE, for example because it was
        # paused, go on without the lock. It is not needed for safety: it only makes refused writes
        # wait until the change is over.
        with held(self._rows, SWITCH, _SWITCH_PATIENCE):
            yield

    def store_epoch(self, epoch: int) -> None:
        with self._exclusively(_PATIENCE):
            self._rows(
                f"CREATE OR REPLACE FUNCTION {self._quote(EPOCH)}() RETURNS INT NO SQL"
                # Store the epoch in the comment, too. Every account that may call the function can
                # read its comment, but not its body.
                f" COMMENT '{epoch:d}' RETURN {epoch:d}"
            )

    def remove(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        with self._exclusively(patience):
            triggers = self._triggers()
            if triggers:
                self._open(deadline)
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
        # Use a random name. A name made from the table's name could be in use, because a table
        # keeps its triggers when it is renamed.
        name = f"{TRIGGER_PREFIX}{secrets.token_hex(8)}_{event.lower()}"
        return (
            f"CREATE TRIGGER {self._quote(name)} BEFORE {event} ON {self._quote(table)} FOR EACH ROW"
            f" BEGIN IF {_STOPPED} AND {self._quote(FUNCTION)}() THEN SIGNAL SQLSTATE '{SQLSTATE}'"
            f" SET MESSAGE_TEXT = '{SIDE_MARKER}'; END IF; END"
        )

    def _drop(self, name: str) -> str:
        return f"DROP TRIGGER IF EXISTS {self._quote(name)}"
