"""Leaving alone a server that failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sharded_orm.cache.stores.base import ServerDown


class Breaker:
    """Keeps callers off a server for a while after a failure; then lets one of them try.

    Without it each call would wait for the timeout while the server is away. Thread-safe.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        :param seconds: how long the server rests after a failure.
        :param clock: seconds from any start, that never go back.
        """
        self.seconds = seconds
        #: Whether to ask :meth:`admit` at all. Callers look at it first, as that is faster.
        self.is_tripped = False
        self._clock = clock
        self._until = 0.0
        self._reason = ""
        self._lock = threading.Lock()

    @property
    def rests(self) -> bool:
        return self.is_tripped and self._clock() < self._until

    def trip(self, reason: str) -> None:
        """The server failed."""
        with self._lock:
            self._reason = reason
            self._until = self._clock() + self.seconds
            self.is_tripped = True

    def admit(self) -> bool:
        """Whether the caller is the one that tries (True), or the server is well (False).

        :raises ServerDown: it rests, or somebody else is trying.
        """
        with self._lock:
            if not self.is_tripped:
                return False
            now = self._clock()
            if now < self._until:
                raise ServerDown(f"resting: {self._reason}")
            # The others wait for the outcome; not forever, as who tries may be killed.
            self._until = now + self.seconds
            return True

    def recover(self) -> None:
        """The one that tried had success."""
        with self._lock:
            self.is_tripped = False

    def after_fork(self) -> None:
        """Forget the parent's threads, one of which may hold the lock for ever."""
        self._lock = threading.Lock()
