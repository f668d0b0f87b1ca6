"""What the cache did, counted: per model, in this process and over all of them."""

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

#: What is counted, with what it means.
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

#: Label of each model -> what was counted, by name.
Counts = dict[str, dict[str, int]]

_all: WeakSet[CacheStatistics] = WeakSet()
# Of the blocks of counting() that this context is in.
_blocks: ContextVar[tuple[Counts, ...]] = ContextVar("sharded_orm_counting", default=())


@contextmanager
def counting() -> Iterator[Counts]:
    """What the cache does for the block: label of each model -> counts, by name of :data:`FIELDS`.

    For a panel of a debugging page, or a test. Counted is what the code of the block reads and
    writes, and what it starts in copies of its context; blocks may be nested.
    """
    counts: Counts = {}
    token = _blocks.set((*_blocks.get(), counts))
    try:
        yield counts
    finally:
        _blocks.reset(token)


class CacheStatistics:
    """Counters of this process, sent on from time to time. Thread-safe; survives a fork.

    Sent means: added to counters on the cache servers, which are the same for all
    processes, announced by :data:`~sharded_orm.signals.cache_counted`, and logged at
    level DEBUG. What a server that is down cannot take is kept for the next time.

    :param prefix: what the names of all types begin with.
    :param server: gives the server of a place.
    :param clock: seconds, for tests.
    """

    #: Seconds between two sendings outside of requests; None: only when asked.
    interval: float | None = 10.0
    #: Seconds between two sendings at the ends of requests.
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
        #: Not announced yet; announced, but not taken by a server yet.
        self._pending: dict[str, dict[str, int]] = {}
        self._unsent: dict[str, dict[str, int]] = {}
        self._sent_at = self._clock()

    def add(self, type_name: str, **deltas: int) -> None:
        """Count. Now and then it also sends, which may take as long as a cache server may.

        :param deltas: names of :data:`FIELDS`.
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
            sources = [each.get(type_name, {}) for each in (self._total, self._pending)]
        return {field: sum(counts.get(field, 0) for counts in sources) for field in FIELDS}

    def request_finished(self) -> None:
        """Send, unless that was done a moment ago. For the end of a request."""
        if self._clock() - self._sent_at >= self.request_interval:
            self.flush()

    def flush(self) -> None:
        """Send what was counted. Does not raise; one round trip per model that has counts."""
        with self._lock:
            self._sent_at = self._clock()
            taken, self._pending = self._pending, {}
            unsent, self._unsent = self._unsent, {}
            for name, counts in taken.items():
                _add(self._total.setdefault(name, {}), counts)
                _add(unsent.setdefault(name, {}), counts)
        if taken:
            labels = {name.removeprefix(self._prefix): dict(c) for name, c in taken.items()}
            if cache_counted.has_listeners():
                # Robust: a receiver must not break the read that happened to count.
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
            # It may have been counted after all; a count that is too high is better than
            # an outage that leaves no trace.
            with self._lock:
                _add(self._unsent.setdefault(name, {}), counts)

    def overall(self, type_name: str) -> dict[str, int]:
        """Counts of all processes since the last reset, as far as they were sent.

        :raises ServerDown: the server that holds the counters of this model is down.
        """
        names = [counter(type_name, field) for field in FIELDS]
        return dict(zip(FIELDS, self._server(type_name).counters(names), strict=True))

    def reset(self, type_names: Iterable[str]) -> None:
        """Let the counters of all processes begin at 0 again.

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
    # Another thread of the parent may have held the lock, and what the parent has counted
    # it sends itself.
    for each in list(_all):
        each._renew()


os.register_at_fork(after_in_child=_after_fork)
