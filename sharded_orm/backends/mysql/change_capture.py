"""The triggers, fences and journal of a shard on MariaDB or MySQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import OperationalError

from sharded_orm.backends.change_capture import (
    EVENTS,
    FENCES,
    JOURNAL,
    CapturedTable,
    ChangeCapture,
    rows_of,
    trigger_name,
)
from sharded_orm.backends.fence import MARKER, SQLSTATE
from sharded_orm.mysql_flavor import MySQLFlavor

# Seconds that one attempt waits for locks. Statements of others queue behind it for as long.
_ATTEMPT = 0.05
# Seconds between two attempts, in which the statements that have queued behind the first are served.
_BETWEEN = 0.05
_LOCK_WAIT = 1205  # ER_LOCK_WAIT_TIMEOUT


class MySQLChangeCapture(ChangeCapture):
    """Each writer of a watched key holds a shared lock on the row of its fence until it commits.

    So an exclusive lock on that row waits for all writers of this key, and for nobody else.
    """

    _all_triggers = "SELECT trigger_name FROM information_schema.triggers WHERE event_object_schema = DATABASE()"

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._flavor = MySQLFlavor.of(connection)
        self._rows("SET NAMES utf8mb4")
        self._rows("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def close(self, number: int, patience: float) -> None:
        with self._lock_timeout(patience):
            self._rows(f"UPDATE {self._quote(FENCES)} SET state = 'closed' WHERE id = %s", number)

    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        deadline = time.monotonic() + patience
        for table in tables:
            present = self.triggers()
            for event in EVENTS:
                if trigger_name(table.name, event) not in present:
                    self._attempt(deadline, partial(self._rows, self._trigger(table, event)))
            # Locking the table waits for every transaction that has used it before.
            self._attempt(deadline, partial(self._pass_through, table))

    def uninstall(self, patience: float) -> bool:
        if not self._has_tables():
            return True
        if self.fences():
            return False
        deadline = time.monotonic() + patience
        for name in self.triggers():
            drop = f"DROP TRIGGER IF EXISTS {self._quote(name)}"
            self._attempt(deadline, partial(self._rows, drop))
        self._rows(f"DROP TABLE IF EXISTS {self._quote(JOURNAL)}, {self._quote(FENCES)}")
        return True

    def _has_tables(self) -> bool:
        return bool(self._rows("SHOW TABLES LIKE %s", FENCES.replace("_", r"\_")))

    def _pass_through(self, table: CapturedTable) -> None:
        self._rows(f"LOCK TABLES {self._quote(table.name)} WRITE")
        self._rows("UNLOCK TABLES")

    def _attempt(self, deadline: float, action: Callable[[], object]) -> None:
        while True:
            try:
                with self._lock_timeout(_ATTEMPT):
                    action()
                return
            except OperationalError as exc:
                if exc.args[0] not in (_LOCK_WAIT, self._flavor.statement_timeout):
                    raise
                if time.monotonic() > deadline:
                    raise
            time.sleep(_BETWEEN)  # A server signals nobody when a lock becomes free.

    @contextmanager
    def _lock_timeout(self, seconds: float) -> Iterator[None]:
        """Limit the time that statements of the block wait for locks."""
        for name, value in self._flavor.lock_timeouts(seconds).items():
            self._rows(f"SET SESSION {name} = %s", value)
        try:
            yield
        finally:
            for name in self._flavor.lock_timeouts(seconds):
                self._rows(f"SET SESSION {name} = DEFAULT")

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
        # An aggregate always returns a row. LOCK IN SHARE MODE reads what is committed now, also in
        # a transaction whose snapshot is older than the fence.
        return (
            f"CREATE TRIGGER {self._quote(trigger_name(table.name, event))} AFTER {event}"
            f" ON {self._quote(table.name)} FOR EACH ROW BEGIN"
            " DECLARE watched INT; DECLARE refused INT;"
            f" SELECT COUNT(*), COALESCE(MAX(state = 'closed'), 0) INTO watched, refused"
            f" FROM {fences} WHERE value IN ({', '.join(keys)}) LOCK IN SHARE MODE;"
            f" IF refused THEN SIGNAL SQLSTATE '{SQLSTATE}' SET MESSAGE_TEXT = '{MARKER}';"
            f" END IF; IF watched THEN{inserts} END IF; END"
        )

    def _pk(self, table: CapturedTable, row: str) -> str:
        columns = [f"HEX(CONVERT({row}.{self._quote(pk)} USING utf8mb4))" for pk in table.pks]
        return f"CONCAT_WS(',', {', '.join(columns)})"
