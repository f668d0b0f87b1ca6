"""Reads that run side by side, so that one packet serves them all.

A read is a generator that yields queries to cache servers and gets the replies.
:func:`drive` runs several reads: in each phase, all their queries to one server cost one round
trip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from sharded_orm.cache.markers import unfinished
from sharded_orm.cache.stores.base import CacheServer, FoundEntry, ServerDown

#: A server, and the arguments of its :meth:`CacheServer.read`.
CacheQuery = tuple[CacheServer, Sequence[str], Sequence[str], Sequence[str]]
#: The result of :meth:`CacheServer.read`.
Reply = tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]
#: A read, phase by phase.
Steps = Generator[CacheQuery, Reply, None]


def read_leased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read for a caller that fills: servers that lease on reading lease it missing objects."""
    if unfinished.waiting:
        unfinished.flush(server)
    return server.read(names, objects, again)


def read_unleased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Read for a caller that does not fill: a lease would keep others from filling."""
    if not objects:
        return read_leased(server, names, (), again)
    raws, _, after = read_leased(server, (*names, *objects), (), again)
    return raws[: len(names)], list(map(FoundEntry, raws[len(names) :])), after


def drive(steps: Sequence[Steps], exchange: Callable[..., Reply]) -> None:
    """Run reads side by side. A server that is down ends the reads that need it."""
    if len(steps) == 1:
        read = steps[0]
        try:
            query = next(read)
            while True:
                query = read.send(exchange(*query))
        except (StopIteration, ServerDown):
            return
    waiting = [(read, next(read)) for read in steps]  # Each has at least one query.
    while waiting:
        packets: dict[CacheServer, _Packet] = {}
        for read, query in waiting:
            packets.setdefault(query[0], _Packet()).add(read, query)
        waiting = []
        for server, packet in packets.items():
            try:
                waiting += packet.exchange(server, exchange)
            except ServerDown:
                continue  # Its requests bypass the cache.


class _Packet:
    """The queries of several reads to one server."""

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
        """The reads that go on, with their next queries. One round trip."""
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
