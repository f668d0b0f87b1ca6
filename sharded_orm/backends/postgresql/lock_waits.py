"""Transactions whose statements wait only briefly for locks.

While a statement waits for a lock on a table, later statements of other sessions on this table must
queue behind it. So a long wait would stop the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from django.db import OperationalError

from sharded_orm.backends.sqlstate import DEADLOCK, LOCK_NOT_AVAILABLE, sqlstate_of

# Seconds for which one attempt waits for each lock. While it waits, statements of other sessions on
# the table queue behind it.
_ATTEMPT: Final = 0.05
# Seconds between two attempts. In this pause, the server executes the statements of other sessions
# that have queued behind the last attempt.
_BETWEEN: Final = 0.05


class PostgreSQLLockWaits:
    """Runs transactions of one session that wait for locks for a limited time.

    :param run: function that sends a statement in this session, which is in autocommit.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        self._run = run

    def attempt(self, deadline: float, action: Callable[[], object]) -> None:
        """Call ``action`` in a transaction. If it fails because another session holds a lock, roll
        back, and try again until it succeeds.

        Each attempt waits for the lock only for a fraction of a second, because other sessions
        queue behind this session while it waits.

        :param deadline: a moment of ``time.monotonic()``, after which no new attempt begins.
        :raises django.db.OperationalError: another session still held a lock at the deadline.
        """
        while True:
            try:
                with self.transaction(_ATTEMPT):
                    action()
                return
            except OperationalError as exc:
                if not is_lock_wait(exc) or time.monotonic() > deadline:
                    raise
            # Wait for a fixed time, because the server does not signal when a lock becomes free.
            time.sleep(_BETWEEN)

    @contextmanager
    def transaction(self, patience: float | None = None) -> Iterator[None]:
        """Run the ``with`` block in a transaction. An error rolls everything back, even the
        creation of tables.

        :param patience: seconds for which each statement waits for a lock. None: as set in the
            session.
        """
        self._run("BEGIN")
        try:
            if patience is not None:
                self._run(f"SET LOCAL lock_timeout = {max(1, int(patience * 1000)):d}")
            yield
            self._run("COMMIT")
        except BaseException:
            self._run("ROLLBACK")
            raise


def is_lock_wait(error: BaseException) -> bool:
    """Whether ``error`` was raised because another session holds a lock (a time limit or a
    deadlock).
    """
    return sqlstate_of(error) in (LOCK_NOT_AVAILABLE, DEADLOCK)
