"""Counting, in one process and over several."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sharded_orm.cache.statistics import FIELDS, CacheStatistics, counter, counting
from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.cache.stores.local import LocalServer
from sharded_orm.signals import cache_counted
from tests.clock import Clock

PHOTO, ALBUM = "test:photos.Photo", "test:photos.Album"


class Store(LocalServer):
    """A local server that can be down."""

    is_down = False

    def count(self, deltas: Mapping[str, int]) -> None:
        if self.is_down:
            raise ServerDown(f"{self.name}: away")
        super().count(deltas)


@pytest.fixture
def store() -> Store:
    return Store("statistics")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def statistics(store: Store, clock: Clock) -> CacheStatistics:
    return CacheStatistics("test:", lambda place: store, clock)


@pytest.fixture
def heard() -> Iterator[list[Any]]:
    counts: list[Any] = []

    def hear(counts: Any, heard: list[Any] = counts, **kwargs: Any) -> None:
        heard.append(counts)

    cache_counted.connect(hear)
    yield counts
    cache_counted.disconnect(hear)


def shown(counts: Mapping[str, int]) -> dict[str, int]:
    assert counts.keys() == FIELDS.keys()
    return {field: count for field, count in counts.items() if count}


def test_counts_of_a_process(statistics: CacheStatistics) -> None:
    statistics.add(PHOTO, object_hits=1)
    statistics.add(PHOTO, object_hits=2, object_misses=1)
    statistics.add(ALBUM, fills=1)
    assert shown(statistics.counted(PHOTO)) == {"object_hits": 3, "object_misses": 1}
    statistics.flush()
    statistics.add(PHOTO, object_hits=1)
    assert shown(statistics.counted(PHOTO)) == {"object_hits": 4, "object_misses": 1}


def test_counts_of_several_processes_add_up(statistics: CacheStatistics, store: Store) -> None:
    another = CacheStatistics("test:", lambda place: store)
    statistics.add(PHOTO, object_hits=1)
    another.add(PHOTO, object_hits=5, fills=1)
    assert shown(statistics.overall(PHOTO)) == {}
    statistics.flush()
    another.flush()
    statistics.flush()  # nothing is sent twice
    assert shown(statistics.overall(PHOTO)) == {"object_hits": 6, "fills": 1}
    statistics.reset([PHOTO])
    assert shown(another.overall(PHOTO)) == {}
    # The counts of this process are its own.
    assert shown(another.counted(PHOTO)) == {"object_hits": 5, "fills": 1}


def test_sent_now_and_then_without_being_asked(
    statistics: CacheStatistics, store: Store, clock: Clock
) -> None:
    statistics.add(PHOTO, fills=1)
    clock.now += 9.9
    statistics.add(PHOTO, fills=1)
    assert store.round_trips == 0
    clock.now += 0.2
    statistics.add(PHOTO, fills=1)
    assert store.round_trips == 1
    statistics.interval = None
    clock.now += 1000
    statistics.add(PHOTO, fills=1)
    assert store.round_trips == 1


def test_the_end_of_a_request_sends_once_a_second(
    statistics: CacheStatistics, store: Store, clock: Clock
) -> None:
    statistics.add(PHOTO, fills=1)
    statistics.request_finished()
    assert store.round_trips == 0
    clock.now += 1
    statistics.request_finished()
    assert store.round_trips == 1
    clock.now += 1
    statistics.request_finished()  # there is nothing new
    assert store.round_trips == 1


def test_a_server_that_is_down_gets_the_counts_later(
    statistics: CacheStatistics, store: Store, heard: list[Any]
) -> None:
    store.is_down = True
    statistics.add(PHOTO, fills=1)
    statistics.flush()
    statistics.add(PHOTO, fills=1)
    statistics.flush()
    store.is_down = False
    statistics.flush()
    assert shown(statistics.overall(PHOTO)) == {"fills": 2}
    assert shown(statistics.counted(PHOTO)) == {"fills": 2}
    assert heard == [{"photos.Photo": {"fills": 1}}] * 2


def test_the_signal_names_models_without_the_prefix(
    statistics: CacheStatistics, heard: list[Any]
) -> None:
    statistics.add(PHOTO, list_hits=2)
    statistics.add(ALBUM, bypasses=1)
    statistics.flush()
    statistics.flush()
    assert heard == [{"photos.Photo": {"list_hits": 2}, "photos.Album": {"bypasses": 1}}]


def test_a_receiver_that_raises_breaks_nothing(statistics: CacheStatistics, store: Store) -> None:
    def fail(**kwargs: Any) -> None:
        raise RuntimeError("broken receiver")

    cache_counted.connect(fail)
    try:
        statistics.add(PHOTO, fills=1)
        statistics.flush()
    finally:
        cache_counted.disconnect(fail)
    assert shown(statistics.overall(PHOTO)) == {"fills": 1}


def test_threads_lose_nothing(statistics: CacheStatistics) -> None:
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for number in range(2000):
            statistics.add(PHOTO, object_hits=1, object_misses=number % 2)
            if number % 500 == 0:
                statistics.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statistics.flush()
    expected = {"object_hits": 8000, "object_misses": 4000}
    assert shown(statistics.counted(PHOTO)) == expected
    assert shown(statistics.overall(PHOTO)) == expected


def test_a_forked_child_does_not_send_what_its_parent_counted(statistics: CacheStatistics) -> None:
    statistics.add(PHOTO, fills=1)
    with statistics._lock:  # as if another thread was counting
        pid = os.fork()
        if pid == 0:
            statistics.add(ALBUM, fills=1)
            good = not any(statistics.counted(PHOTO).values())
            os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert shown(statistics.counted(PHOTO)) == {"fills": 1}


def test_the_name_of_a_counter_is_no_name_of_an_object() -> None:
    assert counter(PHOTO, "fills") == "test:photos.Photo-@count-fills"


def test_what_a_block_does_is_counted_apart(statistics: CacheStatistics) -> None:
    statistics.add(PHOTO, object_hits=1)
    with counting() as outer:
        statistics.add(PHOTO, object_hits=2, fills=1)
        with counting() as inner:
            statistics.add(PHOTO, object_hits=4)
            # Another thread is another request.
            other = threading.Thread(target=statistics.add, args=(PHOTO,), kwargs={"fills": 8})
            other.start()
            other.join()
        # Counts that have been sent are kept here.
        statistics.flush()
        statistics.add(ALBUM, list_misses=1)
    statistics.add(PHOTO, object_hits=8)
    assert inner == {"photos.Photo": {"object_hits": 4}}
    assert outer == {
        "photos.Photo": {"object_hits": 6, "fills": 1},
        "photos.Album": {"list_misses": 1},
    }
    assert shown(statistics.counted(PHOTO)) == {"object_hits": 15, "fills": 9}
