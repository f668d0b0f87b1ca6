"""The contract of cache servers, tested on each kind."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from sharded_orm.cache.keys import MAX_LENGTH
from sharded_orm.cache.stores.base import MAX_VALUE, CacheEntry, CacheServer, FoundEntry
from sharded_orm.cache.stores.factory import (
    BACKENDS,
    DJANGO_REDIS,
    LOCAL,
    MEMCACHED,
    REDIS,
    open_servers,
)
from sharded_orm.cache.stores.local import LocalServer
from sharded_orm.conf import CacheOptions

OPTIONS = CacheOptions(objects="tested", lists="tested", timeout=10.0)
KINDS = ("memcached", "redis", "redis of django", "local")
HEADER = b"=header\n"
EVERY_BYTE = bytes(range(256))


def entry(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    if kind == "memcached":
        found: dict[str, Any] = request.getfixturevalue("memcached").django()
        return found
    if kind == "local":
        return {"BACKEND": LOCAL, "LOCATION": uuid4().hex, "OPTIONS": {"MAX_ENTRIES": 5000}}
    redis = request.getfixturevalue("redis_server")
    if kind == "redis":
        found = redis.django()
        return found
    return {"BACKEND": REDIS, "LOCATION": redis.url, "OPTIONS": {"password": redis.password}}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, settings: Any) -> Any:
    settings.CACHES = {"tested": entry(request.param, request)}
    (made,) = open_servers("tested", OPTIONS)
    yield made
    made.close()


@pytest.fixture
def name() -> Callable[..., str]:
    """Return a name that no other test uses."""
    unique = uuid4().hex
    return lambda what="x": f"{unique}-{what}"


def lease_of(server: CacheServer, name: str) -> Any:
    _, found, _ = server.read([], [name])
    (lease,) = server.lease([name], found)
    return lease


def value_of(server: CacheServer, name: str) -> bytes | None:
    (value,), _, _ = server.read([name])
    return value


def put(server: CacheServer, name: str, value: bytes) -> None:
    assert server.fill([CacheEntry(name, value)], 60) == ([True], [])


def test_every_backend_is_asked(request: pytest.FixtureRequest) -> None:
    assert {entry(kind, request)["BACKEND"] for kind in KINDS} == set(BACKENDS)
    assert {MEMCACHED, DJANGO_REDIS} < set(BACKENDS)


# ##### Guards #####


def test_a_missing_guard_is_created_and_another_one_is_left(server: CacheServer, name: Any) -> None:
    assert server.add([(name("a"), b"=one\n")], 60) == [b"=one\n"]
    assert server.add([(name("a"), b"=two\n"), (name("b"), b"=three\n")], 60) == [
        b"=one\n",
        b"=three\n",
    ]
    assert server.read([name("a"), name("b"), name("c")])[0] == [b"=one\n", b"=three\n", None]


GUARDS, OBJECT = (
    (b"=one\n", b"=two\n+2\n"),
    b"value\r\nof " + EVERY_BYTE[1:] + b"\r\nVA 3 c12\r\n12",
)


def test_what_is_unchanged_is_not_returned_again(server: CacheServer, name: Any) -> None:
    names = name("a"), name("b")
    for guard, value in zip(names, GUARDS, strict=True):
        put(server, guard, value)
    put(server, name("object"), OBJECT)
    for count in (1, 2):
        assert server.read_again(names[:count], name("object"), GUARDS[:count], OBJECT) is None
        assert server.read_again(names[:count], name("object"), GUARDS[:count], OBJECT) is None
    before = server.round_trips
    server.read_again(names, name("object"), GUARDS, OBJECT)
    assert server.round_trips == before + 1


@pytest.mark.parametrize("changed", range(3))
@pytest.mark.parametrize(
    "change",
    [
        lambda value: value + b"x",
        lambda value: value[:-1],
        lambda value: bytes([value[0] ^ 1]) + value[1:],
        lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        lambda value: value + b"\r\n" + value,
        lambda value: b"x",
        lambda value: None,
    ],
)
def test_a_change_is_noticed(
    server: CacheServer, name: Any, change: Callable[[bytes], bytes | None], changed: int
) -> None:
    names, known = [name("a"), name("b"), name("object")], [*GUARDS, OBJECT]
    now: list[bytes | None] = [*known]
    now[changed] = change(known[changed])
    for each, value in zip(names, now, strict=True):
        if value is not None:
            put(server, each, value)
    reply = server.read_again(names[:2], names[2], GUARDS, OBJECT)
    assert reply is not None
    values, (found,), again = reply
    assert [*values, found.value, again] == [*now, []]
    if now[2] is None:
        # The lease is given as by read().
        (lease,) = server.lease([names[2]], [found])
        assert server.fill([CacheEntry(names[2], b"new", lease)], 60)[0] == [True]


def test_a_mark_creates_what_is_missing_and_is_appended(server: CacheServer, name: Any) -> None:
    put(server, name("there"), b"=there\n")
    sizes = server.mark([(name("there"), b"+1\n"), (name("new"), b"+22\n")], HEADER, 60)
    assert sizes == [10, 12]
    assert server.mark([(name("new"), b"+3\n")], b"=another\n", 60) == [15]
    values, _, _ = server.read([name("there"), name("new")])
    assert values == [b"=there\n+1\n", b"=header\n+22\n+3\n"]


def test_finishing_deletes_objects_and_appends_to_guards_that_exist(
    server: CacheServer, name: Any
) -> None:
    put(server, name("object"), b"old")
    put(server, name("other"), b"other")
    server.mark([(name("guard"), b"+1\n")], HEADER, 60)
    server.finish(
        [name("object"), name("missing")], [(name("evicted"), b"-1\n"), (name("guard"), b"-1\n")]
    )
    names = [name(what) for what in ("object", "other", "guard", "evicted")]
    assert server.read(names)[0] == [None, b"other", b"=header\n+1\n-1\n", None]


def test_a_late_mark_is_appended_after_what_came_first(server: CacheServer, name: Any) -> None:
    server.add([(name(), HEADER)], 60)
    server.finish([], [(name(), b"-1\n")])
    server.mark([(name(), b"+1\n")], HEADER, 60)
    assert value_of(server, name()) == b"=header\n-1\n+1\n"


def test_a_guard_is_replaced_only_while_it_is_as_it_was_seen(
    server: CacheServer, name: Any
) -> None:
    server.add([(name(), HEADER)], 60)
    server.mark([(name(), b"+1\n")], HEADER, 60)
    assert not server.replace(name(), HEADER, b"=new\n", 60)
    assert not server.replace(name("missing"), HEADER, b"=new\n", 60)
    assert server.replace(name(), b"=header\n+1\n", b"=new\n", 60)
    assert server.read([name(), name("missing")])[0] == [b"=new\n", None]


# ##### Leases #####


def test_a_missing_object_is_leased_to_one_reader(server: CacheServer, name: Any) -> None:
    mine = lease_of(server, name())
    assert mine is not None
    _, others, _ = server.read([], [name()])
    assert others == [FoundEntry(None)]
    assert server.lease([name()], others) == [None]
    assert server.fill([CacheEntry(name(), b"value", mine)], 60) == ([True], [])
    _, (found,), _ = server.read([], [name()])
    assert found.value == b"value"


def test_a_lease_is_nothing_to_who_reads_the_name_plainly(server: CacheServer, name: Any) -> None:
    lease_of(server, name())
    (_, _), found, (_,) = server.read([name("guard"), name("list")], [name()], [name("guard")])
    assert found[0].value is None


def test_two_readers_of_nothing_get_one_lease(server: CacheServer, name: Any) -> None:
    """Only one reader gets the lease, though both have read before either asked."""
    seen = [server.read([], [name()])[1] for _ in range(2)]
    leases = [server.lease([name()], found)[0] for found in seen]
    assert sum(lease is not None for lease in leases) == 1


@pytest.mark.parametrize("value", [None, b"stale"])
def test_a_lease_that_is_given_back_can_be_taken_again(
    server: CacheServer, name: Any, value: bytes | None
) -> None:
    if value is not None:
        put(server, name(), value)
    _, (found,), _ = server.read([], [name()])
    assert found.value == value
    (early,) = server.lease([name()], [found])
    server.release({name(): FoundEntry(found.value, early)})
    late = lease_of(server, name())
    assert server.fill([CacheEntry(name(), b"new", late)], 60) == ([True], [])
    assert value_of(server, name()) == b"new"


@pytest.mark.parametrize("how", ["deleted", "filled", "deleted and leased again"])
def test_giving_back_a_void_lease_changes_nothing(server: CacheServer, name: Any, how: str) -> None:
    early = lease_of(server, name())
    if how == "filled":
        assert server.fill([CacheEntry(name(), b"value", early)], 60)[0] == [True]
    else:
        server.finish([name()], [])
    late = lease_of(server, name()) if how.endswith("leased again") else None
    server.release({name(): FoundEntry(None, early)})
    if late is not None:
        assert server.fill([CacheEntry(name(), b"value", late)], 60)[0] == [True]
    assert value_of(server, name()) == (None if how == "deleted" else b"value")


def test_a_deletion_voids_a_lease(server: CacheServer, name: Any) -> None:
    lease = lease_of(server, name())
    server.finish([name()], [])
    assert server.fill([CacheEntry(name(), b"old", lease)], 60) == ([False], [])
    assert value_of(server, name()) is None


def test_a_lease_after_a_deletion_does_not_revive_an_earlier_one(
    server: CacheServer, name: Any
) -> None:
    early = lease_of(server, name())
    server.finish([name()], [])
    late = lease_of(server, name())
    assert server.fill([CacheEntry(name(), b"old", early)], 60) == ([False], [])
    assert server.fill([CacheEntry(name(), b"new", late)], 60) == ([True], [])
    assert value_of(server, name()) == b"new"


def test_a_lease_is_good_for_one_fill(server: CacheServer, name: Any) -> None:
    lease = lease_of(server, name())
    assert server.fill([CacheEntry(name(), b"one", lease)], 60)[0] == [True]
    assert server.fill([CacheEntry(name(), b"two", lease)], 60)[0] == [False]
    assert value_of(server, name()) == b"one"


def test_a_value_that_is_of_no_use_is_replaced_under_a_lease(
    server: CacheServer, name: Any
) -> None:
    put(server, name(), b"stale")
    lease = lease_of(server, name())
    assert server.fill([CacheEntry(name(), b"fresh", lease)], 60)[0] == [True]
    assert value_of(server, name()) == b"fresh"


def test_of_two_who_replace_a_value_one_stores(server: CacheServer, name: Any) -> None:
    put(server, name(), b"stale")
    seen = [server.read([], [name()])[1] for _ in range(2)]
    leases = [server.lease([name()], found)[0] for found in seen]
    assert leases[0] is not None
    entries = [
        CacheEntry(name(), value, lease)
        for value, lease in zip([b"one", b"two"], leases, strict=True)
        if lease is not None
    ]
    stored = [server.fill([each], 60)[0][0] for each in entries]
    assert stored[0]
    assert not any(stored[1:])
    assert value_of(server, name()) == b"one"


@pytest.mark.parametrize("how", ["deleted", "filled", "replaced", "deleted and filled"])
def test_the_lease_of_a_value_is_void_when_the_value_is_not_the_same(
    server: CacheServer, name: Any, how: str
) -> None:
    put(server, name(), b"stale")
    lease = lease_of(server, name())
    if how.startswith("deleted"):
        server.finish([name()], [])
    if how.endswith("filled"):
        put(server, name(), b"fresh")
    if how == "replaced":
        there = value_of(server, name())  # a placeholder, if the store uses one
        assert server.replace(name(), there or b"stale", b"fresh", 60)
    assert server.fill([CacheEntry(name(), b"old", lease)], 60)[0] == [False]
    assert value_of(server, name()) == (None if how == "deleted" else b"fresh")


# ##### Filling #####


def test_what_needs_no_lease_is_stored_over_what_is_there(server: CacheServer, name: Any) -> None:
    put(server, name(), b"one")
    put(server, name(), b"two")
    assert value_of(server, name()) == b"two"


def test_filling_tells_of_each_entry_and_reads_the_guards_afterwards(
    server: CacheServer, name: Any
) -> None:
    server.add([(name("guard"), HEADER)], 60)
    lost = lease_of(server, name("lost"))
    server.finish([name("lost")], [])
    entries = [
        CacheEntry(name("list"), b"list"),
        CacheEntry(name("lost"), b"lost", lost),
        CacheEntry(name("large"), b"x" * (MAX_VALUE + 1)),
        CacheEntry(name("held"), b"held", lease_of(server, name("held"))),
        CacheEntry(name("empty"), b""),
    ]
    before = server.round_trips
    stored, again = server.fill(entries, 60, [name("guard"), name("missing")])
    assert stored == [True, False, False, True, False]
    assert again == [HEADER, None]
    assert server.round_trips == before + 1
    values, _, _ = server.read([each.name for each in entries])
    assert values == [b"list", None, None, b"held", None]


def test_the_longest_value_is_stored(server: CacheServer, name: Any) -> None:
    value = os.urandom(MAX_VALUE)
    put(server, name("a"), value)
    put(server, name("b"), value)
    assert server.read([name("a"), name("b")])[0] == [value, value]


@pytest.mark.parametrize(
    "value",
    [EVERY_BYTE, b"\r\n", b"MN\r\n", b"+PONG\r\n", b"x\r\nMN\r\n", b"VA 1\r\nx\r\nMN\r\n", b"0"],
)
def test_a_value_may_be_anything(server: CacheServer, name: Any, value: bytes) -> None:
    put(server, name("list"), value)
    lease = lease_of(server, name())
    assert server.fill([CacheEntry(name(), value, lease)], 60)[0] == [True]
    (read,), (found,), _ = server.read([name("list")], [name()])
    assert read == found.value == value
    # memcached answers more than 20 commands in several parts.
    many = server.read([name("list")] * 30, [name()] * 30, [name("missing")] * 30)
    assert many[0] == [each.value for each in many[1]] == [value] * 30
    assert many[2] == [None] * 30
    guard = HEADER + value
    server.add([(name("guard"), guard)], 60)
    assert server.mark([(name("guard"), value)], HEADER, 60) == [len(guard + value)]
    assert server.replace(name("guard"), guard + value, value, 60)


def test_values_with_line_ends_beside_missing_ones(server: CacheServer, name: Any) -> None:
    """A missing value has one line less than a value, and a line end in a value makes one more."""
    values = {
        name("missing"): None,
        name("plain"): b"x",
        name("end"): b"a\r\nb",
        name("memcached"): b"x\r\nVA 1",
        name("redis"): b"x\r\n$1",
        name("none"): b"\r\nEN",
    }
    for each, value in values.items():
        if value is not None:
            put(server, each, value)
    lists = [name("list"), name("list-missing")]
    put(server, lists[0], b"$1\r\nx")
    for order in itertools.permutations(values, 4):
        expected = [values[each] for each in order]
        assert server.read(order, lists, order)[::2] == (expected, expected)
        assert server.read(lists, order[:1])[0] == [b"$1\r\nx", None]
        assert [found.value for found in server.read(lists[:1], order)[1]] == expected


@pytest.mark.parametrize("number", [1, 4, 5, 40])
@pytest.mark.parametrize("value", [None, b"a", b"a\r\nb", b"\r\nVA 1 c1", b"\r\nVA 1\r\nx"])
@pytest.mark.parametrize("place", ["guard", "object"])
def test_one_value_among_many(
    server: CacheServer, name: Any, number: int, value: bytes | None, place: str
) -> None:
    guards = {name(f"guard-{i}"): b"=%d\n" % i for i in range(number)}
    objects = {name(f"object-{i}"): b"v" * i + b"-" for i in range(number)}
    stored: dict[str, bytes | None] = {**guards, **objects}
    stored[name(f"{place}-{number // 2}")] = value
    for key, this in stored.items():
        if this is not None:
            put(server, key, this)
    values, found, again = server.read([*guards], [*objects], [*guards])
    assert values == again == [stored[key] for key in guards]
    assert [entry.value for entry in found] == [stored[key] for key in objects]


def test_a_name_may_have_its_full_length(server: CacheServer, name: Any) -> None:
    long = name().ljust(MAX_LENGTH, "x")
    other = long[:-1] + "y"
    assert server.fill([CacheEntry(long, b"value", lease_of(server, long))], 60)[0] == [True]
    assert server.mark([(other, b"+1\n")], HEADER, 60) == [len(HEADER) + 3]
    assert server.read([long, other])[0] == [b"value", b"=header\n+1\n"]
    server.finish([long], [(other, b"-1\n")])
    assert server.read([long, other])[0] == [None, b"=header\n+1\n-1\n"]


# ##### Counters, information #####


def test_counters_begin_at_zero_and_add_up(server: CacheServer, name: Any) -> None:
    server.count({name("a"): 5, name("b"): 0})
    server.count({name("a"): 7})
    assert server.counters([name("a"), name("b"), name("c")]) == [12, 0, 0]


def test_counters_begin_at_zero_again(server: CacheServer, name: Any) -> None:
    server.count({name("a"): 5, name("b"): 7})
    server.reset_counters([name("a"), name("c")])
    assert server.counters([name("a"), name("b"), name("c")]) == [0, 7, 0]
    server.count({name("a"): 1})
    assert server.counters([name("a")]) == [1]


def test_a_counter_that_is_none_counts_nothing(server: CacheServer, name: Any) -> None:
    put(server, name(), b"nonsense")
    assert server.counters([name()]) == [0]


def test_it_tells_of_itself(server: CacheServer) -> None:
    info = server.info()
    assert {"version", "redis_version", "entries"} & set(info)
    assert server.name


# ##### Round trips #####


def test_each_call_is_one_round_trip(server: CacheServer, name: Any) -> None:
    server.mark([(name("guard"), b"+1\n")], HEADER, 60)
    server.finish([], [(name("guard"), b"-1\n")])  # loads the scripts into the server
    lease = lease_of(server, name())
    server.fill([CacheEntry(name(), b"value", lease)], 60)
    names = [name(str(number)) for number in range(20)]
    for call in (
        lambda: server.read([name("guard"), name("list")], names, [name("guard")]),
        lambda: server.fill([CacheEntry(each, b"value") for each in names], 60, [name("guard")]),
        lambda: server.mark([(name("guard"), b"+2\n"), (name("g2"), b"+2\n")], HEADER, 60),
        lambda: server.finish(names, [(name("guard"), b"-2\n"), (name("g2"), b"-2\n")]),
        lambda: server.add([(name("guard"), HEADER), (name("g3"), HEADER)], 60),
        lambda: server.count({name("count"): 1, name("more"): 1}),
        lambda: server.counters([name("count"), name("more")]),
        lambda: server.reset_counters([name("count"), name("more")]),
    ):
        before = server.round_trips
        call()
        assert server.round_trips == before + 1
    before = server.round_trips
    server.replace(name("g3"), HEADER, b"=new\n", 60)
    assert server.round_trips <= before + 2


def test_nothing_to_do_is_no_round_trip(server: CacheServer) -> None:
    assert server.read([]) == ([], [], [])
    assert server.lease([], []) == []
    assert server.fill([], 60) == ([], [])
    assert server.mark([], HEADER, 60) == []
    server.finish([], [])
    assert server.add([], 60) == []
    server.count({})
    assert server.counters([]) == []
    server.reset_counters([])
    # In memory each call counts.
    assert server.round_trips == 0 or isinstance(server, LocalServer)


def test_thousands_of_objects_at_once(server: CacheServer, name: Any) -> None:
    names = [name(str(number).rjust(150, "0")) for number in range(2000)]
    _, found, _ = server.read([], names)
    leases = server.lease(names, found)
    entries = [
        CacheEntry(each, each.encode() * 4, lease)
        for each, lease in zip(names, leases, strict=True)
    ]
    assert all(server.fill(entries, 60)[0])
    _, found, _ = server.read([], names)
    assert [value for value, _ in found] == [each.encode() * 4 for each in names]
    server.finish(names, [])
    assert server.read(names)[0] == [None] * 2000


# ##### Threads and processes #####


def test_threads_do_not_disturb_each_other(server: CacheServer, name: Any) -> None:
    threads, rounds = 8, 50
    together = threading.Barrier(threads)

    def work(number: int) -> int:
        own, wins = name(str(number)), 0
        together.wait()
        for turn in range(rounds):
            value = f"{number} {turn}".encode()
            server.fill([CacheEntry(own, value)], 60)
            server.mark([(name("guard"), b"+%b\n" % value)], HEADER, 60)
            assert value_of(server, own) == value
            shared = name(f"shared {turn}".replace(" ", "-"))
            if (lease := lease_of(server, shared)) is not None:
                wins += server.fill([CacheEntry(shared, value, lease)], 60)[0][0]
        return wins

    with ThreadPoolExecutor(threads) as pool:
        wins = sum(pool.map(work, range(threads)))
    assert wins >= rounds
    lines = (value_of(server, name("guard")) or b"").splitlines()
    expected = {b"+%d %d" % (n, turn) for n in range(threads) for turn in range(rounds)}
    assert len(lines) == len(expected) + 1
    assert set(lines) == expected | {b"=header"}


def _child(server: CacheServer, name: str, connection: Any) -> None:
    server.fill([CacheEntry(name, b"child")], 60)
    for _ in range(100):
        connection.send(value_of(server, name))
        connection.recv()


def test_a_child_has_connections_of_its_own(server: CacheServer, name: Any) -> None:
    put(server, name("parent"), b"parent")
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_child, args=(server, name("child"), there))
    child.start()
    for _ in range(100):
        # Both were read at the same time; on one connection their answers would mix.
        assert value_of(server, name("parent")) == b"parent"
        assert here.recv() == b"child"
        here.send(None)
    child.join()
    assert child.exitcode == 0
    assert value_of(server, name("parent")) == b"parent"


def test_a_child_is_not_locked_out_by_a_thread_of_its_parent(
    server: CacheServer, name: Any
) -> None:
    """Fork while threads are in the middle of calls, as a server with threads does."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            server.fill([CacheEntry(name("busy"), b"busy")], 60)

    busy = [threading.Thread(target=work) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=put, args=(server, name(), b"child")) for _ in range(10)]
        for child in children:
            child.start()
        for child in children:
            child.join()
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert [child.exitcode for child in children] == [0] * 10


def test_it_goes_on_after_it_was_closed(server: CacheServer, name: Any) -> None:
    put(server, name(), b"value")
    server.close()
    server.close()
    assert value_of(server, name()) == b"value"
