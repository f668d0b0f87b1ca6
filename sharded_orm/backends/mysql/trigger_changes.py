"""Change a table's triggers on MariaDB or MySQL while the application works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import Error

from sharded_orm.backends.mysql.lock_waits import LockWaits


class LockedChanges:
    """Runs statements about a table when no transaction uses the table. For one thread only.

    :param connection: a connection object of Django's own backend.
    :param run: sends a statement of its session, and returns the rows.
    :param locks: limits how long the session waits for the lock on a table.
    """

    def __init__(self, connection: Any, run: Callable[..., Any], locks: LockWaits) -> None:
        self._connection = connection
        self._run = run
        self._locks = locks

    def change(self, table: str, deadline: float, *changes: str) -> None:
        """Wait for every transaction that has used ``table``, then change the triggers of the
        table.

        Only the wait for the lock has a time limit. A server that stops a session while it opens a
        table has read only some of the triggers, and later writes of any session fail. The wait
        opens the table, and nobody else uses it while the lock is held. So the changes need not
        open it again.

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
        """Send statements to the server in one request, or one by one if multi-statements are off.

        If one request both takes and releases a lock, the lock is released even if this process is
        paused meanwhile.
        """
        if not self._connection.settings_dict["OPTIONS"].get("multi_statements", True):
            for statement in statements:
                self._run(statement)
            return
        with self._connection.cursor() as cursor:
            cursor.execute("; ".join(statements))
            while cursor.nextset():
                pass
