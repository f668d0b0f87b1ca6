"""What is left alone for a while: a server that failed, or one sequence of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass
class _Rest:
    cause: Exception
    since: float
    until: float


class Health:
    """Why and until when a server, or a sequence of it, is not asked. Thread-safe.

    :param backoff: seconds.

    The key None stands for the whole server, any other for the sequence of that name.
    """

    def __init__(self, backoff: float) -> None:
        self._backoff = backoff
        # Guards the moments: one caller at a time takes it on to try again.
        self._lock = threading.Lock()
        self._rests: dict[str | None, _Rest] = {}

    @property
    def is_well(self) -> bool:
        """Nothing is left alone. Takes no lock."""
        return not self._rests

    def claim(self, *keys: str | None) -> bool:
        """Whether to ask: all is well, or it is this caller's turn to try."""
        if self.is_well:
            return True
        with self._lock:
            now = time.monotonic()
            resting = [rest for key in keys if (rest := self._rests.get(key)) is not None]
            if any(now < rest.until for rest in resting):
                return False
            for rest in resting:
                rest.until = now + self._backoff
            return True

    def cause(self, key: str | None = None, *, since: float = 0.0) -> Exception | None:
        """Why it is left alone; None if it is not, or not because of something so recent."""
        rest = self._rests.get(key)
        return rest.cause if rest is not None and rest.since >= since else None

    def failed(self, key: str | None, cause: Exception) -> bool:
        """Leave it alone from now on. Whether that is news."""
        now = time.monotonic()
        with self._lock:
            before = self._rests.get(key)
            self._rests[key] = _Rest(cause, now, now + self._backoff)
        return before is None or type(before.cause) is not type(cause)

    def try_again(self, key: str | None) -> None:
        """There is a sign that it is well: let the next caller try."""
        with self._lock:
            if (rest := self._rests.get(key)) is not None:
                rest.until = time.monotonic()

    def recovered(self, key: str | None) -> bool:
        """It has served. Whether that is news."""
        if key not in self._rests:
            return False
        with self._lock:
            return self._rests.pop(key, None) is not None
