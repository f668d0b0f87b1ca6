"""The clock of timestamped ids: it gives no id twice, whatever the time does."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from time import time as unix_time

import pytest

from sharded_orm.exceptions import InvalidID, TimestampExhausted
from sharded_orm.ids.layout import EPOCH, TimestampedID, TimestampedLayout
from sharded_orm.ids.timestamps import TimestampClock, clock_of
from tests.patience import PATIENCE

LAYOUT = TimestampedLayout()
START = LAYOUT.epoch_milliseconds + 1_000_000


class Time:
    """A clock that is set by hand, and otherwise advances by waiting only."""

    def __init__(self, now: int = START) -> None:
        self.now = now
        self.waits = 0
        self.on_wait: Callable[[], None] = lambda: None

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        assert 0 < seconds <= 0.001
        self.waits += 1
        if self.waits % 2 == 0:
            self.now += 1
        self.on_wait()


def make(time: Time, first: int = 0, layout: TimestampedLayout = LAYOUT) -> TimestampClock:
    return TimestampClock(layout, clock=time, wait=time.wait, draw=lambda size: first)


def parts(ids: list[int]) -> list[TimestampedID]:
    return [TimestampedID.from_int(value) for value in ids]


def test_an_id_says_when_and_where() -> None:
    (made,) = parts(make(Time(), first=41).take(7, "photos"))
    assert made.time == EPOCH + timedelta(milliseconds=1_000_000)
    assert (made.shard, made.sequence) == (7, 42)


def test_the_default_clock_is_the_time() -> None:
    (value,) = clock_of(LAYOUT).take(0, "now")
    age = TimestampClock(LAYOUT).layout.unpack(value).time
    assert abs(age.timestamp() - unix_time()) < 60
    assert clock_of(TimestampedLayout()) is clock_of(LAYOUT)


def test_1024_ids_of_a_millisecond_then_it_waits() -> None:
    time = Time()
    clock = make(time)
    ids = clock.take(0, "a", 1024)
    assert time.waits == 0
    ids += clock.take(0, "a", 1025)
    assert time.waits == 4
    assert len(set(ids)) == 2049
    assert Counter(p.milliseconds for p in parts(ids)) == {
        1_000_000: 1024,
        1_000_001: 1024,
        1_000_002: 1,
    }


def test_each_shard_and_table_has_its_own_ids() -> None:
    time = Time()
    clock = make(time)
    for shard, table in ((0, "a"), (0, "b"), (1, "a")):
        assert len(set(clock.take(shard, table, 1024))) == 1024
    assert time.waits == 0


@pytest.mark.parametrize(("back", "waits"), [(1, 6), (1000, 2004), (1001, 0), (999_999, 0)])
def test_a_clock_that_steps_back(back: int, waits: int) -> None:
    time = Time()
    clock = make(time)
    ids = clock.take(0, "a", 1000)
    time.now -= back
    # Continues from the last millisecond: waits for a second, not for hours.
    ids += clock.take(0, "a", 24)
    assert time.waits == 0
    ids += clock.take(0, "a", 2976)
    assert time.waits == pytest.approx(waits, abs=2)
    assert len(set(ids)) == 4000
    assert max(Counter(p.milliseconds for p in parts(ids)).values()) == 1024
    times = [p.milliseconds for p in parts(ids)]
    assert times == sorted(times)
    time.now = START + 1100
    assert parts(clock.take(0, "a"))[0].milliseconds == 1_001_100


def test_a_clock_that_steps_back_while_waiting() -> None:
    time = Time()
    clock = make(time)
    ids = clock.take(0, "a", 1024)

    def step_back() -> None:
        time.now = START - 5000

    time.on_wait = step_back
    ids += clock.take(0, "a", 10)
    assert len(set(ids)) == 1034
    assert parts(ids)[-1].milliseconds == 1_000_001


def test_threads_never_share_an_id() -> None:
    time = Time()
    clock = make(time)
    ids: list[int] = []
    barrier = threading.Barrier(8)

    def draw() -> None:
        barrier.wait()
        for _ in range(50):
            ids.extend(clock.take(0, "a", 7))

    threads = [threading.Thread(target=draw) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(ids) == len(set(ids)) == 8 * 50 * 7


def test_an_id_is_made_under_the_lock() -> None:
    # Threads switch too seldom to be relied on for this.
    held: list[bool] = []

    def tell() -> int:
        held.append(clock._lanes[0, "a"].lock.locked())
        return START

    clock = TimestampClock(LAYOUT, clock=tell)
    clock.take(0, "a", 3)
    assert held == [True] * 3


def test_who_waits_for_the_clock_keeps_nobody_from_another_table() -> None:
    time = Time()
    clock = make(time)
    clock.take(0, "a", 1024)
    others: list[int] = []

    def meanwhile() -> None:
        for lane in ((0, "b"), (1, "a")):
            thread = threading.Thread(target=lambda lane=lane: others.extend(clock.take(*lane)))
            thread.start()
            thread.join(PATIENCE)

    time.on_wait = meanwhile
    clock.take(0, "a")
    assert len(others) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_child_repeats_none_of_its_parents_ids() -> None:
    time = Time()
    # Always the same draw: the worst case for parent and child.
    clock = make(time)
    before = clock.take(0, "a", 600)
    out, into = os.pipe()
    with clock._lock, clock._lanes[0, "a"].lock:
        # As if another thread of the parent were generating an id at this very moment.
        pid = os.fork()
        if not pid:
            ids = clock.take(0, "a", 600)
            os.write(into, " ".join(map(str, ids)).encode())
            os._exit(0)
    os.close(into)
    with open(out) as pipe:
        of_child = [int(value) for value in pipe.read().split()]
    assert os.waitpid(pid, 0)[1] == 0
    assert len(of_child) == 600
    after = clock.take(0, "a", 400)
    assert len(set(before) | set(after)) == 1000
    assert set(of_child).isdisjoint(before + after)


def test_the_end_and_the_beginning_of_time() -> None:
    time = Time(LAYOUT.epoch_milliseconds + LAYOUT.last_millisecond)
    clock = make(time)
    assert clock.take(2**13 - 1, "a")
    time.now += 1
    with pytest.raises(TimestampExhausted):
        clock.take(0, "a")
    time.now = LAYOUT.epoch_milliseconds - 5
    with pytest.raises(InvalidID, match="5 ms before the epoch 2025-01-01"):
        clock.take(0, "b")
    with pytest.raises(InvalidID, match="shard=8192"):
        make(Time()).take(8192, "a")


def test_processes_begin_at_different_numbers() -> None:
    first = {parts(TimestampClock(LAYOUT).take(0, "a"))[0].sequence for _ in range(20)}
    assert len(first) > 10


def test_a_moment_without_a_time_zone() -> None:
    with pytest.raises(InvalidID, match="time zone"):
        TimestampedID.at(EPOCH.replace(tzinfo=None), 0, 0)
