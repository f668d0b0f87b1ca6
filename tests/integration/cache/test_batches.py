"""Batches of rows by their ids: of rows that a process knows, only the guards are read, for some seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings as site_settings
from django.db import connections
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.cache import repair
from sharded_orm.cache.batch_reader import BatchReader
from sharded_orm.cache.filler import Filler
from sharded_orm.cache.reader import Reader
from sharded_orm.models.cached import queryset as cached_queryset
from sharded_orm.models.cached.lookup_plan import plan_of
from tests.cached.models import CachedBoard, CachedProfile
from tests.integration.cache.test_reads import objects, queries, round_trips, store
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, TWO, Clock, cache, clock

__all__ = ["clock", "store"]

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

#: Numbers of guards and of entries in each packet.
Packets = list[tuple[int, int]]


@pytest.fixture
def boards(clock: Clock, placed: None) -> list[int]:
    """The ids of three boards on two shards. The quarantine of their guards is over."""
    shards = ("pins_00000", "pins_00000", "pins_00001")
    ids = [
        CachedBoard.objects.using(shard).create(name=f"b{number}").pk
        for number, shard in enumerate(shards)
    ]
    CachedBoard.objects.in_bulk([pk + 100 for pk in ids])  # makes the guards of the tables
    clock.ahead += LATER
    return ids


@pytest.fixture
def packets(boards: list[int], monkeypatch: pytest.MonkeyPatch) -> Packets:
    sent: Packets = []
    server = objects()
    read = server.read

    def count(names: Any, objects: Any = (), again: Any = ()) -> Any:
        sent.append((len(names), len(objects)))
        return read(names, objects, again)

    monkeypatch.setattr(server, "read", count)
    return sent


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch, boards: list[int]) -> Callable[[float], None]:
    """A function that lets time pass for what the process knows."""
    now = 100.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(reader()._batches, "_monotonic", lambda: now)
    return advance


def reader() -> Reader:
    found = cached_queryset.current_reader()
    assert found is not None
    return found


def names_of(boards: list[int]) -> list[str]:
    rows = CachedBoard.objects.in_bulk(boards)
    return [rows[pk].name for pk in boards if pk in rows]


def known(boards: list[int]) -> None:
    """Read the boards until the process knows them."""
    for _ in range(4):
        names_of(boards)


def test_only_guards_are_read(store, boards, packets: Packets, later) -> None:
    """Three rows have a guard each, and two tables have one."""
    known(boards)
    packets.clear()
    assert names_of(boards) == ["b0", "b1", "b2"]
    later(9)
    assert names_of(boards) == ["b0", "b1", "b2"]
    assert packets == [(5, 0), (5, 0)]
    later(1)
    assert names_of(boards) == ["b0", "b1", "b2"]
    assert names_of(boards) == ["b0", "b1", "b2"]
    assert packets[2:] == [(5, 3), (5, 0)]


def test_a_row_is_known_when_it_was_valid_twice(store, boards, packets: Packets, later) -> None:
    names_of(boards)  # stores the entries
    packets.clear()
    for _ in range(3):
        assert names_of(boards) == ["b0", "b1", "b2"]
    assert [entries for _, entries in packets] == [3, 3, 0]


def test_a_write(store, boards, packets: Packets) -> None:
    """The second packet asks for the row that was written, with its guards."""
    known(boards)
    CachedBoard.objects.filter(pk=boards[1]).update(name="new")
    packets.clear()
    assert names_of(boards) == ["b0", "new", "b2"]
    assert packets[:2] == [(5, 0), (2, 1)]
    packets.clear()
    # The row is not asked for by its guards alone until it was the same twice again.
    for _ in range(3):
        assert names_of(boards) == ["b0", "new", "b2"]
    assert packets == [(5, 1), (5, 1), (5, 0)]
    assert all(
        queries(lambda: names_of(boards), alias) == 0
        for alias in ("pins", "pins_00000", "pins_00001")
    )


def test_a_write_to_the_whole_table(store, boards, packets: Packets) -> None:
    known(boards)
    CachedBoard.objects.using("pins_00000").update(name="all")
    packets.clear()
    assert names_of(boards) == ["all", "all", "b2"]
    assert packets[:2] == [(5, 0), (3, 2)]


def test_a_row_by_two_forms_of_its_id(store, boards) -> None:
    """The second command for the entry does not get the permission to store it. The first one has it."""
    CachedBoard.objects.in_bulk([boards[0], str(boards[0])])
    assert queries(lambda: names_of(boards[:1]), "pins_00000") == 0


def test_rows_that_the_cache_lacks_cost_few_round_trips(store, boards) -> None:
    """One reads the rows and their guards, and one stores the rows. On Redis, one takes the leases."""
    assert round_trips(lambda: names_of(boards)) == (3 if store == "redis" else 2)
    assert all(
        queries(lambda: names_of(boards), alias) == 0 for alias in ("pins_00000", "pins_00001")
    )


def test_a_batch_looks_up_its_shards_in_one_query(store, placed: None) -> None:
    """The shards of these keys are in the directory. A process that has just started knows none."""
    keys = [ONE, NEAR, TWO]
    for key in keys:
        CachedProfile.objects.create(user_id=key, motto=f"motto of {key}")
    runtime.strategy("photos").forget()
    found: dict[int, CachedProfile] = {}
    assert queries(lambda: found.update(CachedProfile.objects.in_bulk(keys)), "directory") == 1
    assert {key: found[key].motto for key in keys} == {key: f"motto of {key}" for key in keys}
    assert queries(lambda: CachedProfile.objects.in_bulk(keys), "directory") == 0
    # No process remembers that a key has no shard. Both reads of these keys look them up once: the
    # cache's, and that of the database for the keys that no entry of the cache can have.
    nobody = range(10**9, 10**9 + 10)
    read = lambda: CachedProfile.objects.in_bulk([*keys, *nobody])  # noqa: E731
    assert queries(lambda: found.update(read()), "directory") == 2
    assert found.keys() == set(keys)


def test_an_interrupted_batch_gives_its_leases_back(
    store, boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody could store these rows for some seconds."""
    lease = Filler.lease

    def interrupt(*args: Any) -> None:
        lease(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Filler, "lease", interrupt)
        names_of(boards)
    names_of(boards)  # stores the rows
    assert all(
        queries(lambda: names_of(boards), alias) == 0 for alias in ("pins_00000", "pins_00001")
    )


def test_missing_guards_cost_a_round_trip(store, boards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards of all rows and tables on a server are made together."""
    names_of(boards)
    plan, server = plan_of(CachedBoard), objects()
    assert plan is not None
    addresses = plan._addresses[1]
    guards = sorted({name for pk in boards for name in addresses[pk].scope.guards})
    assert len(guards) == 5
    server.finish(guards, [])
    assert not any(server.read(guards)[0])
    assert round_trips(lambda: names_of(boards)) == 2
    assert all(server.read(guards)[0])
    # There may be too many for one packet.
    monkeypatch.setattr(repair, "_MOST_ADDED", 2)
    server.finish(guards, [])
    assert round_trips(lambda: names_of(boards)) == 4
    assert all(server.read(guards)[0])


def test_a_deleted_row(store, boards) -> None:
    known(boards)
    CachedBoard.objects.filter(pk=boards[0]).delete()
    assert names_of(boards) == ["b1", "b2"]


def test_rows_that_were_written_by_sql(store, boards) -> None:
    known(boards)
    with connections["pins_00001"].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedboard SET name = 'sql'")
    assert names_of(boards) == ["b0", "b1", "b2"]
    CachedBoard.cache.invalidate(id=boards[2])
    assert names_of(boards) == ["b0", "b1", "sql"]


def test_the_guards_are_lost(store, boards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a guard nobody knows whether the row was written."""
    known(boards)
    with connections["pins_00001"].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedboard SET name = 'sql'")
    read = objects().read

    def lost(names: Any, objects: Any = (), again: Any = ()) -> Any:
        raws, entries, after = read(names, objects, again)
        return [None] * len(raws), entries, after

    with monkeypatch.context() as patch:
        patch.setattr(objects(), "read", lost)
        assert names_of(boards) == ["b0", "b1", "sql"]


def test_rows_are_used_no_longer_than_the_ttl(
    store, boards, later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process knows of rows ends when TTL has passed since they were stored."""
    lives: list[float] = []
    server = objects()
    fill, read = server.fill, server.read

    def note(entries: Any, ttl: float, guards: Any = ()) -> Any:
        lives.append(ttl)
        return fill(entries, ttl, guards)

    def take_long(*args: Any) -> Any:
        later(2)
        return read(*args)

    monkeypatch.setattr(server, "fill", note)
    names_of(boards)
    names_of(boards)
    monkeypatch.setattr(server, "read", take_long)
    names_of(boards)
    # The entries may have expired while the answer was under way.
    plan = plan_of(CachedBoard)
    assert plan is not None
    untils = {row.until for decoded in plan._decoded.values() for row in decoded.known.values()}
    assert {life + until - 100.0 for life in lives for until in untils} == {cache().options.ttl}


def test_no_rows_are_known_with_a_short_ttl(store, boards, packets: Packets) -> None:
    short = {"TIMEOUT": 3.5, "COMMIT_WITHIN": 4.0, "QUARANTINE": 9.0, "TTL": 9}
    config = {**site_settings.SHARDED_ORM["CACHE"], **short}
    with override_settings(SHARDED_ORM={**site_settings.SHARDED_ORM, "CACHE": config}):
        server = objects()
        sent: Packets = []
        read = server.read

        def count(names: Any, objects: Any = (), again: Any = ()) -> Any:
            sent.append((len(names), len(objects)))
            return read(names, objects, again)

        server.read = count  # type: ignore[method-assign]
        known(boards)
        sent.clear()
        assert names_of(boards) == ["b0", "b1", "b2"]
        assert [entries for _, entries in sent] == [3]


def test_without_the_comparison_rows_are_stale(
    store, boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that these tests would notice it."""
    known(boards)
    monkeypatch.setattr(BatchReader, "_have_same_guards", staticmethod(lambda *ignored: True))
    CachedBoard.objects.filter(pk=boards[1]).update(name="new")
    assert names_of(boards) == ["b0", "b1", "b2"]
