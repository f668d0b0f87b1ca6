"""Transactions whose statements wait for locks for a limited time, so that nobody queues behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from django.db import OperationalError

from sharded_orm.backends.sqlstate import DEADLOCK, LOCK_NOT_AVAILABLE, sqlstate_of

# Seconds that one attempt waits for each lock. Statements of others queue behind it for as long.
_ATTEMPT: Final = 0.05
# Seconds between two attempts. Meanwhile, the server executes the statements that have queued
# behind the first attempt.
_BETWEEN: Final = 0.05


class PostgreSQLLockWaits:
    """The transactions of one session that wait for locks.

    :param run: sends a statement of this session, which is in autocommit.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        self._run = run

    def attempt(self, deadline: float, action: Callable[[], object]) -> None:
        """Call ``action`` in a transaction until no lock of others stops it.

        :param deadline: a moment of ``time.monotonic()``.
        :raises django.db.OperationalError: a lock was held for longer.
        """
        while True:
            try:
                with self.transaction(_ATTEMPT):
                    action()
                return
            except OperationalError as exc:
                if not is_lock_wait(exc) or time.monotonic() > deadline:
                    raise
            time.sleep(_BETWEEN)  # A server signals nobody when a lock becomes free.

    @contextmanager
    def transaction(self, patience: float | None = None) -> Iterator[None]:
        """A transaction. An error undoes all of it, also what it has created or renamed.

        :param patience: seconds that each statement waits for a lock. None: no limit of its own.
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
    """Whether a statement has failed because of a lock that another session holds."""
    return sqlstate_of(error) in (LOCK_NOT_AVAILABLE, DEADLOCK)
