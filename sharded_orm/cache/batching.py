"""Run several reads from the cache together, to save round trips.

A read is a generator. It yields a query to a cache server, and receives the reply. Then it yields
the next query. :func:`drive` runs several reads step by step. In each step it takes one query of
each read, and sends all queries to the same server in one packet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from sharded_orm.cache.closings import closing_queue
from sharded_orm.cache.stores.base import CacheServer, FoundEntry, Reply, ServerDown

#: A query to the cache: the server, and three lists of names, the arguments of
#: :meth:`CacheServer.read`.
CacheQuery = tuple[CacheServer, Sequence[str], Sequence[str], Sequence[str]]
#: A read from the cache: a generator that yields a query, and is sent the reply before it yields
#: the next one.
Steps = Generator[CacheQuery, Reply, None]


def read_leased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read entries for a caller that wants to store the objects that are missing in the cache.

    To store an object, the caller needs a *lease*, the server's permission. Some servers
    (memcached) give leases when objects are read: one for each missing object that no other reader
    has leased.
    """
    if closing_queue.waiting:
        closing_queue.flush(server)
    return server.read(names, objects, again)


def read_unleased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read entries for a caller that will not store the objects that are missing in the cache.

    The caller needs no lease (the server's permission to store an object), so none is taken. An
    unused lease would keep other readers from storing the object for some seconds.
    """
    if not objects:
        return read_leased(server, names, (), again)
    raws, _, after = read_leased(server, (*names, *objects), (), again)
    return raws[: len(names)], list(map(FoundEntry, raws[len(names) :])), after


def drive(steps: Sequence[Steps], exchange: Callable[..., Reply]) -> None:
    """Run all reads in ``steps`` together, until each has ended.

    If a server is down, the reads that need it stop. Their requests then bypass the cache.

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
    # Pairs (read, its next query). Each read yields at least one query, so next() does not raise
    # StopIteration here.
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
                # The server is down. Do not continue the reads that have sent it a query. Their
                # requests keep the outcome BYPASS.
                continue


class _Packet:
    """The queries of several reads to the same cache server, joined into one query."""

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
        """Send the joined query in one round trip, and give each read its part of the reply.

        :returns: pairs (read, its next query) of the reads that have not ended.
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
