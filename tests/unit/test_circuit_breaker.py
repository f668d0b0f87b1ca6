"""When a server that failed is left alone, and which caller tries it first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharded_orm.circuit_breaker import CircuitBreaker
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(2.0, clock)


REFUSED = OSError("refused")


def test_a_server_that_is_well_is_called(breaker: CircuitBreaker) -> None:
    assert breaker.is_closed
    assert breaker.claim(None)
    assert breaker.cause() is None
    assert not breaker.reset(None)


def test_after_a_failure_nobody_calls_for_a_while(breaker: CircuitBreaker, clock: Clock) -> None:
    assert breaker.trip(None, REFUSED)
    assert repr(breaker.cause()) == repr(REFUSED)
    for clock.now in (100.0, 101.9):
        assert not breaker.claim(None)
    clock.now = 102.0
    assert breaker.claim(None)


def test_while_one_tries_the_others_wait_for_its_success(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    breaker.trip(None, REFUSED)
    clock.now = 102.0
    assert breaker.claim(None)
    assert not breaker.claim(None)
    assert breaker.reset(None)
    assert breaker.is_closed
    assert breaker.claim(None)


def test_when_the_one_fails_the_wait_begins_anew(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.trip(None, REFUSED)
    clock.now = 103.0
    assert breaker.claim(None)
    again = OSError("refused again")
    assert not breaker.trip(None, again)
    assert repr(breaker.cause()) == repr(again)
    clock.now = 104.9
    assert not breaker.claim(None)
    clock.now = 105.0
    assert breaker.claim(None)


def test_when_the_one_never_returns_another_one_tries(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    breaker.trip(None, REFUSED)
    clock.now = 102.0
    assert breaker.claim(None)
    clock.now = 104.0
    assert breaker.claim(None)


def test_a_part_of_a_server_rests_by_itself(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.trip("part", REFUSED)
    assert not breaker.is_closed
    assert breaker.claim(None)
    assert breaker.claim("other")
    assert not breaker.claim(None, "part")
    clock.now = 101.0
    breaker.trip(None, REFUSED)
    clock.now = 102.0
    # Its turn has not begun: the server rests.
    assert not breaker.claim(None, "part")
    assert breaker.claim("part")


def test_a_cause_has_a_time_and_a_change_of_it_is_news(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    breaker.trip(None, REFUSED)
    assert repr(breaker.cause(since=100.0)) == repr(REFUSED)
    assert breaker.cause(since=100.1) is None
    assert breaker.trip(None, ValueError("another one"))


def test_at_a_good_sign_the_next_caller_tries(breaker: CircuitBreaker) -> None:
    breaker.half_open(None)
    assert breaker.is_closed
    breaker.trip(None, REFUSED)
    breaker.half_open(None)
    assert breaker.claim(None)
    assert not breaker.claim(None)


def test_of_many_threads_one_tries(breaker: CircuitBreaker, clock: Clock) -> None:
    breaker.trip(None, REFUSED)
    clock.now = 102.0
    together = threading.Barrier(8)

    def attempt(_: int) -> bool:
        together.wait()
        return breaker.claim(None)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
