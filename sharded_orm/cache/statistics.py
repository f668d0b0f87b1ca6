"""Counts of cache hits, misses and other events for each model.

Each process counts its own events. Counters on the cache servers add up the counts of all
processes.
"""

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

#: The names of the counted events, each with its meaning.
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

#: Counts of cache events, keyed by the model's label, then by a name of :data:`FIELDS`.
Counts = dict[str, dict[str, int]]

_all: WeakSet[CacheStatistics] = WeakSet()
# The dicts of the counting() blocks that enclose the running code. Each cache event is added to all
# of them.
_blocks: ContextVar[tuple[Counts, ...]] = ContextVar("sharded_orm_counting", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """Context manager that counts the cache events of the block, for a test or a debugging page.

    Yields a dict that is updated during the block: counts keyed by the model's label, then by a
    name of :data:`FIELDS`. The dict counts events of the code in the block, including asyncio tasks
    that the block starts (they run in a copy of the block's context). Blocks may be nested.
    """
    counts: Counts = {}
    token = _blocks.set((*_blocks.get(), counts))
    try:
        yield counts
    finally:
        _blocks.reset(token)


class CacheStatistics:
    """The counts of cache events in this process, which are published from time to time.

    To publish counts is to send the signal :data:`~sharded_orm.signals.cache_counted`, to log the
    counts at level DEBUG, and to add them to counters on the cache servers. All processes share
    these counters. Counts for a server that is down are kept for the next time. Thread-safe; a
    forked child starts with empty counts.

    :param prefix: the prefix of all names in the cache, before the model's label.
    :param server: returns the cache server that holds the counters of a model.
    :param clock: returns the time of a monotonic clock in seconds.
    """

    #: :meth:`add` calls :meth:`flush`, which publishes the counts, if the last call was at least
    #: this number of seconds ago. If it is None, :meth:`add` never calls it.
    interval: float | None = 10.0
    #: At the end of a request, :meth:`flush` publishes the counts if it was last called at least
    #: this number of seconds ago.
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
        # Hold the lock while changing _total, _pending or _unsent.
        self._lock = threading.Lock()
        self._total: dict[str, dict[str, int]] = {}
        # Counts that the signal cache_counted has not reported yet.
        self._pending: dict[str, dict[str, int]] = {}
        # Counts that the signal cache_counted has reported, but that were not added to the counters
        # on a cache server yet.
        self._unsent: dict[str, dict[str, int]] = {}
        self._sent_at = self._clock()

    def add(self, type_name: str, **deltas: int) -> None:
        """Add to the counts of a model.

        If the counts of all models were last published :attr:`interval` seconds ago or earlier,
        publish them (:meth:`flush`). If cache servers are down, this may take as long as their
        timeouts.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :param deltas: increments, keyed by names of :data:`FIELDS`.
        """
        with self._lock:
            _add(self._pending.setdefault(type_name, {}), deltas)
            for block in _blocks.get():
                _add(block.setdefault(type_name.removeprefix(self._prefix), {}), deltas)
        if self.interval is not None and self._clock() - self._sent_at >= self.interval:
            self.flush()

    def counted(self, type_name: str) -> dict[str, int]:
        """Return what this process has counted for a model since the start of the process.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :returns: counts, keyed by names of :data:`FIELDS`.
        """
        with self._lock:
            sources = [counts.get(type_name, {}) for counts in (self._total, self._pending)]
        return {field: sum(counts.get(field, 0) for counts in sources) for field in FIELDS}

    def request_finished(self) -> None:
        """Call :meth:`flush`, unless it was called in the last :attr:`request_interval` seconds.

        Called at the end of a request.
        """
        if self._clock() - self._sent_at >= self.request_interval:
            self.flush()

    def flush(self) -> None:
        """Send the signal ``cache_counted``, and add the new counts to the counters on the servers.

        Does not raise if a server is down. Costs one round trip per model that has new counts.
        """
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
                # send_robust() catches errors of the signal's receivers, which must not break the
                # read that is being counted.
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
            # Keep the counts, to send them again later. If the server has added them before it
            # failed, they count twice, which is better than to lose the counts of an outage.
            with self._lock:
                _add(self._unsent.setdefault(name, {}), counts)

    def overall(self, type_name: str) -> dict[str, int]:
        """Return what all processes together have counted for a model since the last reset.

        Counts that a process has not sent to the server yet (see :meth:`flush`) are missing.

        Costs one round trip.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :raises ServerDown: the server that holds the counters of this model is down.
        """
        names = [counter(type_name, field) for field in FIELDS]
        return dict(zip(FIELDS, self._server(type_name).counters(names), strict=True))

    def reset(self, type_names: Iterable[str]) -> None:
        """Set the counters on the cache servers to 0. Costs one round trip per model.

        :raises ServerDown: a server is down.
        """
        for name in type_names:
            self._server(name).reset_counters([counter(name, field) for field in FIELDS])


def counter(type_name: str, field: str) -> str:
    """Return the name of the cache entry that counts one kind of event of a model, such as hits.
    Only counters have ``@count-`` in their names.

    :param type_name: the prefix of all names in the cache, followed by the model's label.
    :param field: a name of :data:`FIELDS`.
    """
    return f"{type_name}-@count-{field}"


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    for field, count in counts.items():
        to[field] = to.get(field, 0) + count


def _after_fork() -> None:
    # In the child, start with a new lock, because a thread of the parent may have held the old
    # lock. Also start with empty counts, because the parent itself publishes what it has counted.
    for statistics in list(_all):
        statistics._renew()


os.register_at_fork(after_in_child=_after_fork)
