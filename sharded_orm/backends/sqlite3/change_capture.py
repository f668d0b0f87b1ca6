"""Triggers that a shard in an SQLite file has while one of its shard keys moves to another shard.

They record changed rows of the key in a journal (a table), and refuse writes of the key while its
fence is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from sharded_orm.exceptions import MoveRefused

# A check finds out whether this process can write to the file. It waits this many seconds for other
# writers.
_PROBE = 10.0


class SQLiteChangeCapture(ChangeCapture):
    """Change capture of one shard in an SQLite file.

    SQLite allows one writer in the file at a time, and closing a fence is a write, too. So as soon
    as a fence is closed, all earlier writes of other sessions are over. If the setting
    ``recursive_triggers`` is off, SQLite calls no trigger for a row that ``REPLACE`` deletes.
    """

    _all_triggers = "SELECT name FROM sqlite_master WHERE type = 'trigger'"

    def close(self, number: int, patience: float) -> None:
        self._wait_for_others(patience)
        self._close(number)

    @contextmanager
    def exclusively(self, patience: float) -> Iterator[None]:
        self._wait_for_others(patience)
        self._rows("BEGIN IMMEDIATE")
        try:
            yield
            self._rows("COMMIT")
        except BaseException:
            self._rows("ROLLBACK")
            raise

    def check_privileges(self, *, sessions: bool = True) -> None:
        try:
            with self.exclusively(_PROBE):
                pass
        except OperationalError as exc:
            raise MoveRefused(
                [
                    f"the file of {self._connection.alias!r} cannot be written ({exc}): make it and its"
                    " folder writable for this account, or wait until nobody else writes"
                ]
            ) from exc

    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        self._wait_for_others(patience)
        for table in tables:
            for event in EVENTS:
                self._rows(self._trigger(table, event))

    def _uninstall(self, deadline: float) -> None:
        for name in self.triggers():
            self._rows(f"DROP TRIGGER IF EXISTS {self._quote(name)}")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(JOURNAL)}")
        self._rows(f"DROP TABLE IF EXISTS {self._quote(FENCES)}")

    def is_prepared(self) -> bool:
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = %s", FENCES))

    def _wait_for_others(self, patience: float) -> None:
        """From now on, let each statement wait for other writers of the file, for at most
        ``patience`` seconds.
        """
        self._rows(f"PRAGMA busy_timeout = {max(1, int(patience * 1000)):d}")

    def _table_statements(self) -> Iterator[str]:
        # Triggers compare the column ``value`` with the shard key of a changed row. It has no
        # declared type, so that SQLite compares by the type of the row's column.
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(FENCES)}"
            " (id INTEGER PRIMARY KEY, value NOT NULL, state TEXT NOT NULL)"
        )
        yield (
            f"CREATE TABLE IF NOT EXISTS {self._quote(JOURNAL)} (id INTEGER PRIMARY KEY"
            " AUTOINCREMENT, fence INTEGER NOT NULL, tbl TEXT NOT NULL, pk TEXT NOT NULL)"
        )

    def _stored_key(self, value: Any) -> Any:
        return value

    def _trigger(self, table: CapturedTable, event: str) -> str:
        fences, journal = self._quote(FENCES), self._quote(JOURNAL)
        name = "'" + table.name.replace("'", "''") + "'"
        refusal = table.refusal.replace("'", "''")
        body = ""
        for row in rows_of(event):
            watched = f"FROM {fences} WHERE value = {self._key_of(table, row)}"
            body += (
                f" SELECT RAISE(ABORT, '{refusal}') {watched} AND state = 'closed';"
                f" INSERT INTO {journal} (fence, tbl, pk)"
                f" SELECT id, {name}, {self._pk(table, row)} {watched} AND state = 'open';"
            )
        return (
            f"CREATE TRIGGER IF NOT EXISTS {self._quote(trigger_name(table.name, event))}"
            f" AFTER {event} ON {self._quote(table.name)} FOR EACH ROW BEGIN{body} END"
        )

    def _pk(self, table: CapturedTable, row: str) -> str:
        return " || ',' || ".join(f"hex(CAST({row}.{self._quote(pk)} AS BLOB))" for pk in table.pks)
