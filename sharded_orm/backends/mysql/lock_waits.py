"""Statements that wait for the locks of others in short attempts, so that nobody queues behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.fence import is_deadlock
from sharded_orm.mysql_flavor import MySQLFlavor

# Seconds that the first attempt and the longest one wait for locks. Statements of others queue behind
# an attempt for as long.
_FIRST, _LONGEST = 0.01, 0.05
# Seconds between two attempts. Meanwhile, the server executes the statements that have queued
# behind the first attempt.
_BETWEEN = 0.05
#: ER_LOCK_WAIT_TIMEOUT
LOCK_WAIT: Final = 1205


class LockWaits:
    """The waits of one session for locks.

    :param run: sends a statement of this session, and returns the rows.
    :param usual: the ``lock_wait_timeout`` that the session has otherwise, in seconds.
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
        """Call ``action`` until no lock of others stops it.

        :param deadline: a moment of ``time.monotonic()``.
        :param prepare: called before each attempt, without a limit of time.
        :raises django.db.OperationalError: a lock was held for longer.
        """
        seconds = _FIRST
        while True:
            try:
                prepare()
                with self.limit(seconds):
                    action()
                return
            except OperationalError as exc:
                # A statement that ends in a deadlock has changed no table, so it can be tried
                # again, too.
                if not (
                    exc.args[0] in (LOCK_WAIT, self._flavor.statement_timeout) or is_deadlock(exc)
                ):
                    raise
                if time.monotonic() > deadline:
                    raise
            seconds = min(1.5 * seconds, _LONGEST)
            time.sleep(_BETWEEN)  # A server signals nobody when a lock becomes free.

    @property
    def unlimited(self) -> str:
        """The statement after which statements wait for locks as long as usual."""
        names = self._flavor.lock_timeouts(0)
        values = (f"{name} = {self._usual.get(name, 'DEFAULT')}" for name in names)
        return f"SET SESSION {', '.join(values)}"

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Limit the time that statements of the block wait for locks."""
        values = self._flavor.lock_timeouts(seconds)
        self._run(f"SET SESSION {', '.join(f'{name} = %s' for name in values)}", *values.values())
        try:
            yield
        finally:
            self._run(self.unlimited)
