"""Redis only: times to live, scripts, and a full server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from redis import ConnectionPool, Redis

from sharded_orm.cache.stores.base import LEASE_SECONDS, CacheEntry, FoundEntry, ServerDown
from sharded_orm.cache.stores.redis.server import RedisServer
from tests.conftest import service_missing
from tests.patience import PATIENCE
from tests.services import ServiceMissing
from tests.services import redis as service


def opened(redis: service.RedisServer) -> RedisServer:
    pool = ConnectionPool.from_url(redis.url, password=redis.password)
    return RedisServer(pool, timeout=10, backoff=1)


@pytest.fixture
def server(redis_server: service.RedisServer) -> Iterator[RedisServer]:
    made = opened(redis_server)
    yield made
    made.close()


@pytest.fixture
def client(redis_server: service.RedisServer) -> Iterator[Any]:
    with Redis.from_url(redis_server.url, password=redis_server.password) as made:
        yield made


@pytest.fixture
def name() -> str:
    return uuid4().hex


def stored(client: Any, name: str) -> str:
    """Return the name of an entry on the server."""
    owner: bytes = client.get("sharded-orm-incarnation")
    return f"{owner.decode()[-12:]}:{name}"


def test_times_to_live(server: RedisServer, client: Any, name: str) -> None:
    guard = f"{name}-guard"
    server.add([(guard, b"=\n")], 100)

    def ttl(name: str) -> int:
        return int(client.ttl(stored(client, name)))

    assert 95 < ttl(guard) <= 100
    server.finish([], [(guard, b"-\n")])
    assert 95 < ttl(guard) <= 100
    server.mark([(guard, b"+\n")], b"=\n", 200)
    assert 195 < ttl(guard) <= 200
    server.add([(guard, b"=\n")], 300)
    assert 295 < ttl(guard) <= 300
    _, found, _ = server.read([guard], [name], [guard])
    (lease,) = server.lease([name], found)
    assert 0 < ttl(name) <= LEASE_SECONDS
    server.fill(
        [CacheEntry(name, b"value", lease), CacheEntry(name + "-list", b"list")], 400, [guard]
    )
    assert 395 < ttl(name) <= 400
    assert 395 < ttl(name + "-list") <= 400
    assert 795 < ttl(guard) <= 800
    assert server.replace(guard, b"=\n-\n+\n", b"=\n", 100)
    assert ttl(guard) <= 100


def test_a_value_that_is_to_be_replaced_makes_room_for_a_placeholder(
    server: RedisServer, client: Any, name: str
) -> None:
    server.read([name])
    client.set(stored(client, name), b"stale")
    _, found, _ = server.read([], [name])
    assert found == [FoundEntry(b"stale")]
    assert server.lease([name], found) != [None]
    assert server.lease([name], found) == [None]
    assert client.ttl(stored(client, name)) <= LEASE_SECONDS
    assert server.read([], [name])[1] == [FoundEntry(None)]


def test_scripts_that_a_server_has_forgotten_are_sent_again(
    own_redis: service.RedisServer, name: str
) -> None:
    server = opened(own_redis)
    with Redis.from_url(own_redis.url, password=own_redis.password) as client:
        for _ in range(2):
            client.flushall()
            client.script_flush()
            before = server.round_trips
            server.mark([(name, b"+\n")], b"=\n", 60)
            client.set(stored(client, "object"), b"old")
            server.finish(["object"], [(name, b"-\n"), ("missing", b"-\n")])
            server.finish([], [(name, b"-\n")])
            assert server.round_trips == before + 4
            assert client.get(stored(client, name)) == b"=\n+\n-\n-\n"
            assert not client.exists(stored(client, "missing"), stored(client, "object"))
    server.close()


def test_what_is_no_text_is_a_miss_and_is_not_filled(
    server: RedisServer, client: Any, name: str
) -> None:
    server.read([name])
    client.rpush(stored(client, name), "a", "b")
    values, found, _ = server.read([name], [name])
    assert (values, found) == ([None], [FoundEntry(None)])
    (lease,) = server.lease([name], found)
    assert lease is None
    with pytest.raises(ServerDown, match="WRONGTYPE"):
        server.mark([(name, b"+\n")], b"=\n", 60)
    assert server._breaker.is_closed


def test_a_full_server_refuses_marks_and_still_answers() -> None:
    try:
        with service.servers(1, maxmemory="1mb", maxmemory_policy="noeviction") as (small,):
            server = opened(small)
            assert server.fill([CacheEntry("large", b"x" * 900_000)], 60)[0] in ([True], [False])
            with pytest.raises(ServerDown, match="OOM"):
                for number in range(100):
                    server.mark([(f"guard-{number}", b"+" * 100_000)], b"=\n", 60)
            assert server.fill([CacheEntry("more", b"x")], 60) == ([False], [])
            _, found, _ = server.read(["more"], ["object"])
            assert server.lease(["object"], found) == [None]
            server.finish(["large"], [])
            assert server._breaker.is_closed
            server.close()
    except ServiceMissing as exc:
        service_missing(exc)


def test_a_replica_is_not_written_to() -> None:
    """After a failover the server may be a replica."""
    try:
        with service.servers(2) as (primary, other):
            server = opened(other)
            with Redis.from_url(other.url, password=other.password) as client:
                server.read(["guard"])
                client.replicaof("127.0.0.1", primary.port)
                with pytest.raises(ServerDown, match="READONLY"):
                    server.mark([("guard", b"+\n")], b"=\n", 60)
                assert not server._breaker.is_closed
                late = opened(other)
                with pytest.raises(ServerDown, match="it is a replica"):
                    late.read(["guard"])
            server.close()
    except ServiceMissing as exc:
        service_missing(exc)


# ##### Data from before a restart #####


def change(server: RedisServer) -> None:
    """Write an object and change its guard; older data must not be read afterwards."""
    server.mark([("guard", b"+1\n")], b"=\n", 60)
    server.finish(["object"], [("guard", b"-1\n")])


def put(server: RedisServer) -> None:
    server.add([("guard", b"=\n")], 60)
    assert server.fill([CacheEntry("object", b"old"), CacheEntry("list", b"old")], 60)[0] == [
        True,
        True,
    ]


def all_of(server: RedisServer) -> list[bytes | None]:
    guards, (found,), lists = server.read(["guard"], ["object"], ["list"])
    return [*guards, found.value, *lists]


NOTHING = [None, None, None]


@pytest.mark.parametrize("how", ["dump", "log"])
def test_nothing_of_before_a_crash_is_read(how: str) -> None:
    """The server comes back with its saved data, which lacks the last write."""
    options = {"appendonly": "yes", "appendfsync": "always"} if how == "log" else {}
    try:
        with service.servers(1, **options) as (redis,):
            kept, other = opened(redis), opened(redis)
            put(kept)
            kept.count({"counted": 3})
            with Redis.from_url(redis.url, password=redis.password) as client:
                if how == "dump":
                    client.save()
                    change(kept)
                redis.kill()
                redis.start()
                # The old data is back.
                assert client.get(stored(client, "object")) == b"old"
                assert client.get(stored(client, "guard")) == b"=\n"
            # Whether a connection was kept or not.
            assert all_of(kept) == NOTHING
            assert all_of(other) == NOTHING
            assert kept.counters(["counted"]) == [3]
            put(kept)
            assert all_of(other) == [b"=\n", b"old", b"old"]
            kept.close()
            other.close()
    except ServiceMissing as exc:
        service_missing(exc)


def test_nothing_of_before_a_failover_is_read_nor_after_the_way_back() -> None:
    try:
        with service.servers(2) as (one, two):
            first, second = opened(one), opened(two)
            put(first)
            with (
                Redis.from_url(one.url, password=one.password) as at_one,
                Redis.from_url(two.url, password=two.password) as at_two,
            ):
                follow(at_two, one)
                at_two.replicaof("NO", "ONE")
                assert at_two.get(stored(at_two, "object")) == b"old"
                assert all_of(second) == NOTHING
                put(second)
                # The first server comes back as a replica. It has its old run_id, and so have the
                # open connections to it.
                follow(at_one, two)
                with pytest.raises(ServerDown, match="it is a replica"):
                    first.read(["guard"])
                change(second)
                at_one.replicaof("NO", "ONE")
                again = opened(one)
                assert all_of(again) == NOTHING
            for server in (first, second, again):
                server.close()
    except ServiceMissing as exc:
        service_missing(exc)


def follow(client: Any, primary: service.RedisServer) -> None:
    """Make a server a replica with all data of its primary."""
    client.config_set("masterauth", primary.password)
    client.replicaof("127.0.0.1", primary.port)
    with Redis.from_url(primary.url, password=primary.password) as writer:
        mark = uuid4().hex
        writer.set("replicated", mark)
        end = time.monotonic() + PATIENCE
        while client.info("replication")["master_link_status"] != "up" or not writer.wait(1, 1000):
            assert time.monotonic() < end


def test_data_that_are_changed_under_an_open_connection_are_of_another_incarnation(
    own_redis: service.RedisServer,
) -> None:
    server, other = opened(own_redis), opened(own_redis)
    put(server)
    assert all_of(other) == [b"=\n", b"old", b"old"]
    with Redis.from_url(own_redis.url, password=own_redis.password) as client:
        before = stored(client, "object")
        client.flushall()
        client.set(before, b"old")
        put(other)
        assert stored(client, "object") != before
        # A request on an old connection reaches the new server, and is not run twice.
        assert server.mark([("guard", b"+1\n")], b"=\n", 60) == [5]
        assert all_of(server) == all_of(other) == [b"=\n+1\n", b"old", b"old"]
        assert server.read_again(("guard",), "object", (b"=\n+1\n",), b"old") is None
        client.set("sharded-orm-incarnation", "\r\n of somebody else")
        # The old entries are there, but they are of another incarnation.
        values, found, _ = server.read_again(("guard",), "object", (b"=\n+1\n",), b"old") or (
            [],
            [],
            [],
        )
        assert (values, found) == ([None], [FoundEntry(None)])
        assert all_of(server) == all_of(other) == NOTHING
        client.delete("sharded-orm-incarnation")
        client.rpush("sharded-orm-incarnation", "no text")
        with pytest.raises(ServerDown):
            server.read(["guard"])
        client.flushall()
    server.close()
    other.close()


def test_who_may_not_be_told_of_the_server_cannot_use_it(
    own_redis: service.RedisServer,
) -> None:
    with Redis.from_url(own_redis.url, password=own_redis.password) as client:
        client.acl_setuser(
            "limited", enabled=True, passwords=["+secret"], keys=["*"],
            categories=["+@all"], commands=["-info"],
        )  # fmt: skip
        pool = ConnectionPool.from_url(own_redis.url, username="limited", password="secret")
        server = RedisServer(pool, timeout=10, backoff=1)
        with pytest.raises(ServerDown, match="INFO was refused: NOPERM"):
            server.read(["x"])
        client.acl_deluser("limited")
