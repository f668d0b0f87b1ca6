"""Wait for locks of other sessions in many short attempts rather than in a single long one.

While a statement waits for a lock on a table, all later statements on the table queue behind it. So
a long wait would stop the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.fence_messages import is_deadlock
from sharded_orm.mysql_flavor import MySQLFlavor

# The first attempt waits for locks for _FIRST seconds. Each later one waits longer than the one
# before, up to _LONGEST seconds. While an attempt waits, statements of other sessions on the table
# queue behind it.
_FIRST, _LONGEST = 0.01, 0.05
# Seconds between two attempts. In this pause, the server executes the statements that have queued
# behind the last attempt.
_BETWEEN = 0.05
#: ER_LOCK_WAIT_TIMEOUT
LOCK_WAIT: Final = 1205


class LockWaits:
    """Limits how long the statements of one session wait for locks.

    :param run: function that sends a statement in this session, and returns the rows.
    :param usual: the session's ``lock_wait_timeout``, in seconds, outside of :meth:`limit`.
    """

    def __init__(
        self, run: Callable[..., list[tuple[Any, ...]]], flavor: MySQLFlavor, usual: int
    ) -> None:
        self._run = run
        self._flavor = flavor
        self._usual = {"lock_wait_timeout": str(usual)}

    def attempt(
        self,
        deadline: float,
        action: Callable[[], object],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """Call ``action`` again and again until no lock of another session stops it.

        Each attempt waits for locks only for a few hundredths of a second (on MySQL, for one
        second), because statements of other sessions have to wait behind it.

        :param deadline: a moment of ``time.monotonic()``, after which no new attempt begins.
        :param prepare: called before each attempt, without a time limit.
        :raises django.db.OperationalError: another session still held a lock at the deadline.
        """
        seconds = _FIRST
        while True:
            try:
                prepare()
                with self.limit(seconds):
                    action()
                return
            except OperationalError as exc:
                # Also try again after a deadlock, because the failed statement has changed no
                # table.
                if not (
                    exc.args[0] in (LOCK_WAIT, self._flavor.statement_timeout) or is_deadlock(exc)
                ):
                    raise
                if time.monotonic() > deadline:
                    raise
            seconds = min(1.5 * seconds, _LONGEST)
            # Wait for a fixed time, because the server does not signal when a lock becomes free.
            time.sleep(_BETWEEN)

    @property
    def unlimited(self) -> str:
        """The SQL statement that restores the usual time limit for lock waits."""
        names = self._flavor.lock_timeouts(0)
        values = (f"{name} = {self._usual.get(name, 'DEFAULT')}" for name in names)
        return f"SET SESSION {', '.join(values)}"

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Limit to ``seconds`` the time that each statement of the ``with`` block waits for locks."""
        values = self._flavor.lock_timeouts(seconds)
        self._run(f"SET SESSION {', '.join(f'{name} = %s' for name in values)}", *values.values())
        try:
            yield
        finally:
            self._run(self.unlimited)
