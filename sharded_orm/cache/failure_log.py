"""Logs that a cache server does not answer, without a line for each transaction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from sharded_orm.cache.stores.base import CacheServer

logger = logging.getLogger("sharded_orm.cache")

#: For this number of seconds after a line, the same warning about the same server is only counted.
INTERVAL: Final = 60.0


@dataclass
class _Warnings:
    logged_at: float
    #: The number of warnings that were not logged since then.
    unlogged: int = 0


class FailureLog:
    """Logs warnings about cache servers: one of a kind per server and minute.

    A server that is down, or refuses the login, fails in each transaction of each process.

    Takes no lock: if several threads warn at the same moment, each may log its line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """:param clock: returns the time in seconds; must never go back."""
        self._clock = clock
        self._warnings: WeakKeyDictionary[CacheServer, dict[str, _Warnings]] = WeakKeyDictionary()

    def warn(self, server: CacheServer, text: str, *values: object) -> None:
        """Log a warning about ``server``, unless one with the same ``text`` was logged a short time
        ago.

        The next line then says how many were left out.

        :param values: replace the placeholders in ``text``, as in ``logging``.
        """
        now = self._clock()
        by_text = self._warnings.setdefault(server, {})
        earlier = by_text.get(text)
        if earlier is not None and now < earlier.logged_at + INTERVAL:
            earlier.unlogged += 1
            return
        by_text[text] = _Warnings(now)
        if earlier is not None and earlier.unlogged:
            text = f"{text} (%d more since the last line like this)"
            values = (*values, earlier.unlogged)
        logger.warning(text, *values)


#: The log of this process.
failure_log: Final = FailureLog()
