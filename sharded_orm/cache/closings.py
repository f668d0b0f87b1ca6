"""What a cache server must do after a transaction, and a queue for servers that do not answer.

Before a transaction commits, it announces each write by a *marker* in a guard, the cache entry that
says whether other entries are valid. After the transaction, the server must delete the written
rows, and *close* the marker: note in the guard that the write is over.
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
    """What one cache server must do after a transaction: delete objects, then append lines to
    guards. The lines close the markers with which the transaction has announced its writes.

    :ivar objects: the names of the objects to delete.
    :ivar records: pairs (name of a guard, line that closes the marker in it).
    """

    __slots__ = ("objects", "records", "server")

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.objects: set[str] = set()
        self.records: Records = []


class ClosingQueue:
    """Keeps what cache servers must do after transactions (:class:`Closing`), if they did not
    answer then.

    The queued closings of a server are sent before the next read from the server, and before a
    transaction opens or closes markers on it. Each process has one queue, which is thread-safe. It
    keeps at most :attr:`MAXIMUM` closings for a server. A further one replaces the oldest, whose
    markers stay open until a reader repairs their guards (:mod:`sharded_orm.cache.repair`). A
    forked child starts with an empty queue, because the parent sends the closings.
    """

    # The largest number of closings (ends of writes that a server must be told) that the queue
    # keeps for each server.
    MAXIMUM = 1000
    _AT_ONCE = 50

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: Whether the queue has closings for any server. Readers check this attribute before each
        #: read, so that an empty queue costs nothing.
        self.waiting = False
        # Maps the name of a server to its closings. The name is used because a change of the
        # settings creates new objects for the same servers.
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
        """Send the queued closings of a cache server, which end the announcements of writes there.

        Costs no round trip if none is queued for the server.

        :raises ServerDown: the server does not answer. The closings stay in the queue.
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


#: The queue of this process for cache servers that did not answer at the end of a write.
closing_queue = ClosingQueue()
