"""Memcached only: times to live, its limits, and a full server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from pymemcache.client.base import Client

from sharded_orm.cache.stores.base import (
    LEASE_SECONDS,
    MAX_VALUE,
    CacheEntry,
    FoundEntry,
    ServerDown,
)
from sharded_orm.cache.stores.memcached.server import MemcachedServer
from tests.conftest import service_missing
from tests.services import ServiceMissing
from tests.services import memcached as service


@pytest.fixture
def server(memcached: service.MemcachedServer) -> Iterator[MemcachedServer]:
    made = MemcachedServer(memcached.address, timeout=10, backoff=1)
    yield made
    made.close()


@pytest.fixture
def client(memcached: service.MemcachedServer) -> Iterator[Client]:
    made = Client(memcached.address)
    yield made
    made.close()


@pytest.fixture
def name() -> str:
    return uuid4().hex


def seconds_left(client: Client, name: str) -> int:
    (answer,) = client.raw_command(f"mg {name} t").splitlines()
    _, left, *_ = answer.decode().split()
    return int(left.removeprefix("t"))


def test_times_to_live(server: MemcachedServer, client: Client, name: str) -> None:
    guard = f"{name}-guard"
    server.add([(guard, b"=\n")], 100)
    assert 95 < seconds_left(client, guard) <= 100
    server.finish([], [(guard, b"-\n")])
    assert 95 < seconds_left(client, guard) <= 100
    server.mark([(guard, b"+\n")], b"=\n", 200)
    assert 195 < seconds_left(client, guard) <= 200
    server.add([(guard, b"=\n")], 300)
    assert 295 < seconds_left(client, guard) <= 300
    _, found, _ = server.read([guard], [name], [guard])
    assert seconds_left(client, guard) <= 300
    assert seconds_left(client, name) <= LEASE_SECONDS
    server.fill([CacheEntry(name, b"value", found[0].lease)], 400, [guard])
    assert 395 < seconds_left(client, name) <= 400
    assert 795 < seconds_left(client, guard) <= 800
    assert server.replace(guard, b"=\n-\n+\n", b"=\n", 100)
    assert seconds_left(client, guard) <= 100


@pytest.mark.parametrize(("seconds", "given"), [(0.2, 1), (1e9, 30 * 24 * 3600)])
def test_no_time_is_taken_for_ever_or_for_a_date(
    server: MemcachedServer, client: Client, name: str, seconds: float, given: int
) -> None:
    server.fill([CacheEntry(name, b"value")], seconds)
    answer = client.raw_command(f"mg {name} t")
    # The second may be over.
    assert answer == b"EN" or given - 5 <= int(answer.split(b"t")[1]) <= given


def test_an_empty_entry_of_somebody_else_can_be_replaced(
    server: MemcachedServer, client: Client, name: str
) -> None:
    client.set(name, b"", noreply=False)
    assert server.read([name])[0] == [None]
    _, (found,), _ = server.read([], [name])
    assert found.value is None
    assert server.fill([CacheEntry(name, b"value", found.lease)], 60)[0] == [True]


def test_a_guard_that_has_become_too_large_is_not_marked(
    server: MemcachedServer, name: str
) -> None:
    server.mark([(name, b"+" * 1_000_000)], b"=\n", 60)
    with pytest.raises(ServerDown):
        server.mark([(name, b"+" * 100_000)], b"=\n", 60)
    assert server._breaker.is_closed


def test_a_value_that_is_too_large_for_this_server_is_not_stored() -> None:
    try:
        with service.servers(1, I="512k") as (small,):
            server = MemcachedServer(small.address, timeout=10, backoff=1)
            entries = [CacheEntry("large", b"x" * MAX_VALUE), CacheEntry("small", b"x" * 400_000)]
            assert server.fill(entries, 60) == ([False, True], [])
            assert [value is None for value in server.read(["large", "small"])[0]] == [True, False]
            server.close()
    except ServiceMissing as exc:
        service_missing(exc)


def test_a_full_server_forgets_and_goes_on() -> None:
    try:
        with service.servers(1, m="2") as (small,):
            server = MemcachedServer(small.address, timeout=10, backoff=1)
            server.add([("guard", b"=\n")], 60)
            for number in range(300):
                name = f"object-{number}"
                _, (found,), _ = server.read(["guard"], [name])
                assert found.value is None
                if found.lease is not None:
                    server.fill([CacheEntry(name, os.urandom(50_000), found.lease)], 60)
            assert int(server.info()["evictions"]) > 0
            assert server._breaker.is_closed
            server.close()
    except ServiceMissing as exc:
        service_missing(exc)


def test_flushing_voids_leases(own_memcached: service.MemcachedServer, name: str) -> None:
    server = MemcachedServer(own_memcached.address, timeout=10, backoff=1)
    _, (found,), _ = server.read([], [name])
    client = Client(own_memcached.address)
    client.flush_all(noreply=False)
    assert server.fill([CacheEntry(name, b"value", found.lease)], 60)[0] == [False]
    client.close()
    server.close()


def test_connections_that_one_more_thread_needed_are_kept_for_the_next(
    own_memcached: service.MemcachedServer,
) -> None:
    own_memcached.kill()
    own_memcached.start()
    server = MemcachedServer(own_memcached.address, timeout=10, backoff=1)
    for _ in range(10):
        server.read(["x"], ["y"])
    info: dict[str, Any] = server.info()
    assert int(info["total_connections"]) - int(info["rejected_connections"]) <= 3
    server.close()


def test_a_reader_of_a_lease_is_told_nothing(server: MemcachedServer, name: str) -> None:
    server.read([], [name])
    assert server.read([name], [name], [name]) == ([None], [FoundEntry(None)], [None])


def test_many_names(server: MemcachedServer, client: Client, name: str) -> None:
    """Many names are read by another command, with the same results."""
    values = [b"=\n", b"", b"x\r\ny", b"v" * 5000, None]
    names = [f"{name}-{number}" for number in range(200)]
    expected = [values[number % len(values)] for number in range(len(names))]
    for each, value in zip(names, expected, strict=True):
        if value is not None:
            client.set(each, value, noreply=False)
    assert server.read(names) == ([value or None for value in expected], [], [])
    assert server.read(names[:1] * 30)[0] == [b"=\n"] * 30
    assert server.read(names[4:5] * 30)[0] == [None] * 30


def test_more_names_than_one_packet_takes(server: MemcachedServer, client: Client) -> None:
    name = uuid4().hex
    client.set(f"{name}-7", b"seven")
    raws, _, _ = server.read([f"{name}-{number}" for number in range(4000)])
    assert raws == [b"seven" if number == 7 else None for number in range(4000)]
