"""Sessions with a ticket server that is only an SQLite file, for a site on a single machine."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from django.db import OperationalError

from sharded_orm.forks import hold_during_forks
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow, TicketSession, seconds_left

_SECONDS_BETWEEN_ATTEMPTS = (0.0002, 0.002)

# Held while a database file is opened or closed. A fork waits for this lock, for at most a second.
# Otherwise the child might inherit a locked mutex of SQLite, which nobody unlocks.
_opening = threading.Lock()
# Maps file names to locks. A thread holds the lock of its file during a statement, because SQLite
# lets only one connection at a time write to a file. In a shared in-memory database, a second
# connection that writes would not wait, but get an error at once.
_turns: dict[str, threading.Lock] = {}


class SQLiteSession(TicketSession):
    """A session on SQLite, which counts by ``UPDATE … RETURNING`` (SQLite 3.35 or newer).

    A ticket server needs a separate file. SQLite locks whole files, so if the file had other tables, the
    session would wait for transactions on those tables.
    """

    forms = ("update",)
    carries_predecessor_mark = frozenset({"update"})
    wrapper_path = "django.db.backends.sqlite3.base.DatabaseWrapper"

    def _limits(self, seconds: int) -> dict[str, Any]:
        return {"timeout": seconds}

    def __init__(self, *args: Any) -> None:
        with _opening:
            super().__init__(*args)

    def _prepare(self) -> None:
        # Let SQLite raise an error at once if the file is locked. _execute() does the waiting.
        self.connection.execute("PRAGMA busy_timeout = 0")
        name = str(self._wrapper.settings_dict["NAME"])
        self._turn = _turns.setdefault(name, threading.Lock())

    def close(self) -> None:
        with _opening:
            super().close()

    def take(
        self, row: SequenceRow, count: int, predecessor_mark: int, deadline: float
    ) -> Sequence[int]:
        increase = count * self.slot.step
        rows = self.execute(
            f"UPDATE {self.table} SET value = value + %s, partner_mark = MAX(partner_mark, %s)"
            " WHERE name = %s AND form = 'update' AND step = %s AND position = %s AND value <= %s"
            " RETURNING value",
            (
                increase,
                predecessor_mark,
                row.name,
                self.slot.step,
                self.slot.position,
                LAST_ID - increase,
            ),
            deadline,
        )
        if not rows:
            return ()
        last = int(rows[0][0])
        return range(last - increase + self.slot.step, last + 1, self.slot.step)

    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        if not self._turn.acquire(timeout=seconds_left(deadline)):
            raise OperationalError("other threads held the file for too long")
        try:
            return self._execute(sql.replace("%s", "?"), params, deadline)
        finally:
            self._turn.release()

    def _execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        while True:
            try:
                # Use the driver's connection, because any thread may run this method. Django's
                # cursor may be used only in the thread that has connected.
                return self.connection.execute(sql, params).fetchall()  # type: ignore[no-any-return]  # the connection has the type Any
            except self._wrapper.Database.Error as exc:
                left = deadline - time.monotonic()
                if not _is_busy(exc) or left <= 0:
                    raise OperationalError(*exc.args) from exc
            # SQLite itself waits for a locked file (busy_timeout) at growing intervals of up to 100
            # ms. In a test, four processes wrote without pauses, and one of them got no turn for
            # over 5 seconds. So wait here, at short random intervals.
            time.sleep(min(left, random.uniform(*_SECONDS_BETWEEN_ATTEMPTS)))

    def is_missing_table(self, exc: Exception) -> bool:
        return str(exc).startswith("no such table")

    def create_catalog(self, deadline: float) -> None:
        self.execute(
            f"CREATE TABLE IF NOT EXISTS {self.table} (name TEXT NOT NULL PRIMARY KEY,"
            " form TEXT NOT NULL, step INTEGER NOT NULL, position INTEGER NOT NULL,"
            " value INTEGER NOT NULL, partner_mark INTEGER NOT NULL)",
            (),
            deadline,
        )

    def durability(self, deadline: float) -> str | None:
        (row,) = self.execute("PRAGMA synchronous", (), deadline)
        (journal,) = self.execute("PRAGMA journal_mode", (), deadline)
        enough = 2 if str(journal[0]) == "wal" else 1
        if int(row[0]) < enough:
            return (
                "PRAGMA synchronous is too low: ids that were handed out before a power cut can be"
                " handed out again; set it to FULL"
            )
        return None


def _is_busy(exc: Exception) -> bool:
    # The low byte of an extended error code is the basic code. SQLITE_BUSY means that another
    # connection has locked the file; SQLITE_LOCKED means the same for an in-memory database.
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _locks() -> Iterator[threading.Lock]:
    """Yield the locks that a fork must hold. Then no thread executes a statement or opens a file
    during the fork.
    """
    yield _opening
    yield from list(_turns.values())


hold_during_forks(_locks)
