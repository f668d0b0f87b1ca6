from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from sharded_orm.backends import pool as pool_module
from sharded_orm.backends.pool import GRACE, BoundedPool, SessionPool
from sharded_orm.exceptions import PoolTimeout


class FakeSession:
    def __init__(self) -> None:
        self.close_at: float | None = None
        self.suspect = False
        self.retired = False
        self.user = 0
        self.permit: object | None = None
        self.dead = False
        self.answers = True
        self.closed = False
        self.abandoned = False

    def poll(self, timeout: int) -> bool:
        return self.dead

    def ping(self) -> bool:
        return self.answers

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> None:
        self.abandoned = True


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pool_module, "time", clock)
    return clock


def make(**options: float | None) -> SessionPool[FakeSession]:
    return SessionPool("node", FakeSession, **options)


def bounded(maximum: int, timeout: float = 0.01) -> BoundedPool[FakeSession]:
    return BoundedPool("node", FakeSession, maximum=maximum, timeout=timeout)


def test_the_session_used_last_is_used_next() -> None:
    pool = make()
    one, two = pool.lease(), pool.lease()
    pool.release(one)
    pool.release(two)
    assert pool.lease() is two
    assert pool.lease() is one
    assert (pool.size, pool.idle, pool.stats.opened) == (2, 0, 2)


def test_a_dead_idle_session_is_replaced() -> None:
    pool = make()
    session = pool.lease()
    pool.release(session)
    session.dead = True
    fresh = pool.lease()
    assert fresh is not session
    assert session.closed
    assert (pool.stats.dead, pool.size) == (1, 1)


def test_a_session_in_the_hands_of_a_thread_is_nobody_elses() -> None:
    pool = make()
    holders: dict[int, int] = {}

    def work(_: int) -> None:
        for _ in range(300):
            session = pool.lease()
            assert holders.setdefault(id(session), threading.get_ident()) == threading.get_ident()
            del holders[id(session)]
            pool.release(session)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert pool.size <= 8


def test_expired_sessions_are_closed_on_request(clock: Clock) -> None:
    pool = make(max_age=10)
    session = pool.lease()
    pool.release(session)
    clock.now = 9.9
    pool.close_expired()
    assert not session.closed
    clock.now = 10
    pool.close_expired()
    assert session.closed
    assert pool.size == 0


def test_a_session_of_another_thread_has_a_grace_period(clock: Clock) -> None:
    pool = make(max_age=0)
    session = pool.lease()
    pool.release(session)
    session.user += 1
    pool.close_expired()
    assert not session.closed
    clock.now = GRACE
    pool.close_expired()
    assert session.closed


def test_without_an_age_nothing_expires(clock: Clock) -> None:
    pool = make(max_age=None)
    session = pool.lease()
    pool.release(session)
    clock.now = 1e9
    pool.close_expired()
    assert not session.closed


def test_revalidation_pings_once() -> None:
    pool = make()
    session = pool.lease()
    pool.release(session)
    pool.close_expired(revalidate=True)
    assert pool.lease() is session
    assert not session.suspect
    pool.release(session)
    pool.close_expired(revalidate=True)
    session.answers = False
    assert pool.lease() is not session
    assert session.closed


def test_a_failure_is_kept_without_the_frames_of_its_request() -> None:
    def fail() -> FakeSession:
        raise OSError(111, "refused") from ValueError("its cause has frames, too")

    pool: SessionPool[FakeSession] = SessionPool("node", fail)
    with pytest.raises(OSError, match="refused"):
        pool.lease()
    failure = pool.failure()
    assert isinstance(failure, ConnectionRefusedError)
    assert str(failure) == "[Errno 111] refused"
    assert (failure.__traceback__, failure.__cause__, failure.__context__) == (None, None, None)


def test_a_node_that_was_left_is_no_longer_known_to_be_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_pools", {})

    def fail() -> FakeSession:
        raise OSError("refused")

    pool: SessionPool[FakeSession] = pool_module.get_pool(
        "removed", lambda: SessionPool("removed", fail)
    )
    with pytest.raises(OSError, match="refused"):
        pool.lease()
    assert not pool_module.all_nodes_answer()
    pool.leave(1)
    assert pool_module.all_nodes_answer()
    # Another connection object of the same move had not left yet.
    with pytest.raises(OSError, match="refused"):
        pool.lease()
    pool.leave(1)
    assert pool_module.all_nodes_answer()


def test_dispose_closes_leased_sessions_when_they_come_back() -> None:
    pool = make()
    leased, idle = pool.lease(), pool.lease()
    pool.release(idle)
    pool.dispose()
    assert idle.closed
    assert not leased.closed
    pool.release(leased)
    assert leased.closed
    assert (pool.size, pool.idle) == (0, 0)


def test_take_gets_one_session_only_if_it_is_idle() -> None:
    pool = make()
    one, two = pool.lease(), pool.lease()
    pool.release(one)
    pool.release(two)
    assert pool.take(one)
    assert not pool.take(one)
    assert pool.lease() is two


def test_prepare_opens_one_only_if_there_is_none() -> None:
    pool = make()
    pool.prepare()
    assert pool.stats.opened == 1
    session = pool.lease()
    pool.prepare()
    assert pool.stats.opened == 1
    pool.discard(session)
    pool.prepare()
    assert pool.stats.opened == 2


def test_a_forgotten_session_does_not_count() -> None:
    pool = make()
    session = pool.lease()
    assert pool.size == 1
    del session
    assert pool.size == 0


def test_the_bound_is_a_clear_error() -> None:
    pool = bounded(2)
    sessions = [pool.lease(), pool.lease()]
    with pytest.raises(PoolTimeout, match=r"All 2 connections of node 'node'.*POOL\['MAX'\]"):
        pool.lease()
    pool.release(sessions[1])
    assert pool.lease() is sessions[1]


def test_the_bound_waits_for_a_session() -> None:
    pool = bounded(1, timeout=30)
    session = pool.lease()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(pool.lease)
        pool.release(session)
        assert other.result() is session


def test_the_bound_holds_for_every_way_to_lease() -> None:
    pool = bounded(1)
    session = pool.lease()
    with pytest.raises(PoolTimeout):
        pool.lease_new()
    pool.discard(session)
    session = pool.lease()
    pool.release(session)
    fresh = pool.lease_new()
    assert session.closed
    assert pool.size == 1
    assert not pool.take(session)
    pool.dispose()
    other = pool.lease()
    pool.release(fresh)
    with pytest.raises(PoolTimeout):
        pool.lease()
    pool.release(other)


def test_a_failed_opening_gives_the_permit_back() -> None:
    pool = bounded(1)

    def fail() -> FakeSession:
        raise ConnectionRefusedError

    pool._open_session, working = fail, pool._open_session
    with pytest.raises(ConnectionRefusedError):
        pool.lease()
    pool._open_session = working
    pool.lease()


@pytest.mark.parametrize("way", ["lease", "lease_new", "take"])
def test_an_interruption_at_any_moment_costs_no_permit(way: str) -> None:
    """A signal handler may raise between any two instructions, as Celery's soft time limit does."""

    class Interruption(BaseException):
        pass

    def use(pool: BoundedPool[FakeSession], idle: FakeSession | None) -> None:
        if way == "take":
            assert idle is not None
            if not pool.take(idle):
                return
            session = idle
        else:
            session = getattr(pool, way)()
        try:
            pass
        finally:
            pool.release(session)

    def interrupt_after(number: int) -> Callable[..., Any]:
        left = number

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in (pool_module.__file__, __file__):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == 0:
                    raise Interruption
            return trace

        return trace

    # Python 3.12 sends no events of instructions if no frame has asked for them before settrace().
    sys._getframe().f_trace_opcodes = True
    number, interrupted = 0, True
    while interrupted:
        number += 1
        pool = bounded(2)
        pool.release(pool.lease())
        idle = pool._idle[0] if way == "take" else None
        sys.settrace(interrupt_after(number))
        try:
            use(pool, idle)
            interrupted = False
        except Interruption:
            pass
        finally:
            sys.settrace(None)
        del idle
        # Both permits are there.
        sessions = [pool.lease(), pool.lease()]
        with pytest.raises(PoolTimeout):
            pool.lease()
        for session in sessions:
            pool.release(session)
        assert pool.size == 2
    assert number > 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_lets_go_of_its_parents_sessions() -> None:
    for pool in (make(), bounded(1)):
        session = pool.lease()
        pool._after_fork()
        assert session.abandoned
        fresh = pool.lease()
        assert fresh is not session
        pool.release(session)
        assert session.closed
        assert (pool.idle, pool.size) == (0, 1)
