"""The cost of cached reads, and the failures that they survive, on each kind of store."""

from __future__ import annotations

import pickle
import secrets
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.cache import filler, guards
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.stores.base import CacheEntry, CacheServer, ServerDown
from sharded_orm.models.cached import queryset as cached_queryset
from sharded_orm.models.cached.queryset import fetch_together
from tests.cached.models import CachedAlbum, CachedBoard, CachedNote, CachedPhoto, CachedTag
from tests.queries.conftest import (
    DATABASES,
    LATER,
    ONE,
    SHARD,
    TWO,
    Clock,
    cache,
    clock,
    photos,
    queries,
)

__all__ = ["clock", "photos"]

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

NAME = "cached.CachedPhoto"
# A busy machine must not count as a server that is down.
PATIENT = {"TIMEOUT": 8.0, "COMMIT_WITHIN": 9.0, "QUARANTINE": 20.0}


def local() -> dict[str, Any]:
    return {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "LOCATION": uuid.uuid4().hex,
    }


@pytest.fixture(params=["memory", "memcached", "redis"])
def store(request: pytest.FixtureRequest, settings: Any) -> str:
    """A store for objects and lists."""
    if request.param == "memory":
        entry = local()
    else:
        name = {"memcached": "memcached", "redis": "redis_server"}[request.param]
        entry = request.getfixturevalue(name).django()
    settings.CACHES = {"default": entry}
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "CACHE": {"OBJECTS": "default", **PATIENT}}
    kind: str = request.param
    return kind


@pytest.fixture
def two_stores(memcached: Any, settings: Any) -> None:
    """Objects on memcached, lists on another server."""
    settings.CACHES = {"default": memcached.django(), "lists": local()}
    settings.SHARDED_ORM = {
        **settings.SHARDED_ORM,
        "CACHE": {"OBJECTS": "default", "LISTS": "lists", **PATIENT},
    }


def objects() -> CacheServer:
    return cache().objects(SHARD[ONE])


def lists() -> CacheServer:
    return cache().lists(SHARD[ONE])


def round_trips(run: Callable[[], Any], server: CacheServer | None = None) -> int:
    server = server or objects()
    before = server.round_trips
    run()
    return server.round_trips - before


def counted() -> dict[str, int]:
    found = cache()
    return found.statistics.counted(found.type_name(NAME))


def forget_memory() -> None:
    """Empty the memory of this process, as if it had just started."""
    assert cached_queryset._reader is not None
    cached_queryset._reader.memory._lists.clear()
    cached_queryset._reader.memory._revisions.clear()
    cached_queryset._reader.memory._rows.clear()


def rows() -> list[CachedPhoto]:
    return list(CachedPhoto.objects.filter(user_id=ONE, stars__lt=4).order_by("stars"))


def warm(*reads: Callable[[], Any]) -> None:
    for read in reads:
        for _ in range(3):
            read()
        assert queries(read) == 0


class TestRoundTrips:
    def test_object(self, store, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        CachedPhoto.objects.get(user_id=ONE, pk=photos[1].pk)  # loads the scripts into Redis
        # The read, the fill, and a lease if reading gives none.
        assert round_trips(get) == (3 if store == "redis" else 2)
        assert round_trips(get) == 1
        assert queries(get) == 0

    def test_list(self, store, photos):
        warm(rows)
        assert round_trips(rows) == 1
        forget_memory()
        assert round_trips(rows) == 3
        assert round_trips(rows) == 1
        # Only the revision is remembered, by another list of the same scope.
        forget_memory()
        CachedPhoto.objects.filter(user_id=ONE).count()
        assert round_trips(rows) == 2

    def test_rows_of_a_list(self, store, photos, monkeypatch):
        """A process that knows the rows of a list reads only the guards, for some seconds."""
        warm(rows)
        reader, now = cached_queryset._reader, 0.0
        assert reader is not None
        reader.memory._rows.clear()
        monkeypatch.setattr(reader, "_monotonic", lambda: now)
        packets: list[tuple[int, int, int]] = []
        read = objects().read

        def count(names: Any, objects: Any = (), again: Any = ()) -> Any:
            packets.append((len(names), len(objects), len(again)))
            return read(names, objects, again)

        monkeypatch.setattr(objects(), "read", count)
        expected = rows()
        assert packets == [(2, 4, 2)]
        assert rows() == expected
        now = 9.0
        assert rows() == expected
        assert packets[1:] == [(2, 0, 0), (2, 0, 0)]
        now = 10.0
        assert rows() == expected
        assert rows() == expected
        assert packets[3:] == [(2, 4, 2), (2, 0, 0)]
        # After a write, the second packet reads the list and the rows that were left out.
        photos[0].title = "another"
        photos[0].save()
        packets.clear()
        assert rows()[0].title == "another"
        assert packets[:2] == [(2, 0, 0), (1, 4, 2)]

    def test_a_list_after_a_write(self, store, photos):
        """The read that fills the list again costs more; those after it cost one round trip."""
        warm(rows)
        photos[0].title = "another"
        photos[0].save()
        assert round_trips(rows) > 1
        assert [round_trips(rows) for _ in range(4)] == [1, 1, 1, 1]

    def test_rows_are_used_no_longer_than_the_ttl(self, store, photos, monkeypatch):
        """What a process knows of rows ends when TTL has passed since they were stored."""
        lives: list[float] = []
        fill = objects().fill

        def note(entries: Any, ttl: float, guards: Any) -> Any:
            lives.append(ttl)
            return fill(entries, ttl, guards)

        monkeypatch.setattr(objects(), "fill", note)
        reader, now = cached_queryset._reader, 100.0
        assert reader is not None
        read = objects().read

        def take_long(*args: Any) -> Any:
            nonlocal now
            now += 2.0
            return read(*args)

        warm(rows)
        reader.memory._rows.clear()
        monkeypatch.setattr(reader, "_monotonic", lambda: now)
        monkeypatch.setattr(objects(), "read", take_long)
        rows()
        (kept,) = reader.memory._rows.values()
        # The entries may have expired while the answer was under way.
        assert {life + kept.until - 100.0 for life in lives} == {cache().options.ttl}

    def test_rows_of_a_list_of_an_isolate_key(self, store, photos, monkeypatch):
        """They are known when the guards, which change with writes of others, were the same twice."""

        def album() -> list[CachedPhoto]:
            return list(CachedPhoto.objects.filter(user_id=ONE, album_id=photos[0].album_id))

        warm(album)
        assert cached_queryset._reader is not None
        cached_queryset._reader.memory._rows.clear()
        packets: list[int] = []
        read = objects().read

        def count(names: Any, objects: Any = (), again: Any = ()) -> Any:
            packets.append(len(objects))
            return read(names, objects, again)

        monkeypatch.setattr(objects(), "read", count)
        expected = album()
        number = len(expected)
        assert album() == expected
        assert album() == expected
        assert packets == [number, number, 0]

    def test_missing_list(self, store, photos):
        CachedPhoto.objects.get(user_id=ONE, pk=photos[4].pk)  # loads the scripts into Redis
        forget_memory()
        # Guards and list; then leases for the rows, with the guards once more if reading gives
        # none, and the fill.
        assert round_trips(rows) == (6 if store == "redis" else 4)
        assert queries(rows) == 0
        photos[0].stars = 2
        photos[0].save()
        # All rows are known but one, which is leased before the SQL.
        assert round_trips(rows) == (4 if store == "redis" else 3)
        assert queries(rows) == 0

    def test_empty_list_and_scalars(self, store, photos):
        reads: list[Callable[[], Any]] = [
            lambda: list(CachedPhoto.objects.filter(user_id=ONE, stars=77)),
            lambda: CachedPhoto.objects.filter(user_id=ONE).count(),
            lambda: CachedPhoto.objects.filter(user_id=ONE, stars=77).exists(),
        ]
        warm(*reads)
        for read in reads:
            assert round_trips(read) == 2 or round_trips(read) == 1
            assert round_trips(read) == 1

    def test_two_stores(self, two_stores, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        warm(get, rows)
        assert round_trips(get) == 1
        assert round_trips(get, lists()) == 0
        assert round_trips(rows) == 1
        assert round_trips(rows, lists()) == 2

    def test_several_at_once(self, store, photos):
        def ask() -> list[Any]:
            return [
                CachedPhoto.objects.filter(user_id=ONE, pk=photos[0].pk),
                CachedPhoto.objects.filter(user_id=ONE, stars__lt=4).order_by("stars"),
                CachedPhoto.objects.filter(user_id=ONE, stars__gt=1),
                CachedAlbum.objects.filter(user_id=ONE),
                CachedTag.objects.filter(user_id=ONE),
            ]

        def together() -> list[list[Any]]:
            querysets = ask()
            fetch_together(*querysets)
            with CaptureQueriesContext(connections[SHARD[ONE]]) as captured:
                found = [list(queryset) for queryset in querysets]
            assert not captured
            return found

        expected = [list(queryset.uncached()) for queryset in ask()]
        CachedAlbum.objects.filter(user_id=ONE).count()
        CachedTag.objects.filter(user_id=ONE).count()
        assert cached_queryset._reader is not None
        cached_queryset._reader._now.ahead += LATER  # type: ignore[attr-defined]  # the fixture's clock
        for _ in range(3):
            assert list(map(sorted_, together())) == list(map(sorted_, expected))
        assert queries(together) == 0
        assert round_trips(together) == 1
        forget_memory()
        assert round_trips(together) == 3

    def test_several_on_several_shards(self, store, photos):
        one = CachedPhoto.objects.filter(user_id=ONE)
        two = CachedPhoto.objects.filter(user_id=TWO)
        both = CachedPhoto.objects.filter(user_id__in=[ONE, TWO])
        empty = CachedPhoto.objects.none()
        fetch_together(one, two, both, empty)
        assert (len(one), len(two), len(both), len(empty)) == (5, 0, 5, 0)


def sorted_(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda row: row.pk)


class TestSeveralProcesses:
    """Another process has replaced a list that a process remembers."""

    @pytest.fixture
    def other(self, store: str, photos: Any) -> Callable[..., Any]:
        def other(run: Callable[[], Any]) -> Any:
            here = cached_queryset._reader
            assert here is not None
            cached_queryset._reader = Reader(cache(), here._now)
            try:
                return run()
            finally:
                cached_queryset._reader = here

        return other

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda rows: rows.update(stars=4), []),
            (lambda rows: rows.filter(stars=0).update(stars=4), [1, 2, 3]),
            (lambda rows: rows.filter(stars=0).update(title="new"), [0, 1, 2, 3]),
            (lambda rows: rows.filter(stars=4).update(stars=-1), [-1, 0, 1, 2, 3]),
            (lambda rows: rows.all().delete(), []),
        ],
    )
    def test_the_list_is_another_one(self, other, change, expected):
        warm(rows)
        other(lambda: change(CachedPhoto.objects.filter(user_id=ONE)))
        other(lambda: warm(rows))
        assert queries(rows) == 0
        assert [photo.stars for photo in rows()] == expected
        assert "new" not in [photo.title for photo in rows()[1:]]

    def test_it_was_empty(self, other):
        def found() -> list[Any]:
            return list(CachedPhoto.objects.filter(user_id=ONE, stars=77))

        warm(found)
        other(lambda: CachedPhoto.objects.filter(user_id=ONE, stars=1).update(stars=77))
        other(lambda: warm(found))
        assert queries(found) == 0
        assert [photo.title for photo in found()] == ["p1"]


class TestTwoStores:
    def test_writes_are_seen(self, two_stores, photos):
        warm(rows)
        photos[0].stars = 77
        photos[0].save()
        assert photos[0] not in rows()
        warm(rows)
        photos[0].stars = 0
        photos[0].save()
        assert [photo.stars for photo in rows()] == [0, 1, 2, 3]


class TestForeignEntries:
    """Entries in the cache may come from anybody."""

    def names(self) -> tuple[list[str], list[str]]:
        """Return all names of a list: those of its objects, and its own."""
        assert cached_queryset._reader is not None
        memory = cached_queryset._reader.memory
        ((guard, query), listed) = next(iter(memory._lists.items()))
        revision = memory._revisions[guard]
        type_name = cache().type_name(NAME)
        own = f"{type_name}-list-{ONE}-{query}-{revision}"
        return list(listed.names), [own]

    @pytest.mark.parametrize(
        "poison",
        [
            b"x",
            secrets.token_bytes(300),
            pickle.dumps([1, 2, 3]),
            b"o1 00000000 00 x 00000000. 1",
            b"l1 00000000 - x 00000000. 1",
            b"9" * 100_000,
            "ü".encode(),
            b"\r\nEND\r\nset a 0 0 1\r\nb\r\n",
        ],
    )
    def test_are_misses(self, store, photos, poison):
        warm(rows)
        expected = rows()
        names, own = self.names()
        for name in (*names, *own):
            objects().fill([CacheEntry(name, poison)], 60)
        before = counted()
        forget_memory()
        assert rows() == expected
        after = counted()
        assert after["broken"] + after["list_misses"] > before["broken"] + before["list_misses"]
        warm(rows)
        assert rows() == expected

    def test_an_entry_under_another_name(self, store, photos):
        warm(rows)
        names, _ = self.names()
        (values, _, _) = objects().read(names)
        assert values[1] is not None
        objects().fill([CacheEntry(names[0], values[1])], 60)
        assert [photo.stars for photo in rows()] == [0, 1, 2, 3]

    def test_broken_guards(self, store, photos):
        warm(rows)
        type_name = cache().type_name(NAME)
        objects().fill([CacheEntry(f"{type_name}-{ONE}-revision", b"nonsense")], 60)
        assert [photo.stars for photo in rows()] == [0, 1, 2, 3]
        (raw,), _, _ = objects().read([f"{type_name}-{ONE}-revision"])
        assert raw is not None
        assert guards.parse(raw).open == ()


class Down:
    """A server that does not answer."""

    name = "down"
    round_trips = 0

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise ServerDown("it is down")

        return fail


class TestServersDown:
    def test_reads_ask_the_database(self, photos):
        expected = rows()
        found = cache()
        found._objects[SHARD[ONE]] = found._lists[SHARD[ONE]] = Down()  # type: ignore[assignment]
        assert rows() == expected
        assert CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk) == photos[0]
        assert CachedPhoto.objects.filter(user_id=ONE).count() == 5
        several = [CachedPhoto.objects.filter(user_id=ONE), CachedAlbum.objects.filter(user_id=ONE)]
        fetch_together(*several)
        assert list(map(len, several)) == [5, 1]

    def test_it_fails_after_the_first_round_trip(self, photos):
        warm(rows)
        real = objects()

        class Failing:
            def __init__(self, after: int) -> None:
                self.after = after

            def __getattr__(self, name: str) -> Any:
                method = getattr(real, name)

                def call(*args: Any, **kwargs: Any) -> Any:
                    self.after -= 1
                    if self.after < 0:
                        raise ServerDown("it is down")
                    return method(*args, **kwargs)

                return call

        found = cache()
        for after in range(5):
            forget_memory()
            found._objects[SHARD[ONE]] = found._lists[SHARD[ONE]] = Failing(after)  # type: ignore[assignment]
            assert [photo.stars for photo in rows()] == [0, 1, 2, 3]


class TestWriters:
    """Writes that are in progress, or were never finished."""

    @pytest.fixture
    def marked(self, store: str, photos: Any) -> Callable[..., guards.Marker]:
        warm(rows)

        def mark(name: str, pks: frozenset[str] | None, *, wide: bool = False) -> guards.Marker:
            marker = guards.Marker(
                guards.new_token(), runtime_now(), wide, guards.Writer("elsewhere", "x", 7), pks
            )
            objects().mark([(name, guards.opening(marker))], guards.header(runtime_now()), 60)
            return marker

        return mark

    def test_an_open_marker(self, marked, photos):
        def get(number: int) -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[number].pk)

        get(0), get(1)
        type_name = cache().type_name(NAME)
        marker = marked(f"{type_name}-{ONE}-revision", frozenset({str(photos[0].pk)}))
        for _ in range(2):
            assert queries(lambda: get(0)) == 1
            assert queries(rows) == 1
        assert queries(lambda: get(1)) == 0
        objects().finish(
            [f"{type_name}-{ONE}-{photos[0].pk}"],
            [(f"{type_name}-{ONE}-revision", guards.closing(marker.token, void=False))],
        )
        warm(rows, lambda: get(0))

    def test_an_open_marker_of_the_table(self, marked, photos):
        type_name = cache().type_name(NAME)
        marked(f"{type_name}-@{SHARD[ONE]}-revision", None, wide=True)
        for _ in range(2):
            assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[1].pk)) == 1
            assert queries(rows) == 1

    def test_isolated_lists_go_on(self, marked, photos):
        def isolated() -> Any:
            return list(CachedPhoto.objects.filter(user_id=ONE, album_id=photos[0].album_id))

        warm(isolated)
        type_name = cache().type_name(NAME)
        marked(f"{type_name}-{ONE}-revision", frozenset({str(photos[4].pk)}))
        assert queries(isolated) == 0
        marked(f"{type_name}-{ONE}-revision", frozenset({str(photos[0].pk)}))
        assert queries(isolated) == 1

    def test_one_that_is_dead_is_repaired(self, marked, photos):
        type_name = cache().type_name(NAME)
        marked(f"{type_name}-{ONE}-revision", frozenset({str(photos[0].pk)}))
        assert queries(rows) == 1
        assert cached_queryset._reader is not None
        cached_queryset._reader._now.ahead += LATER  # type: ignore[attr-defined]  # the fixture's clock
        repairer = cached_queryset._reader.repairer
        repairer._monotonic = lambda: 10.0**9
        rows()
        assert counted()["repairs"] >= 1
        warm(rows)


class TestUnusedLeases:
    """A read that stores nothing does not keep later reads from storing, on any store."""

    def during_query(self, action: Callable[[], Any], read: Callable[[], Any]) -> Any:
        """Read, with ``action`` just before the database is queried."""
        actions = [action]

        def act(execute: Any, *args: Any) -> Any:
            if actions:
                actions.pop()()
            return execute(*args)

        with connections[SHARD[ONE]].execute_wrapper(act):
            result = read()
        assert not actions
        return result

    def test_a_write_came_between(self, store, photos):
        warm(rows)
        CachedPhoto.objects.create(user_id=ONE, title="p5", stars=2)
        others = CachedPhoto.objects.filter(user_id=ONE, stars=4)
        self.during_query(lambda: others.update(title="new"), rows)
        rows()
        rows()  # a store without read leases stores the objects of a list that is new to it only now
        assert queries(rows) == 0
        assert len(rows()) == 5

    def test_the_row_did_not_exist(self, store, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=7_777_777)

        with pytest.raises(CachedPhoto.DoesNotExist):
            get()
        CachedPhoto.objects.create(user_id=ONE, photo_id=7_777_777, title="late")
        assert get().title == "late"
        assert queries(get) == 0

    def test_the_rows_of_a_batch_did_not_exist(self, store, clock, placed):
        def board() -> Any:
            return CachedBoard.objects.in_bulk([pk]).get(pk)

        pk = CachedBoard.objects.create(name="first").pk
        alias = runtime.locate("pins", pk).alias
        CachedBoard.objects.filter(pk=pk).delete()
        assert board() is None  # makes the guards
        clock.ahead += LATER
        assert board() is None
        CachedBoard.objects.create(id=pk, name="late")
        assert board().name == "late"
        assert queries(board, alias) == 0

    def test_the_query_failed(self, store, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        def fail() -> None:
            raise OperationalError("the query failed")

        with pytest.raises(OperationalError, match="the query failed"):
            self.during_query(fail, get)
        get()
        assert queries(get) == 0

    def test_the_query_of_another_queryset_failed(self, store, photos):
        def get(photo: Any) -> Any:
            return CachedPhoto.objects.filter(user_id=ONE, pk=photo.pk)

        def fail() -> None:
            raise OperationalError("the query failed")

        first, second = photos[:2]
        with pytest.raises(OperationalError, match="the query failed"):
            self.during_query(fail, lambda: fetch_together(get(first), get(second)))
        assert list(get(second)) == [second]
        assert queries(lambda: list(get(second))) == 0

    def test_a_write_to_the_table_was_under_way(self, store, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        name = f"{cache().type_name(NAME)}-@{SHARD[ONE]}-revision"
        writer = guards.Writer("elsewhere", "x", 7)
        marker = guards.Marker(guards.new_token(), runtime_now(), False, writer, frozenset())
        objects().mark([(name, guards.opening(marker))], guards.header(runtime_now()), 60)
        assert queries(get) == 1
        objects().finish([], [(name, guards.closing(marker.token, void=False))])
        get()
        assert queries(get) == 0

    def test_the_list_had_been_another_one(self, store, photos):
        """The read looks for the objects of the list that it remembers, and then for those of the new one."""
        warm(rows)
        reader = cached_queryset._reader
        assert reader is not None
        cached_queryset._reader = Reader(cache(), reader._now)  # stands for another process
        CachedPhoto.objects.filter(user_id=ONE, stars=3).delete()
        warm(rows)
        objects().finish([f"{cache().type_name(NAME)}-{ONE}-{photos[0].pk}"], [])
        cached_queryset._reader = reader
        assert queries(rows) == 1
        assert queries(rows) == 0


def test_what_is_too_large(store, clock: Clock, placed):
    note = CachedNote.objects.create(slug="s", account="a", folder="f", text="x" * 1_100_000)
    alias = str(note._state.db)

    def get() -> Any:
        return CachedNote.objects.get(account="a", slug="s")

    CachedNote.objects.filter(account="a", slug="").first()
    clock.ahead += LATER
    for _ in range(2):
        assert queries(get, alias) == 1
        assert get().text == note.text
    found = cache()
    # Each of these reads had a lease, because the read before it has given its own back.
    assert found.statistics.counted(found.type_name("cached.CachedNote"))["too_large"] == 4
    CachedNote.objects.filter(account="a").update(text="small")
    get()
    assert queries(get, alias) == 0


def test_a_list_of_very_many_rows(store, photos, monkeypatch):
    monkeypatch.setattr(filler, "MAX_ROWS", 3)
    for _ in range(4):
        assert queries(rows) == 1


def runtime_now() -> float:
    assert cached_queryset._reader is not None
    return cached_queryset._reader._now()


def test_quarantine(store, clock: Clock, placed):
    assert runtime.cache() is not None
    photo = CachedPhoto.objects.create(user_id=ONE, title="p")
    for _ in range(3):
        assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=photo.pk)) == 1
        assert queries(lambda: list(CachedPhoto.objects.filter(user_id=ONE))) == 1
    assert counted()["fills"] == 0
