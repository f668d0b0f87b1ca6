"""A circuit breaker: callers keep off a server that failed, and one of them tries it again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Failure:
    cause: Exception
    since: float
    #: When the next caller may try.
    until: float


class CircuitBreaker:
    """Why, and until when, a server or a part of it is left alone. Thread-safe.

    Without it each call would wait for the timeout while the server is away. The key None stands
    for the whole server, any other one for a part of it.
    """

    def __init__(self, backoff: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        :param backoff: seconds without a call after a failure.
        :param clock: seconds from any start, that never go back.
        """
        self._backoff = backoff
        self._clock = clock
        # Guards the times: one caller at a time moves them on to try again.
        self._lock = threading.Lock()
        self._failures: dict[str | None, _Failure] = {}

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left alone. Takes no lock: callers look here first."""
        return not self._failures

    def claim(self, *keys: str | None) -> bool:
        """Whether the caller may call all ``keys``: they are well, or it is its turn to try.

        After a turn the others wait for :meth:`reset`, but no longer than ``backoff``: the caller
        that tries may be killed.
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
        """The last failure of ``key``; None if there is none, or none at or after ``since``."""
        failure = self._failures.get(key)
        return failure.cause if failure is not None and failure.since >= since else None

    def trip(self, key: str | None, cause: Exception) -> bool:
        """Leave ``key`` alone from now on. Returns whether that is news."""
        now = self._clock()
        with self._lock:
            before = self._failures.get(key)
            self._failures[key] = _Failure(cause, now, now + self._backoff)
        return before is None or type(before.cause) is not type(cause)

    def half_open(self, key: str | None) -> None:
        """Let the next caller try at once: there is a sign that ``key`` is well."""
        with self._lock:
            if (failure := self._failures.get(key)) is not None:
                failure.until = self._clock()

    def reset(self, key: str | None) -> bool:
        """Forget the failure of ``key``, which has served. Returns whether that is news."""
        if key not in self._failures:
            return False
        with self._lock:
            return self._failures.pop(key, None) is not None

    def after_fork(self) -> None:
        """Forget the parent's threads, one of which may hold the lock for ever."""
        self._lock = threading.Lock()
