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

#: After a warning about a server was logged, the same warning about this server is not logged
#: again for this number of seconds. It is only counted.
INTERVAL: Final = 60.0


@dataclass
class _Warnings:
    logged_at: float
    #: How many warnings have come since ``logged_at`` without being logged.
    unlogged: int = 0


class FailureLog:
    """Logs warnings about cache servers, but the same warning about a server only once a minute.

    While a server is down, or refuses the login, each transaction of each process that needs the
    server has a reason for a warning. So many lines would fill the log.

    Takes no lock. So if several threads warn at the same moment, each of them may log the warning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """:param clock: returns the time in seconds; must never go back."""
        self._clock = clock
        self._warnings: WeakKeyDictionary[CacheServer, dict[str, _Warnings]] = WeakKeyDictionary()

    def warn(self, server: CacheServer, text: str, *values: object) -> None:
        """Log a warning about ``server``, unless one with the same ``text`` was logged a short time
        ago.

        When the warning is logged again, its line says how many warnings were left out.

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
