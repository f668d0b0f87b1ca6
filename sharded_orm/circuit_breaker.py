"""A circuit breaker: after a failure of a server, callers do not call it for some seconds.

Then one caller tries the server again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Failure:
    cause: Exception
    since: float
    #: The time on the breaker's clock from which the next caller may try again.
    until: float


def _without_traceback(error: Exception) -> Exception:
    """Return a copy of ``error`` that has no traceback and refers to no other errors."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


class CircuitBreaker:
    """Says whether a server may be called, or has failed recently.

    Thread-safe. Without a circuit breaker, each call to a dead server would wait for its timeout.
    Failures are recorded by key: the key None stands for the whole server, any other key for a part
    of the server, such as a sequence of a ticket server.
    """

    def __init__(self, backoff: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        :param backoff: seconds after a failure until the next caller may try again.
        :param clock: returns the time in seconds; must never go back.
        """
        self._backoff = backoff
        self._clock = clock
        # Held while _failures is changed. So only one of several threads gets the permission to try
        # the server again.
        self._lock = threading.Lock()
        self._failures: dict[str | None, _Failure] = {}

    @property
    def is_closed(self) -> bool:
        """True if no failure is recorded, so that the server and all its parts can be called.

        Takes no lock.
        """
        return not self._failures

    def claim(self, *keys: str | None) -> bool:
        """Return whether the caller is allowed to call the server now.

        True if no failure is recorded for any of ``keys``. Also True if ``backoff`` seconds have
        passed since each failure. In the second case, only this caller is allowed to try the
        server, and must call :meth:`reset` if it succeeds. Until then, other callers get False. If
        the caller is killed, the next caller is allowed to try after another ``backoff`` seconds.

        :param keys: None for the whole server, or the names of its parts that the caller needs.
        """
        if self.is_closed:
            return True
        with self._lock:
            now = self._clock()
            failures = [failure for key in keys if (failure := self._failures.get(key)) is not None]
            if any(now < failure.until for failure in failures):
                return False
            for failure in failures:
                failure.until = now + self._backoff
            return True

    def cause(self, key: str | None = None, *, since: float = 0.0) -> Exception | None:
        """Return the error of the last failure of ``key``; None if there is no failure.

        :param since: a time on the breaker's clock. A failure before that time is ignored.
        """
        failure = self._failures.get(key)
        return failure.cause if failure is not None and failure.since >= since else None

    def trip(self, key: str | None, cause: Exception) -> bool:
        """Record a failure of ``key``, so that callers keep away from it for ``backoff`` seconds.

        :param cause: the error. A copy is kept, because the traceback would keep alive all that the
            failed caller had in its variables.
        :return: whether the failure should be logged: True for a new failure or another class of
            error, False if ``key`` had failed before with the same class of error.
        """
        now = self._clock()
        cause = _without_traceback(cause)
        with self._lock:
            before = self._failures.get(key)
            self._failures[key] = _Failure(cause, now, now + self._backoff)
        return before is None or type(before.cause) is not type(cause)

    def half_open(self, key: str | None) -> None:
        """Let the next caller try ``key`` at once, without waiting for the end of ``backoff``.

        Call this method when something indicates that ``key`` works again.
        """
        with self._lock:
            if (failure := self._failures.get(key)) is not None:
                failure.until = self._clock()

    def reset(self, key: str | None) -> bool:
        """Forget the failure of ``key``, because a call has succeeded.

        Return True if a failure of ``key`` was recorded.
        """
        if key not in self._failures:
            return False
        with self._lock:
            return self._failures.pop(key, None) is not None

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it at the fork."""
        self._lock = threading.Lock()
