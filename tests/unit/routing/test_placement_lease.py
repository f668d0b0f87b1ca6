"""The lease under which placements are remembered, at the worst moments."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.routing import placement_lease
from sharded_orm.routing.base import make_strategy
from sharded_orm.routing.directory import DirectoryStrategy, StoredPlacement
from sharded_orm.routing.placement_lease import KeyInFlight, MoveList, PlacementLease
from sharded_orm.routing.placement_uses import PlacementUses, recorded_uses
from sharded_orm.topology.model import ShardGroup, ShardRange
from tests.patience import PATIENCE

LEASE = 8.0


class Clock:
    """The clock of the lease, which a test turns."""

    time = 1000.0

    def __call__(self) -> float:
        return self.time


class Directory:
    """A directory in memory, with moves. ``answering`` is called between reading and answering."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self.in_flight: set[str] = set()
        self.is_in_test_case = self.is_down = False
        self.looks = self.polls = 0
        self.answering: Callable[[], None] = lambda: None
        self.polling: Callable[[], None] = lambda: None

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        self.looks += 1
        rows = {
            key: StoredPlacement(self.rows[key][0], True, self.rows[key][1])
            for key in keys
            if key in self.rows
        }
        self.answering()
        return rows

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        raise AssertionError("no key is new")

    def moves(self, since: int | None = None) -> MoveList | None:
        if self.is_down:
            raise OperationalError("the directory is down")
        if self.is_in_test_case:
            return None
        self.polls += 1
        answer = MoveList(
            tuple(KeyInFlight("g", key, key, 1, 0, 1, "copying") for key in self.in_flight), 0
        )
        self.polling()
        return answer

    def move(self, key: str, shard: int) -> None:
        self.rows[key] = (shard, self.rows[key][1] + 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(placement_lease, "now", clock)
    return clock


@pytest.fixture
def directory(clock: Clock) -> Directory:
    directory = Directory()
    directory.rows["7"] = (3, 0)
    return directory


def process(directory: Directory, **options: Any) -> DirectoryStrategy:
    """Return a strategy as a process of its own would have it."""
    group = ShardGroup("g", (ShardRange(0, 15, "a"),), "directory", options)
    strategy = make_strategy(group)
    assert isinstance(strategy, DirectoryStrategy)
    strategy.store, strategy.lease = directory, PlacementLease(directory, LEASE)
    return strategy


def test_a_remembered_key_costs_a_poll_per_half_lease(directory: Directory, clock: Clock) -> None:
    strategy = process(directory)
    for _ in range(80):
        assert strategy.locate(7) == 3
        clock.time += LEASE / 16
    assert (directory.looks, directory.polls) == (1, 10)


def test_a_key_in_flight_is_looked_up_each_time(directory: Directory, clock: Clock) -> None:
    strategy = process(directory)
    strategy.locate(7)
    directory.in_flight.add("7")
    strategy.lease.renew()
    looks = directory.looks
    assert [strategy.locate(7), strategy.locate_many([7])] == [3, {7: 3}]
    assert directory.looks == looks + 2
    directory.move("7", 5)
    assert strategy.locate(7) == 5
    directory.in_flight.clear()
    strategy.lease.renew()
    looks = directory.looks
    assert [strategy.locate(7), strategy.locate(7)] == [5, 5]
    assert directory.looks == looks + 1


def test_a_look_up_that_began_before_the_announcement_is_not_remembered_late(
    directory: Directory,
) -> None:
    strategy = process(directory)
    has_read, may_answer = threading.Event(), threading.Event()

    def late() -> None:
        directory.answering = lambda: None
        has_read.set()
        assert may_answer.wait(PATIENCE)

    directory.answering = late
    thread = threading.Thread(target=strategy.locate, args=[7])
    thread.start()
    assert has_read.wait(PATIENCE)
    # The thread has the old shard in its hands. Meanwhile the key moves, and other threads poll.
    directory.in_flight.add("7")
    strategy.lease.renew()
    directory.move("7", 5)
    directory.in_flight.clear()
    strategy.lease.renew()
    may_answer.set()
    thread.join(PATIENCE)
    assert strategy.locate(7) == 5


def test_a_paused_process_forgets_everything(directory: Directory, clock: Clock) -> None:
    strategy = process(directory)
    assert strategy.locate(7) == 3
    # A whole move passes while the process is paused.
    clock.time += LEASE * 10
    directory.move("7", 5)
    assert strategy.locate(7) == 5


def test_a_poll_that_takes_too_long_forgets_what_was_remembered(
    directory: Directory, clock: Clock
) -> None:
    """A move may have begun and ended between the end of the lease and the answer."""
    strategy = process(directory)
    assert strategy.locate(7) == 3
    clock.time += LEASE * 0.75

    def slow() -> None:
        directory.polling = lambda: None
        clock.time += LEASE * 0.75
        directory.move("7", 5)

    directory.polling = slow
    assert strategy.locate(7) == 5


def test_without_the_directory_nothing_is_remembered_for_longer_than_the_lease(
    directory: Directory, clock: Clock
) -> None:
    strategy = process(directory)
    strategy.locate(7)
    directory.is_down = True
    clock.time += LEASE * 0.9
    assert strategy.locate(7) == 3
    clock.time += LEASE * 0.1
    with pytest.raises(OperationalError, match="the directory is down"):
        strategy.locate(7)
    directory.is_down = False
    assert strategy.locate(7) == 3


def test_an_answer_later_than_the_lease_allows_no_memory(
    directory: Directory, clock: Clock
) -> None:
    def slow() -> None:
        clock.time += LEASE * 2

    directory.polling = slow
    strategy = process(directory)
    assert [strategy.locate(7), strategy.locate(7)] == [3, 3]
    assert directory.looks == 2


def test_inside_a_test_case_there_is_no_lease(directory: Directory) -> None:
    directory.is_in_test_case = True
    strategy = process(directory)
    assert [strategy.locate(7), strategy.locate(7)] == [3, 3]
    assert (directory.looks, directory.polls) == (2, 0)


def test_one_thread_polls_while_the_others_go_on(directory: Directory, clock: Clock) -> None:
    strategy = process(directory)
    strategy.locate(7)
    clock.time += LEASE * 0.6
    has_asked, may_answer = threading.Event(), threading.Event()

    def wait() -> None:
        has_asked.set()
        assert may_answer.wait(PATIENCE)

    directory.polling = wait
    thread = threading.Thread(target=strategy.locate, args=[7])
    thread.start()
    assert has_asked.wait(PATIENCE)
    assert strategy.locate(7) == 3
    may_answer.set()
    thread.join(PATIENCE)
    assert (directory.looks, directory.polls) == (1, 2)


def test_a_child_forked_during_a_poll_can_poll(directory: Directory, clock: Clock) -> None:
    strategy = process(directory)
    has_asked, may_answer = threading.Event(), threading.Event()

    def wait() -> None:
        has_asked.set()
        assert may_answer.wait(PATIENCE)

    directory.polling = wait
    thread = threading.Thread(target=strategy.locate, args=[7])
    thread.start()
    assert has_asked.wait(PATIENCE)
    directory.polling = lambda: None
    if not (child := os.fork()):
        os._exit(0 if strategy.locate(7) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_answer.set()
    thread.join(PATIENCE)


class TestUses:
    """What an operation asks after its statements."""

    def test_no_query_while_the_lease_covers_the_key(self, directory: Directory) -> None:
        strategy = process(directory)
        with recorded_uses(PlacementUses()) as uses:
            strategy.locate(7)
        assert uses.hold()
        assert (directory.looks, directory.polls) == (1, 1)

    def test_a_key_in_flight_is_asked_for_again(self, directory: Directory) -> None:
        directory.in_flight.add("7")
        strategy = process(directory)
        with recorded_uses(PlacementUses()) as uses:
            strategy.locate(7)
        assert uses.hold() and directory.looks == 2
        directory.move("7", 5)
        assert not uses.hold()

    def test_a_slow_read_of_a_key_that_stayed_is_valid(
        self, directory: Directory, clock: Clock
    ) -> None:
        strategy = process(directory)
        with recorded_uses(PlacementUses()) as uses:
            strategy.locate(7)
            clock.time += LEASE * 10
        assert uses.hold() and directory.looks == 2

    def test_a_key_that_went_and_came_back_meanwhile_has_moved(
        self, directory: Directory, clock: Clock
    ) -> None:
        strategy = process(directory)
        with recorded_uses(PlacementUses()) as uses:
            strategy.locate(7)
            clock.time += LEASE * 10
            directory.move("7", 5)
            directory.move("7", 3)
        assert not uses.hold()

    def test_a_key_that_moves_between_two_look_ups_of_one_operation_has_moved(
        self, directory: Directory
    ) -> None:
        directory.in_flight.add("7")
        strategy = process(directory)
        with recorded_uses(PlacementUses()) as uses:
            strategy.locate(7)
            directory.move("7", 5)
            strategy.locate(7)
        assert not uses.hold()
