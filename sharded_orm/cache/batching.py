"""What goes to the cache servers in one packet: reads that run side by side.

A read is a generator of what it asks. :func:`drive` runs several of them, so that what they
ask of one server in one phase costs one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from sharded_orm.cache.markers import unfinished
from sharded_orm.cache.stores.base import CacheServer, FoundEntry, ServerDown

#: One exchange with a server: what to read, as :meth:`Server.read` takes it,
Ask = tuple[CacheServer, Sequence[str], Sequence[str], Sequence[str]]
#: and what it gave.
Reply = tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]
#: A read, phase by phase.
Steps = Generator[Ask, Reply, None]


def read_leased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """Objects that are missing are leased to the caller, where reading gives leases."""
    if unfinished.waiting:
        unfinished.flush(server)
    return server.read(names, objects, again)


def read_unleased(
    server: CacheServer, names: Sequence[str], objects: Sequence[str], again: Sequence[str]
) -> Reply:
    """The same for who is not going to fill: a lease would keep others from it."""
    if not objects:
        return read_leased(server, names, (), again)
    raws, _, after = read_leased(server, (*names, *objects), (), again)
    return raws[: len(names)], list(map(FoundEntry, raws[len(names) :])), after


def drive(steps: Sequence[Steps], exchange: Callable[..., Reply]) -> None:
    """Run reads side by side: what they ask of one server goes in one packet."""
    if len(steps) == 1:
        step = steps[0]
        try:
            ask = next(step)
            while True:
                ask = step.send(exchange(*ask))
        except (StopIteration, ServerDown):
            return
    waiting = [(step, next(step)) for step in steps]  # Each asks at least once.
    while waiting:
        packets: dict[CacheServer, _Packet] = {}
        for step, ask in waiting:
            packets.setdefault(ask[0], _Packet()).add(step, ask)
        waiting = []
        for server, packet in packets.items():
            try:
                waiting += packet.exchange(server, exchange)
            except ServerDown:
                continue  # Its wants bypass the cache.


class _Packet:
    """What several reads ask of one server in one exchange."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._again: dict[str, int] = {}
        self._objects: list[str] = []
        self._asks: list[tuple[Steps, Ask, int]] = []

    def add(self, step: Steps, ask: Ask) -> None:
        _, names, objects, again = ask
        self._asks.append((step, ask, len(self._objects)))
        for name in names:
            self._names.setdefault(name, len(self._names))
        for name in again:
            self._again.setdefault(name, len(self._again))
        self._objects += objects

    def exchange(
        self, server: CacheServer, exchange: Callable[..., Reply]
    ) -> list[tuple[Steps, Ask]]:
        """One round trip; what each read asks next."""
        names, objects, again = exchange(
            server, list(self._names), self._objects, list(self._again)
        )
        following = []
        for step, (_, own_names, own_objects, own_again), start in self._asks:
            reply = (
                [names[self._names[name]] for name in own_names],
                objects[start : start + len(own_objects)],
                [again[self._again[name]] for name in own_again],
            )
            try:
                following.append((step, step.send(reply)))
            except StopIteration:
                continue
        return following
