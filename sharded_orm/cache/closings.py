"""The work that a cache server must do after a transaction, and a queue for such work.

A *marker* in a guard (the cache entry that says whether others are valid) announces a write. After
the transaction, the server must delete the written rows, and *close* the marker: record that the
write is over.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from sharded_orm.cache.stores.base import CacheServer

logger = logging.getLogger("sharded_orm.cache")

Records = list[tuple[str, bytes]]


class Closing:
    """What one cache server must do after a transaction: delete objects, then append to guards.

    The appended lines close the transaction's markers, the announcements of its writes.

    :ivar objects: the names of the objects to delete.
    :ivar records: a tuple for each marker: the name of its guard, and the line that closes the
        marker.
    """

    __slots__ = ("objects", "records", "server")

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.objects: set[str] = set()
        self.records: Records = []


class ClosingQueue:
    """Closings of markers (announcements of writes) that could not be sent, kept until their cache
    server answers again.

    A *closing* is what one server must do after a transaction (:class:`Closing`). The closings of a
    server are sent before the next read from it, and before a transaction opens or closes markers
    on it. Each process has one queue, which is thread-safe. At most :attr:`MAXIMUM` closings are
    kept for a server: a further one replaces the oldest, whose markers then stay open until readers
    repair them. A forked child starts with an empty queue, because the parent sends the closings.
    """

    # A closing tells a cache server that a write is over. The queue keeps at most this many
    # closings for each server.
    MAXIMUM = 1000
    _AT_ONCE = 50

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: Whether the queue has closings (reports that a write is over) for any server. Readers
        #: check this before each exchange with a server.
        self.waiting = False
        # The queued closings. The keys are the names of servers, not server objects: after a change
        # of the settings, a new object stands for the same server.
        self._closings: dict[str, deque[Closing]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._closings.values()))

    def add(self, closing: Closing) -> None:
        with self._lock:
            closings = self._closings.setdefault(closing.server.name, deque(maxlen=self.MAXIMUM))
            if len(closings) == self.MAXIMUM:
                logger.warning("More than %d ends of writes wait for cache server %s; the oldest"
                               " is left to its readers.", self.MAXIMUM, closing.server.name)  # fmt: skip
            closings.append(closing)
            self.waiting = True

    def flush(self, server: CacheServer) -> None:
        """Send to a cache server the queued lines that close markers (announcements of writes).

        Costs no round trip if no closing is queued for the server.

        :raises ServerDown: the server does not answer; the closings stay in the queue.
        """
        while self.waiting:
            with self._lock:
                closings = self._closings.get(server.name)
                if not closings:
                    self._closings.pop(server.name, None)
                    self.waiting = bool(self._closings)
                    return
                batch = [closings.popleft() for _ in range(min(len(closings), self._AT_ONCE))]
            objects: dict[str, None] = {}
            records: Records = []
            for closing in batch:
                objects.update(dict.fromkeys(closing.objects))
                records += closing.records
            try:
                server.finish(list(objects), records)
            except BaseException:
                with self._lock:
                    self._closings.setdefault(server.name, deque(maxlen=self.MAXIMUM)).extendleft(
                        reversed(batch)
                    )
                    self.waiting = True
                raise


#: The queue of this process: closings of markers (announcements of writes) that wait until their
#: cache servers answer.
closing_queue = ClosingQueue()
