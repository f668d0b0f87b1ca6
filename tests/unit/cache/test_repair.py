"""Markers of dead writers are closed, those of living ones are left alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sharded_orm.cache import guards
from sharded_orm.cache.guards import Guard, Marker, Writer, closing, header, opening, parse
from sharded_orm.cache.keys import CachedType, Scope
from sharded_orm.cache.repair import REPAIR_AFTER, Repairer, compact, compact_marked
from sharded_orm.cache.stores.base import CacheServer, ServerDown

QUARANTINE = 10.0
NOW = 1_700_000_000.0
PHOTO = CachedType("photos.Photo", sharded=True, fingerprint="0")
TAG = CachedType("photos.Tag", sharded=False, fingerprint="0")
ALBUM = Scope(PHOTO, "s", "1", "20")
TABLE, HOME, ISOLATED = ALBUM.guards


class Store(CacheServer):
    """A cache server with the methods used here, in the promised order; it records finishes."""

    name = "store"

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.finished: list[tuple[list[str], list[str]]] = []
        self.down = False

    def read(self, names: Sequence[str], objects: Any = (), again: Any = ()) -> Any:
        return [self.data.get(name) for name in names], [], []

    def finish(self, objects: Sequence[str], records: Sequence[tuple[str, bytes]]) -> None:
        if self.down:
            raise ServerDown
        self.finished.append((list(objects), [name for name, _ in records]))
        for name in objects:
            self.data.pop(name, None)
        for name, record in records:
            if name in self.data:
                self.data[name] += record

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        if self.data.get(name) != seen:
            return False
        self.data[name] = new
        return True

    def guard(self, name: str) -> Guard:
        return parse(self.data[name])

    lease = release = fill = mark = add = count = counters = info = close = None  # type: ignore[assignment]


class Database:
    """Sessions 1 to 9 belong to the queried server; those in ``alive`` exist."""

    def __init__(self, *alive: int) -> None:
        self.alive = set(alive)
        self.queries: list[list[int]] = []
        self.down = False

    def judges(self, writer: Writer) -> bool:
        return self.down or 0 < writer.connection < 10

    def gone(self, writers: Sequence[Writer]) -> set[Writer]:
        self.queries.append(sorted(writer.connection for writer in writers))
        return set() if self.down else {w for w in writers if w.connection not in self.alive}


class Clock:
    def __init__(self) -> None:
        self.ticks = 100.0

    def __call__(self) -> float:
        return self.ticks


def marker(*pks: str, session: int = 1, at: float = NOW, wide: bool = False) -> Marker:
    return Marker(guards.new_token(), at, wide, Writer("s", "app", session), frozenset(pks))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repairer(clock: Clock) -> Repairer:
    return Repairer(QUARANTINE, monotonic=clock)


def put(store: Store, name: str, *markers: Marker) -> None:
    store.data[name] = header(NOW - 1000) + b"".join(map(opening, markers))


def repair(
    repairer: Repairer, store: Store, sessions: Database, name: str, now: float = NOW + 2,
    *, scope: Scope = ALBUM,
) -> int:  # fmt: skip
    return repairer.repair(store, scope, scope.guards.index(name), store.guard(name), sessions, now)


def test_the_objects_of_a_dead_writer_go_before_its_marker(
    store: Store, repairer: Repairer
) -> None:
    dead, alive = marker("7", "8", session=1), marker("9", session=2)
    put(store, HOME, dead, alive)
    store.data |= {ALBUM.object_name(pk): b"old" for pk in "789"}
    generation = store.guard(HOME).generation
    assert repair(repairer, store, Database(2), HOME) == 1
    assert store.guard(HOME).open == (alive,)
    assert store.guard(HOME).generation == generation
    assert [pk for pk in "789" if ALBUM.object_name(pk) in store.data] == ["9"]
    # One call, in whose packet the order counts.
    assert store.finished == [([ALBUM.object_name("7"), ALBUM.object_name("8")], [HOME])]


@pytest.mark.parametrize("unlisted", [
    Marker("a1", NOW, False, Writer("s", "app", 1), None),
    Marker("a2", NOW, True, Writer("s", "app", 1), frozenset({"7"})),
])  # fmt: skip
def test_what_is_not_listed_is_void_by_a_new_generation(
    store: Store, repairer: Repairer, unlisted: Marker
) -> None:
    put(store, HOME, unlisted)
    generation = store.guard(HOME).generation
    assert repair(repairer, store, Database(), HOME) == 1
    assert store.guard(HOME).open == ()
    assert store.guard(HOME).generation != generation


def test_only_the_home_guard_names_objects(store: Store, repairer: Repairer) -> None:
    put(store, ISOLATED, marker("7"))
    put(store, TABLE, marker("7", wide=True))
    repair(repairer, store, Database(), ISOLATED)
    repair(repairer, store, Database(), TABLE, scope=Scope(PHOTO, "s"))
    assert store.finished == [([], [ISOLATED]), ([], [TABLE])]


def test_global_models_have_their_objects_in_the_table(store: Store, repairer: Repairer) -> None:
    tags = Scope(TAG, TAG.name)
    put(store, tags.guards[0], marker("7"))
    assert repair(repairer, store, Database(), tags.guards[0], scope=tags) == 1
    assert store.finished == [(["photos.Tag-7"], ["photos.Tag-revision"])]


def test_a_young_marker_is_left_to_its_writer(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7"))
    sessions = Database()
    assert repair(repairer, store, sessions, HOME, NOW + REPAIR_AFTER) == 0
    assert sessions.queries == []
    clock.ticks += REPAIR_AFTER + 0.1
    assert repair(repairer, store, sessions, HOME, NOW + REPAIR_AFTER + 0.1) == 1


def test_a_marker_from_the_future_is_repaired_too(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7", at=NOW + 3600), marker("8", at=NOW + 3600, session=99))
    assert repair(repairer, store, Database(), HOME, NOW) == 0
    clock.ticks += REPAIR_AFTER + 0.1
    assert repair(repairer, store, Database(), HOME, NOW) == 1
    clock.ticks += QUARANTINE
    assert repair(repairer, store, Database(), HOME, NOW) == 1
    assert store.guard(HOME).open == ()


def test_the_database_is_asked_once_a_second_about_a_living_writer(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7", session=1), marker("8", session=2))
    sessions = Database(1, 2)
    for _ in range(20):
        assert repair(repairer, store, sessions, HOME) == 0
        clock.ticks += 0.1
    assert sessions.queries == [[1, 2], [1, 2]]
    clock.ticks += 1
    sessions.alive = {2}
    assert repair(repairer, store, sessions, HOME) == 1


def test_a_dead_writer_is_asked_about_once_for_all_its_guards(
    store: Store, repairer: Repairer
) -> None:
    dead = marker("7")
    sessions = Database()
    scopes = [Scope(PHOTO, "s", str(key)) for key in range(50)]
    for scope in scopes:
        put(store, scope.guards[1], dead)
        assert repair(repairer, store, sessions, scope.guards[1], scope=scope) == 1
    assert len(sessions.queries) == 1
    assert [objects for objects, _ in store.finished] == [[s.object_name("7")] for s in scopes]


def test_threads_that_meet_it_together_close_it_once(store: Store, repairer: Repairer) -> None:
    put(store, HOME, marker("7"))
    seen = store.guard(HOME)
    sessions = Database()
    start = threading.Barrier(8)
    closed: list[int] = []

    def meet() -> None:
        start.wait()
        closed.append(repairer.repair(store, ALBUM, 1, seen, sessions, NOW + 2))

    threads = [threading.Thread(target=meet) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(closed) == [0] * 7 + [1]
    assert len(store.finished) == 1 and len(sessions.queries) == 1


def test_a_closing_that_was_lost_is_tried_again(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7"))
    store.down = True
    with pytest.raises(ServerDown):
        repair(repairer, store, Database(), HOME)
    store.down = False
    clock.ticks += 1
    sessions = Database()
    assert repair(repairer, store, sessions, HOME) == 1
    assert sessions.queries == []  # once dead, it is not asked for again


def test_who_cannot_be_judged_is_dead_after_the_quarantine(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7", session=0))
    sessions = Database()
    assert repair(repairer, store, sessions, HOME, NOW + QUARANTINE) == 0
    clock.ticks += 1
    assert repair(repairer, store, sessions, HOME, NOW + QUARANTINE + 0.1) == 1
    assert sessions.queries == []


def test_a_living_writer_is_never_too_old(store: Store, repairer: Repairer) -> None:
    put(store, HOME, marker("7", at=NOW - 86400))
    assert repair(repairer, store, Database(1), HOME) == 0


def test_nobody_is_dead_while_the_database_is_silent(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    put(store, HOME, marker("7"), marker("8", session=0))
    sessions = Database()
    sessions.down = True
    assert repair(repairer, store, sessions, HOME, NOW + 1000) == 0
    assert len(store.guard(HOME).open) == 2
    clock.ticks += 1
    sessions.down = False
    assert repair(repairer, store, sessions, HOME, NOW + 1000) == 2


def test_what_is_remembered_is_bounded(store: Store, clock: Clock, repairer: Repairer) -> None:
    sessions = Database(1)
    for _ in range(60):
        put(store, HOME, *(marker("7") for _ in range(100)))
        repair(repairer, store, sessions, HOME)
        sessions.alive ^= {1}
        clock.ticks += 1
    assert len(repairer._states) == 4096
    assert 2000 < len(repairer._closed_at) <= 4096


def test_a_mark_that_lands_after_the_repair_is_closed(store: Store, repairer: Repairer) -> None:
    dead = marker("7")
    put(store, HOME, dead)
    repair(repairer, store, Database(), HOME)
    store.data[HOME] += opening(dead)
    assert store.guard(HOME).open == ()


def test_a_mark_that_lands_after_repair_and_compacting_is_repaired_again(
    store: Store, repairer: Repairer, clock: Clock
) -> None:
    dead = marker("7")
    put(store, HOME, dead)
    sessions = Database()
    repair(repairer, store, sessions, HOME)
    store.data[HOME] = guards.compacted(store.guard(HOME)) + opening(dead)
    assert store.guard(HOME).open == (dead,)
    clock.ticks += 1
    assert repair(repairer, store, sessions, HOME) == 1
    assert store.guard(HOME).open == ()


# Compacting


def bulky(*still: Marker) -> bytes:
    raw = header(NOW - 1000) + b"".join(map(opening, still))
    while len(raw) <= guards.COMPACT_FROM:
        done = marker("1")
        raw += opening(done) + closing(done.token, void=False)
    return raw


def test_a_bulky_guard_becomes_short(store: Store) -> None:
    still = marker("7")
    raw = store.data[HOME] = bulky(still)
    assert compact(store, HOME, raw, 60)
    assert len(store.data[HOME]) < 200
    assert store.guard(HOME).open == (still,)
    assert store.guard(HOME).generation == parse(raw).generation
    assert not compact(store, HOME, store.data[HOME], 60)


def test_compacting_loses_no_line_that_came_meanwhile(store: Store) -> None:
    raw = bulky()
    came = marker("8")
    store.data[HOME] = raw + opening(came)
    assert not compact(store, HOME, raw, 60)
    assert store.guard(HOME).open == (came,)


def test_a_broken_guard_is_left_to_readers(store: Store) -> None:
    store.data[HOME] = b"x" * 5000
    assert not compact(store, HOME, store.data[HOME], 60)


def test_after_a_write_only_long_guards_are_read(store: Store) -> None:
    store.data = {HOME: bulky(), ISOLATED: bulky(), TABLE: header(NOW)}
    compact_marked(store, {HOME: len(store.data[HOME]), ISOLATED: 5000, TABLE: 57, "no": 5000}, 60)
    assert max(map(len, store.data.values())) < 100
    store.read = None  # type: ignore[method-assign,assignment]
    compact_marked(store, {HOME: guards.COMPACT_FROM}, 60)
