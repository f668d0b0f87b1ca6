"""Counts of hits, misses and other events of the cache: per model, per process and overall."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakSet

from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.signals import cache_counted

logger = logging.getLogger("sharded_orm.cache")

#: The counts by name, with their meaning.
FIELDS: Mapping[str, str] = {
    "object_hits": "objects that the cache server had",
    "object_misses": "objects that it had not",
    "list_hits": "lists, counts and exists() that it had",
    "list_misses": "those that it had not",
    "l1_hits": "reads answered by the request's own memory",
    "bypasses": "reads that went to the database because a write was going on",
    "fills": "entries stored",
    "fills_lost": "entries not stored because of a write in between, or of another reader",
    "broken": "entries that could not be read",
    "too_large": "entries that are too large for the server",
    "refusals": "writes refused because the cache could not be told",
    "proceeded": "writes that went on without the cache",
    "repairs": "markers of dead writers that were closed",
}

#: Label of each model -> counts by name.
Counts = dict[str, dict[str, int]]

_all: WeakSet[CacheStatistics] = WeakSet()
# The counts of the counting() blocks around this context.
_blocks: ContextVar[tuple[Counts, ...]] = ContextVar("sharded_orm_counting", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """Count for the block: label of each model -> counts, by name of :data:`FIELDS`.

    For a panel of a debugging page, or a test. Reads and writes of the block's code count, and
    those of tasks that run in copies of its context. Blocks may be nested.
    """
    counts: Counts = {}
    token = _blocks.set((*_blocks.get(), counts))
    try:
        yield counts
    finally:
        _blocks.reset(token)


class CacheStatistics:
    """Counters of this process, sent from time to time. Thread-safe; survives a fork.

    To send them is to add them to counters on the cache servers, which all processes share, to
    announce them by :data:`~sharded_orm.signals.cache_counted`, and to log them at level DEBUG.
    Counts for a server that is down are kept for the next time.

    :param prefix: the beginning of the names of all types.
    :param server: returns the server of a place.
    :param clock: a monotonic clock, in seconds.
    """

    #: Seconds between two sends outside of requests; None: only :meth:`flush` sends.
    interval: float | None = 10.0
    #: Seconds between two sends at the ends of requests.
    request_interval = 1.0

    def __init__(
        self,
        prefix: str,
        server: Callable[[str], CacheServer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = prefix
        self._server = server
        self._clock = clock
        self._renew()
        _all.add(self)

    def _renew(self) -> None:
        # Invariant: the three mappings change under the lock only.
        self._lock = threading.Lock()
        self._total: dict[str, dict[str, int]] = {}
        # Not announced yet.
        self._pending: dict[str, dict[str, int]] = {}
        # Announced, but not sent to a server yet.
        self._unsent: dict[str, dict[str, int]] = {}
        self._sent_at = self._clock()

    def add(self, type_name: str, **deltas: int) -> None:
        """Add to counters. Every :attr:`interval` it also sends, which may take the timeouts of
        cache servers.

        :param deltas: increments by name of :data:`FIELDS`.
        """
        with self._lock:
            _add(self._pending.setdefault(type_name, {}), deltas)
            for block in _blocks.get():
                _add(block.setdefault(type_name.removeprefix(self._prefix), {}), deltas)
        if self.interval is not None and self._clock() - self._sent_at >= self.interval:
            self.flush()

    def counted(self, type_name: str) -> dict[str, int]:
        """All counts of ``type_name`` in this process since its start."""
        with self._lock:
            sources = [counts.get(type_name, {}) for counts in (self._total, self._pending)]
        return {field: sum(counts.get(field, 0) for counts in sources) for field in FIELDS}

    def request_finished(self) -> None:
        """Send, unless :attr:`request_interval` is not over. For the end of a request."""
        if self._clock() - self._sent_at >= self.request_interval:
            self.flush()

    def flush(self) -> None:
        """Send the counts. Does not raise; one round trip per model that has counts."""
        with self._lock:
            self._sent_at = self._clock()
            pending, self._pending = self._pending, {}
            unsent, self._unsent = self._unsent, {}
            for name, counts in pending.items():
                _add(self._total.setdefault(name, {}), counts)
                _add(unsent.setdefault(name, {}), counts)
        if pending:
            labels = {name.removeprefix(self._prefix): dict(c) for name, c in pending.items()}
            if cache_counted.has_listeners():
                # An error of a receiver must not break the read that counts.
                cache_counted.send_robust(sender=CacheStatistics, counts=labels)
            if logger.isEnabledFor(logging.DEBUG):
                for label, counts in labels.items():
                    shown = ", ".join(f"{field} {count}" for field, count in counts.items())
                    logger.debug("%s: %s", label, shown)
        for name, counts in unsent.items():
            self._send(name, counts)

    def _send(self, name: str, counts: Mapping[str, int]) -> None:
        try:
            self._server(name).count(
                {counter(name, field): count for field, count in counts.items() if count}
            )
        except ServerDown:
            # The server may have counted. A count that is too high is better than an outage
            # without a trace.
            with self._lock:
                _add(self._unsent.setdefault(name, {}), counts)

    def overall(self, type_name: str) -> dict[str, int]:
        """Counts of all processes since the last reset, as far as they were sent. One round trip.

        :raises ServerDown: the server with the counters of this model is down.
        """
        names = [counter(type_name, field) for field in FIELDS]
        return dict(zip(FIELDS, self._server(type_name).counters(names), strict=True))

    def reset(self, type_names: Iterable[str]) -> None:
        """Set the counters of all processes to 0. One round trip per model.

        :raises ServerDown: a server is down.
        """
        for name in type_names:
            self._server(name).finish([counter(name, field) for field in FIELDS], ())


def counter(type_name: str, field: str) -> str:
    """The name of a counter on a cache server. No other name has an ``@`` there."""
    return f"{type_name}-@count-{field}"


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    for field, count in counts.items():
        to[field] = to.get(field, 0) + count


def _after_fork() -> None:
    # Another thread of the parent may have held the lock, and the parent sends its counts itself.
    for statistics in list(_all):
        statistics._renew()


os.register_at_fork(after_in_child=_after_fork)
