"""The store in memory: expiry and size."""

from __future__ import annotations

import pytest

from sharded_orm.cache.stores.base import LEASE_SECONDS, CacheEntry, FoundEntry
from sharded_orm.cache.stores.local import LocalServer
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> LocalServer:
    return LocalServer("tested", 3, clock=clock)


def test_entries_end_and_guards_that_are_used_do_not(server: LocalServer, clock: Clock) -> None:
    server.add([("guard", b"=\n")], 10)
    server.fill([CacheEntry("x", b"value")], 10, ["guard"])
    clock.now += 10
    assert server.read(["x", "guard"])[0] == [None, b"=\n"]
    clock.now += 10
    assert server.read(["guard"])[0] == [None]
    server.mark([("guard", b"+\n")], b"=new\n", 10)
    clock.now += 9
    server.finish([], [("guard", b"-\n")])
    assert server.read(["guard"])[0] == [b"=new\n+\n-\n"]
    clock.now += 1
    assert server.read(["guard"])[0] == [None]


def test_a_lease_ends(server: LocalServer, clock: Clock) -> None:
    _, (first,), _ = server.read([], ["x"])
    assert server.read([], ["x"])[1] == [FoundEntry(None)]
    clock.now += LEASE_SECONDS
    _, (second,), _ = server.read([], ["x"])
    assert second.lease is not None
    assert server.fill([CacheEntry("x", b"late", first.lease)], 10)[0] == [False]
    assert server.fill([CacheEntry("x", b"value", second.lease)], 10)[0] == [True]


def test_of_too_many_those_go_that_were_not_used_for_longest(server: LocalServer) -> None:
    for name in "abc":
        server.fill([CacheEntry(name, b"value")], 10)
    server.read(["a"])
    server.fill([CacheEntry("d", b"value")], 10)
    assert server.read(["a", "b", "c", "d"])[0] == [b"value", None, b"value", b"value"]
    assert server.info() == {"entries": 3, "max_entries": 3, "bytes": 15, "evictions": 1}
