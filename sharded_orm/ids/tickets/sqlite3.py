"""A ticket server in an SQLite file: embedded, for one machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from django.db import OperationalError

from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow, Session, seconds_left

_MILLISECONDS = 1000


class SQLiteSession(Session):
    """The ``UPDATE`` form with ``RETURNING`` (SQLite 3.35 or newer).

    SQLite locks whole files, so a ticket server has one of its own: in the file of other
    tables it would wait for their transactions.
    """

    forms = ("update",)
    carries_marks = frozenset({"update"})
    wrapper_path = "django.db.backends.sqlite3.base.DatabaseWrapper"

    # One writer at a time in any case; and threads that share an in-memory database
    # (tests) are refused at once instead of waiting for each other.
    _one_writer: ClassVar[threading.Lock] = threading.Lock()

    def _limits(self, seconds: int) -> dict[str, Any]:
        return {"timeout": seconds}

    def take(self, row: SequenceRow, count: int, mark: int, deadline: float) -> Sequence[int]:
        by = count * self.place.step
        found = self.execute(
            f"UPDATE {self.table} SET value = value + %s, partner_mark = MAX(partner_mark, %s)"
            " WHERE name = %s AND form = 'update' AND step = %s AND position = %s AND value <= %s"
            " RETURNING value",
            (by, mark, row.name, self.place.step, self.place.position, LAST_ID - by),
            deadline,
        )
        if not found:
            return ()
        last = int(found[0][0])
        return range(last - by + self.place.step, last + 1, self.place.step)

    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        with self._writing(deadline):
            try:
                busy = int(seconds_left(deadline) * _MILLISECONDS) + 1
                self.connection.execute(f"PRAGMA busy_timeout = {busy:d}")
                # The connection's own, not Django's cursor, which would not know this thread.
                return list(self.connection.execute(sql.replace("%s", "?"), params).fetchall())
            except self._wrapper.Database.Error as exc:
                raise OperationalError(*exc.args) from exc

    @contextmanager
    def _writing(self, deadline: float) -> Any:
        turn = self._one_writer
        if not turn.acquire(timeout=seconds_left(deadline)):
            raise OperationalError("other threads held the file for too long")
        try:
            yield
        finally:
            turn.release()

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


def _new_lock() -> None:
    # Another thread of the parent may have held it.
    SQLiteSession._one_writer = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
