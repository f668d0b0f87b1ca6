"""Change a table's triggers on MariaDB or MySQL while the application works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import Error

from sharded_orm.backends.mysql.lock_waits import LockWaits


class LockedChanges:
    """Changes a table's triggers while no transaction uses the table. For one thread only.

    :param connection: a connection object of Django's own backend.
    :param run: function that sends a statement in this connection's session, and returns the rows.
    :param locks: limits how long the session waits for the lock on a table.
    """

    def __init__(self, connection: Any, run: Callable[..., Any], locks: LockWaits) -> None:
        self._connection = connection
        self._run = run
        self._locks = locks

    def change(self, table: str, deadline: float, *changes: str) -> None:
        """Wait for every transaction that has used ``table``, then change the triggers of the
        table.

        Only the wait for the lock on the table has a time limit, and the changes have none. If a
        time limit stopped the session while the server opens the table, the server would know only
        some of the table's triggers, and later writes of all sessions would fail. The wait for the
        lock opens the table first, and nobody else uses it while the lock is held. So the changes
        need not open it.

        :param deadline: a moment of ``time.monotonic()`` until which to wait.
        :param changes: the statements that change the triggers.
        """
        quoted = self._connection.ops.quote_name(table)
        statements = (
            f"LOCK TABLES {quoted} WRITE",
            self._locks.unlimited,
            *changes,
            "UNLOCK TABLES",
        )

        def change() -> None:
            try:
                self._together(statements)
            except BaseException:
                with suppress(Error):
                    self._run("UNLOCK TABLES")
                raise

        self._locks.attempt(deadline, change, partial(self._run, f"SELECT 1 FROM {quoted} LIMIT 0"))

    def _together(self, statements: Sequence[str]) -> None:
        """Send all statements in one request. If multi-statements are switched off, send them one
        by one.

        The first statement locks the table, and the last one unlocks it. In one request, the server
        reaches the last one even if this process is paused or killed, so the lock does not stay.
        """
        if not self._connection.settings_dict["OPTIONS"].get("multi_statements", True):
            for statement in statements:
                self._run(statement)
            return
        with self._connection.cursor() as cursor:
            cursor.execute("; ".join(statements))
            while cursor.nextset():
                pass
