"""Change capture of a shard on MariaDB or MySQL. During a long operation, such as the move of a
shard key, triggers record changed rows in a journal. While a fence is closed, the same triggers
refuse writes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from django.db import DatabaseError, OperationalError

from sharded_orm.backends.change_capture import (
    EVENTS,
    FENCES,
    JOURNAL,
    CapturedTable,
    ChangeCapture,
    rows_of,
    trigger_name,
)
from sharded_orm.backends.fence_messages import SQLSTATE
from sharded_orm.backends.move_locks import TABLES, of_copier, of_fence
from sharded_orm.backends.mysql.lock_waits import LockWaits
from sharded_orm.backends.mysql.move_locks import end_holder, tables_lock
from sharded_orm.backends.mysql.row_copy import PASSES
from sharded_orm.backends.mysql.trigger_changes import LockedChanges
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveRefused
from sharded_orm.mysql_flavor import MySQLFlavor

# Seconds to wait before reading the server's list of transactions again. InnoDB answers from a copy
# of the list. It makes a new copy only if no session has read the list for 0.1 seconds.
_TRANSACTIONS_KEPT = 0.12
# How many times to read the list of transactions, at most, until the server has made a new copy of
# it. If other sessions read the list all the time, the server never makes a new copy, so more
# attempts would not help.
_READS = 6
# Seconds to wait for a lock on a table. A backup, for example, may hold such a lock for a long
# time.
_PATIENCE = 30
_UNKNOWN_TABLE = 1146  # ER_NO_SUCH_TABLE
_BAD_TABLE = 1051  # ER_BAD_TABLE_ERROR, of DROP TABLE
_NO_SUPER = 1419  # ER_BINLOG_CREATE_ROUTINE_NEED_SUPER

# Error codes of the server for a missing privilege: SUPER, or a privilege on the schema, on a table
# or on the whole server.
_DENIED = frozenset({_NO_SUPER, 1044, 1142, 1227})


class MySQLChangeCapture(ChangeCapture):
    """Change capture of one shard on MariaDB or MySQL.

    A fence is a row in the table of fences. For example, each key that moves has a fence. When a
    row of that key changes, a trigger reads the fence. If the fence is closed, the trigger refuses
    the change; otherwise it records the changed row in the journal.

    The trigger takes a shared lock on the row of the fence, and the writer's transaction holds this
    lock until it ends. To close the fence, a session takes an exclusive lock on that row. So it
    waits for the writers of this key, but not for those of other keys.
    """

    _all_triggers = "SELECT trigger_name FROM information_schema.triggers WHERE event_object_schema = DATABASE()"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._flavor = MySQLFlavor.of(connection)
        self._locks = LockWaits(self._rows, self._flavor, _PATIENCE)
        self._changes = LockedChanges(connection, self._rows, self._locks)
        self._rows("SET NAMES utf8mb4")
        self._rows("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self._rows(f"SET SESSION lock_wait_timeout = {_PATIENCE:d}")

    def close(self, number: int, patience: float) -> None:
        with self._locks.limit(patience):
            self._close(number)

    def exclusively(self, patience: float) -> AbstractContextManager[None]:
        return tables_lock(self._rows, patience)

    def end_sessions(self, number: int | None = None) -> int:
        purposes = [TABLES] if number is None else [TABLES, of_fence(number), of_copier(number)]
        return sum(end_holder(self._rows, purpose) for purpose in purposes)

    def check_privileges(self, *, sessions: bool = True) -> None:
        ((user,),) = self._rows("SELECT CURRENT_USER()")
        problems = []
        try:
            self._check_triggers()
        except OperationalError as exc:
            if exc.args[0] not in _DENIED:
                raise
            remedy = (
                "set log_bin_trust_function_creators = ON on the server, or grant SUPER to the"
                " account"
                if exc.args[0] == _NO_SUPER
                else "grant it ALL PRIVILEGES on that database"
            )
            problems.append(
                f"the account {user!r} cannot create triggers on {self._connection.alias!r}"
                f" ({exc.args[-1]}): {remedy}"
            )
        try:
            if sessions:
                self._transactions()
        except OperationalError as exc:
            if exc.args[0] not in _DENIED:
                raise
            problems.append(
                f"the account {user!r} cannot see which sessions are open on the server of"
                f" {self._connection.alias!r}: grant it PROCESS"
            )
        if problems:
            raise MoveRefused(problems)

    def _check_triggers(self) -> None:
        """Find out if the account may create tables and triggers, without creating any.

        The statements use a table that does not exist. The server checks the privileges first, so
        it reports a missing table only to an account that has them. As nothing is created, a
        process that is killed meanwhile leaves nothing behind.
        """
        missing = f"{OWN_PREFIX}probe_{secrets.token_hex(4)}"
        name, model = self._quote(missing), self._quote(f"{missing}_model")
        for statement, expected in (
            (f"CREATE TABLE {name} LIKE {model}", _UNKNOWN_TABLE),
            (
                f"CREATE TRIGGER {name} AFTER INSERT ON {name} FOR EACH ROW BEGIN END",
                _UNKNOWN_TABLE,
            ),
            (f"LOCK TABLES {name} WRITE", _UNKNOWN_TABLE),
            (f"DROP TABLE {name}", _BAD_TABLE),
        ):
            try:
                self._rows(statement)
            except DatabaseError as exc:
                if exc.args[0] != expected:
                    raise

    # ##### Sessions of others #####

    def sessions(self) -> dict[str, Any]:
        rows = self._rows(
            f"SELECT id, {self._flavor.statement_number}, id = CONNECTION_ID()"
            " FROM information_schema.processlist"
            " WHERE user NOT IN ('system user', 'event_scheduler')"
            " AND command NOT IN ('Daemon', 'Binlog Dump', 'Binlog Dump GTID')"
        )
        # Return the present time, too. Later, sessions_left() must recognize all transactions that
        # are open now. The server's list of transactions may be out of date, and lack the newest
        # ones. These are recognized by the time: they began before it.
        ((at,),) = self._rows(
            "SELECT CAST(CONVERT_TZ(NOW(), @@SESSION.time_zone, 'SYSTEM') AS CHAR)"
        )
        return {
            "ids": [int(number) for number, _, is_own in rows if not is_own],
            "statement": max(int(statement) for _, statement, is_own in rows if is_own),
            "at": str(at),
            "transactions": [list(transaction) for transaction in self._transactions()],
        }

    def sessions_left(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        # Query the transactions first: this raises an error if the account lacks the privilege
        # PROCESS. The query of processlist raises no error then, but leaves out the sessions of
        # other accounts.
        self._transactions()
        rows = self._rows(
            f"SELECT id, command, {self._flavor.statement_number}, id = CONNECTION_ID()"
            " FROM information_schema.processlist"
        )
        now = max(int(statement) for _, _, statement, is_own in rows if is_own)
        there = {int(number) for number, *_ in rows}
        # A marker is the result of an earlier call of sessions(). The server numbers its
        # statements, and the marker contains the number of the last one at that time. If the number
        # is smaller now, the server has restarted since then, and all sessions of the marker have
        # ended.
        old = [
            there.intersection(marker["ids"]) if now >= marker["statement"] else set()
            for marker in markers
        ]
        if not any(old):
            return [0] * len(markers)
        transactions = self._present_transactions()
        if transactions is None:
            return [len(ids) for ids in old]
        counts = []
        for marker, ids in zip(markers, old, strict=True):
            left = {
                int(number)
                for number, command, statement, _ in rows
                if not (command == "Sleep" and statement > marker["statement"])
            }
            open_then = set(map(tuple, marker["transactions"]))
            left |= {
                number
                for number, began in transactions
                if (number, began) in open_then or began <= marker["at"]
            }
            counts.append(len(left & ids))
        return counts

    def _present_transactions(self) -> list[tuple[int, str]] | None:
        """Return the open transactions as :meth:`_transactions` does, but never from an outdated
        copy of the server's list.

        Return None if the server makes no new copy of the list, because other sessions read the
        list all the time. Then this method cannot find out which transactions are open.
        """
        ((own,),) = self._rows("SELECT CONNECTION_ID()")
        has_begun = False
        try:
            for _ in range(_READS):
                transactions = self._transactions()
                # This session begins a transaction after it has read a list without it. A list that
                # contains this transaction is newer, so it is up to date.
                is_listed = any(number == own for number, _ in transactions)
                if has_begun and is_listed:
                    return transactions
                if not has_begun and not is_listed:
                    self._rows("START TRANSACTION WITH CONSISTENT SNAPSHOT")
                    has_begun = True
                self._rows(f"DO SLEEP({_TRANSACTIONS_KEPT})")
            return None
        finally:
            self._rows("ROLLBACK")

    def _transactions(self) -> list[tuple[int, str]]:
        """Return the open transactions as pairs (session id, start time by the server's clock).

        The result may be out of date: the server answers from a copy of its list, and does not
        renew the copy as long as other sessions keep reading it.
        """
        rows = self._rows(
            "SELECT trx_mysql_thread_id, CAST(trx_started AS CHAR) FROM information_schema.innodb_trx"
        )
        return [(int(number), str(began)) for number, began in rows]

    # ##### Triggers #####

    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        deadline = time.monotonic() + patience
        for table in tables:
            present = self.triggers()
            missing = [event for event in EVENTS if trigger_name(table.name, event) not in present]
            for event in missing:
                self._changes.change(table.name, deadline, self._trigger(table, event))
            if not missing:
                self._changes.change(table.name, deadline)

    def _uninstall(self, deadline: float) -> None:
        own = self.triggers()
        for name, table in self._rows(
            "SELECT trigger_name, event_object_table FROM information_schema.triggers"
            " WHERE event_object_schema = DATABASE()"
        ):
            if name in own:
                self._changes.change(table, deadline, f"DROP TRIGGER IF EXISTS {self._quote(name)}")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(JOURNAL)}, {self._quote(FENCES)}")

    def is_prepared(self) -> bool:
        return bool(self._rows("SHOW TABLES LIKE %s", FENCES.replace("_", r"\_")))

    def tables_with_silent_changes(self, tables: Sequence[CapturedTable]) -> list[str]:
        if not tables:
            return []
        # Return the tables whose rows a foreign key with CASCADE or SET NULL may change. InnoDB
        # fires no triggers for these changes, so they would not be captured.
        marks = ", ".join(["%s"] * len(tables))
        rows = self._rows(
            "SELECT DISTINCT table_name FROM information_schema.referential_constraints WHERE"
            " constraint_schema = DATABASE() AND (delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR"
            f" update_rule NOT IN ('RESTRICT', 'NO ACTION')) AND table_name IN ({marks})",
            *(table.name for table in tables),
        )
        return sorted(str(name) for (name,) in rows)

    def _table_statements(self) -> Iterator[str]:
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(FENCES)} (id BIGINT PRIMARY KEY,"
            " value VARBINARY(1000) NOT NULL, state VARCHAR(6) CHARACTER SET ascii NOT NULL,"
            " UNIQUE (value)) ENGINE=InnoDB"
        )
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(JOURNAL)} (id BIGINT AUTO_INCREMENT PRIMARY KEY,"
            " fence BIGINT NOT NULL, tbl VARCHAR(64) CHARACTER SET utf8mb4 NOT NULL,"
            " pk TEXT CHARACTER SET ascii NOT NULL, KEY (fence, id)) ENGINE=InnoDB"
        )

    def _stored_key(self, value: Any) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode()

    def _trigger(self, table: CapturedTable, event: str) -> str:
        fences, journal = self._quote(FENCES), self._quote(JOURNAL)
        rows = rows_of(event)
        keys = [
            f"CAST(CONVERT({self._key_of(table, row)} USING utf8mb4) AS BINARY)" for row in rows
        ]
        name = "'" + table.name.replace("\\", "\\\\").replace("'", "''") + "'"
        inserts = "".join(
            f" INSERT INTO {journal} (fence, tbl, pk) SELECT id, {name}, {self._pk(table, row)}"
            f" FROM {fences} WHERE value = {key} AND state = 'open';"
            for row, key in zip(rows, keys, strict=True)
        )
        # COUNT and MAX make the trigger's query return a row even if the key has no fence. LOCK IN
        # SHARE MODE makes the query read the last committed state of the fence. Without it, a
        # transaction that began before the fence was created would not see the fence.
        refusal = table.refusal.replace("'", "''")
        return (
            f"CREATE TRIGGER {self._quote(trigger_name(table.name, event))} AFTER {event}"
            f" ON {self._quote(table.name)} FOR EACH ROW BEGIN"
            f" DECLARE watched INT; DECLARE refused INT; IF {PASSES} IS NULL THEN"
            f" SELECT COUNT(*), COALESCE(MAX(state = 'closed'), 0) INTO watched, refused"
            f" FROM {fences} WHERE value IN ({', '.join(keys)}) LOCK IN SHARE MODE;"
            f" IF refused THEN SIGNAL SQLSTATE '{SQLSTATE}' SET MESSAGE_TEXT = '{refusal}';"
            f" END IF; IF watched THEN{inserts} END IF; END IF; END"
        )

    def _pk(self, table: CapturedTable, row: str) -> str:
        columns = [f"HEX(CONVERT({row}.{self._quote(pk)} USING utf8mb4))" for pk in table.pks]
        return f"CONCAT_WS(',', {', '.join(columns)})"
