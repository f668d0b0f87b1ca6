"""When a failed server is left alone, and which caller tries it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.cache.stores.breaker import Breaker
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(2.0, clock)


def test_a_server_that_is_well_is_asked(breaker: Breaker) -> None:
    assert not breaker.is_tripped
    assert not breaker.rests
    assert breaker.admit() is False


def test_after_a_failure_nobody_asks_for_a_while(breaker: Breaker, clock: Clock) -> None:
    breaker.trip("refused")
    for clock.now in (100.0, 101.9):
        assert breaker.rests
        with pytest.raises(ServerDown, match="resting: refused"):
            breaker.admit()
    clock.now = 102.0
    assert not breaker.rests
    assert breaker.admit() is True


def test_while_one_tries_the_others_wait_for_its_success(breaker: Breaker, clock: Clock) -> None:
    breaker.trip("refused")
    clock.now = 102.0
    assert breaker.admit() is True
    with pytest.raises(ServerDown):
        breaker.admit()
    breaker.recover()
    assert breaker.admit() is False


def test_when_the_one_fails_the_rest_begins_anew(breaker: Breaker, clock: Clock) -> None:
    breaker.trip("refused")
    clock.now = 103.0
    assert breaker.admit() is True
    breaker.trip("refused again")
    clock.now = 104.9
    with pytest.raises(ServerDown, match="again"):
        breaker.admit()
    clock.now = 105.0
    assert breaker.admit() is True


def test_when_the_one_never_returns_another_one_tries(breaker: Breaker, clock: Clock) -> None:
    breaker.trip("refused")
    clock.now = 102.0
    assert breaker.admit() is True
    clock.now = 104.0
    assert breaker.admit() is True


def test_of_many_threads_one_tries(breaker: Breaker, clock: Clock) -> None:
    breaker.trip("refused")
    clock.now = 102.0
    together = threading.Barrier(8)

    def attempt(_: int) -> bool:
        together.wait()
        try:
            return breaker.admit()
        except ServerDown:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
