"""Counts cache hits, misses and other events for each model.

Each process counts its own events. From time to time, it adds its counts to counters on the cache
servers, which all processes share.
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

#: Maps the name of each counted event to its meaning.
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

#: Maps the label of a model to a dict that maps a name of :data:`FIELDS` to a count. For example,
#: ``{"app.Photo": {"object_hits": 3}}``.
Counts = dict[str, dict[str, int]]

_all: WeakSet[CacheStatistics] = WeakSet()
# The dicts of all counting() blocks around the running code. Each cache event is added to all of
# them.
_blocks: ContextVar[tuple[Counts, ...]] = ContextVar("sharded_orm_counting", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """Context manager that counts the cache events of its block, for a test or a debugging page.

    Yields a dict that is updated during the block, such as ``{"app.Photo": {"object_hits": 3}}``.
    It maps the label of a model to a dict, which maps names of :data:`FIELDS` to counts. Counted
    are the events of the code in the block, including asyncio tasks that the block starts (they run
    in a copy of the block's context). Blocks may be nested.
    """
    counts: Counts = {}
    token = _blocks.set((*_blocks.get(), counts))
    try:
        yield counts
    finally:
        _blocks.reset(token)


class CacheStatistics:
    """Counts the cache events of this process, and publishes the counts from time to time.

    To publish means three things: send the signal :data:`~sharded_orm.signals.cache_counted`, log
    the counts at level DEBUG, and add them to counters on the cache servers, which all processes
    share. If a server is down, its counts are kept for the next time. Thread-safe; a forked child
    starts with empty counts.

    :param prefix: the prefix of all names in the cache, before the model's label.
    :param server: takes the prefix and label of a model, and returns the cache server that holds
        its counters.
    :param clock: returns the time of a monotonic clock in seconds.
    """

    #: :meth:`add` publishes the counts (:meth:`flush`) if this was last done at least this many
    #: seconds ago. None: :meth:`add` never does so.
    interval: float | None = 10.0
    #: At the end of a request, the counts are published (:meth:`flush`) if this was last done at
    #: least this many seconds ago.
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
        # Protects _total, _pending and _unsent, which several threads change.
        self._lock = threading.Lock()
        self._total: dict[str, dict[str, int]] = {}
        # The counts that were not reported by the signal cache_counted yet.
        self._pending: dict[str, dict[str, int]] = {}
        # The counts that were reported by the signal cache_counted, but were not yet added to the
        # counters on the cache servers.
        self._unsent: dict[str, dict[str, int]] = {}
        self._sent_at = self._clock()

    def add(self, type_name: str, **deltas: int) -> None:
        """Add to the counts of a model.

        If the counts of all models were last published :attr:`interval` seconds ago or earlier,
        publish them (:meth:`flush`). While a cache server is down, this may take as long as its
        timeout.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :param deltas: maps names of :data:`FIELDS` to the numbers to add.
        """
        with self._lock:
            _add(self._pending.setdefault(type_name, {}), deltas)
            for block in _blocks.get():
                _add(block.setdefault(type_name.removeprefix(self._prefix), {}), deltas)
        if self.interval is not None and self._clock() - self._sent_at >= self.interval:
            self.flush()

    def counted(self, type_name: str) -> dict[str, int]:
        """Return what this process has counted for a model since the process started.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :returns: maps names of :data:`FIELDS` to counts.
        """
        with self._lock:
            sources = [counts.get(type_name, {}) for counts in (self._total, self._pending)]
        return {field: sum(counts.get(field, 0) for counts in sources) for field in FIELDS}

    def request_finished(self) -> None:
        """Publish the counts (:meth:`flush`) at the end of a request.

        Does nothing if they were published in the last :attr:`request_interval` seconds.
        """
        if self._clock() - self._sent_at >= self.request_interval:
            self.flush()

    def flush(self) -> None:
        """Publish the counts: send the signal ``cache_counted``, and add the new counts to the
        counters on the cache servers.

        Does not raise an error if a server is down. Costs one round trip per model that has new
        counts.
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
                # send_robust() catches the errors of receivers. Otherwise they would break the read
                # whose outcome is being counted.
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
            # Keep the counts, to send them again later. If the server had added them before it
            # failed, they are counted twice. That is better than losing the counts of an outage.
            with self._lock:
                _add(self._unsent.setdefault(name, {}), counts)

    def overall(self, type_name: str) -> dict[str, int]:
        """Return what all processes together have counted for a model since the last :meth:`reset`.

        Counts that a process has not published yet (:meth:`flush`) are missing. Costs one round
        trip.

        :param type_name: the prefix of all names in the cache, followed by the model's label.
        :raises ServerDown: the server that holds the counters of this model is down.
        """
        names = [counter(type_name, field) for field in FIELDS]
        return dict(zip(FIELDS, self._server(type_name).counters(names), strict=True))

    def reset(self, type_names: Iterable[str]) -> None:
        """Set the counters of models on the cache servers to 0. Costs one round trip per model.

        :param type_names: the prefix of all names in the cache, followed by the label of each
            model.
        :raises ServerDown: a server is down.
        """
        for name in type_names:
            self._server(name).reset_counters([counter(name, field) for field in FIELDS])


def counter(type_name: str, field: str) -> str:
    """Return the name of the cache entry that counts one kind of event of a model, such as its
    hits.

    Only the names of counters contain ``@count-``.

    :param type_name: the prefix of all names in the cache, followed by the model's label.
    :param field: a name of :data:`FIELDS`.
    """
    return f"{type_name}-@count-{field}"


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    for field, count in counts.items():
        to[field] = to.get(field, 0) + count


def _after_fork() -> None:
    # The child needs a new lock, because a thread of the parent may have held the old one during
    # the fork. It also starts with empty counts, because the parent publishes what it has counted.
    for statistics in list(_all):
        statistics._renew()


os.register_at_fork(after_in_child=_after_fork)
