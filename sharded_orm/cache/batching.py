"""Several reads from the cache, run together to save round trips.

A read is a generator: it yields queries to cache servers, and is sent the reply to each query.
:func:`drive` runs several reads step by step. In each step every read has one query, and all
queries to the same server are sent in one packet, for one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from sharded_orm.cache.closings import closing_queue
from sharded_orm.cache.stores.base import CacheServer, FoundEntry, Reply, ServerDown

#: A query to the cache: the server, and the three arguments of :meth:`CacheServer.read`.
CacheQuery = tuple[CacheServer, Sequence[str], Sequence[str], Sequence[str]]
#: The type of a read from the cache: a generator that yields queries and is sent the replies.
Steps = Generator[CacheQuery, Reply, None]


def read_leased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read entries for a caller that will store missing objects.

    A *lease* is a server's permission to store one entry. Some servers (memcached) give leases on
    reading: one for each missing object that is not leased to another reader.
    """
    if closing_queue.waiting:
        closing_queue.flush(server)
    return server.read(names, objects, again)


def read_unleased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read entries for a caller that will not store missing objects.

    No lease (a server's permission to store an object) is taken: an unused lease would keep other
    readers from storing the object.
    """
    if not objects:
        return read_leased(server, names, (), again)
    raws, _, after = read_leased(server, (*names, *objects), (), again)
    return raws[: len(names)], list(map(FoundEntry, raws[len(names) :])), after


def drive(steps: Sequence[Steps], exchange: Callable[..., Reply]) -> None:
    """Run all reads in ``steps`` together, until every read has ended.

    If a server is down, the reads that need it are stopped: their requests bypass the cache.

    :param exchange: sends a query and returns the reply: :func:`read_leased` or
        :func:`read_unleased`.
    """
    if len(steps) == 1:
        read = steps[0]
        try:
            query = next(read)
            while True:
                query = read.send(exchange(*query))
        except (StopIteration, ServerDown):
            return
    # Pairs of a read and its next query. Here, next() always returns a query, because each read
    # yields at least one.
    waiting = [(read, next(read)) for read in steps]
    while waiting:
        packets: dict[CacheServer, _Packet] = {}
        for read, query in waiting:
            packets.setdefault(query[0], _Packet()).add(read, query)
        waiting = []
        for server, packet in packets.items():
            try:
                waiting += packet.exchange(server, exchange)
            except ServerDown:
                # The server is down. The reads that have sent it a query are not continued, and
                # their requests bypass the cache.
                continue


class _Packet:
    """The queries of several reads, joined into one query to a cache server."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._again: dict[str, int] = {}
        self._objects: list[str] = []
        self._queries: list[tuple[Steps, CacheQuery, int]] = []

    def add(self, read: Steps, query: CacheQuery) -> None:
        _, names, objects, again = query
        self._queries.append((read, query, len(self._objects)))
        for name in names:
            self._names.setdefault(name, len(self._names))
        for name in again:
            self._again.setdefault(name, len(self._again))
        self._objects += objects

    def exchange(
        self, server: CacheServer, exchange: Callable[..., Reply]
    ) -> list[tuple[Steps, CacheQuery]]:
        """Send all added queries in one round trip, and give each read its part of the reply.

        :returns: the reads that have not ended, each with its next query.
        :raises ServerDown: the server is down.
        """
        names, objects, again = exchange(
            server, list(self._names), self._objects, list(self._again)
        )
        following = []
        for read, (_, own_names, own_objects, own_again), start in self._queries:
            reply = (
                [names[self._names[name]] for name in own_names],
                objects[start : start + len(own_objects)],
                [again[self._again[name]] for name in own_again],
            )
            try:
                following.append((read, read.send(reply)))
            except StopIteration:
                continue
        return following
