"""Servers that failed, or single sequences of them, which are left alone for a while."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass
class _Backoff:
    cause: Exception
    since: float
    until: float


class Health:
    """Why and until when a server, or one of its sequences, is left alone. Thread-safe.

    :param backoff: seconds for which it is left alone after a failure.

    The key None stands for the whole server, any other for the sequence of that name.
    """

    def __init__(self, backoff: float) -> None:
        self._seconds = backoff
        # Guards the times: one caller at a time tries again.
        self._lock = threading.Lock()
        self._backoffs: dict[str | None, _Backoff] = {}

    @property
    def is_well(self) -> bool:
        """Whether nothing is left alone. Takes no lock."""
        return not self._backoffs

    def claim(self, *keys: str | None) -> bool:
        """Whether this caller may ask: nothing is left alone, or it is this caller's turn to try."""
        if self.is_well:
            return True
        with self._lock:
            now = time.monotonic()
            backoffs = [backoff for key in keys if (backoff := self._backoffs.get(key)) is not None]
            if any(now < backoff.until for backoff in backoffs):
                return False
            for backoff in backoffs:
                backoff.until = now + self._seconds
            return True

    def cause(self, key: str | None = None, *, since: float = 0.0) -> Exception | None:
        """The failure because of which ``key`` is left alone.

        None if it is not left alone, or has failed before ``since`` only.
        """
        backoff = self._backoffs.get(key)
        return backoff.cause if backoff is not None and backoff.since >= since else None

    def failed(self, key: str | None, cause: Exception) -> bool:
        """Leave ``key`` alone from now on. Whether that, or the kind of failure, is new."""
        now = time.monotonic()
        with self._lock:
            before = self._backoffs.get(key)
            self._backoffs[key] = _Backoff(cause, now, now + self._seconds)
        return before is None or type(before.cause) is not type(cause)

    def try_again(self, key: str | None) -> None:
        """Let the next caller try ``key`` at once: there is a sign that it has recovered."""
        with self._lock:
            if (backoff := self._backoffs.get(key)) is not None:
                backoff.until = time.monotonic()

    def recovered(self, key: str | None) -> bool:
        """Record that ``key`` has served. Whether it was left alone before."""
        if key not in self._backoffs:
            return False
        with self._lock:
            return self._backoffs.pop(key, None) is not None
