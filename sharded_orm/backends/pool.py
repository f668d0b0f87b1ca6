"""A process-wide pool of physical sessions per node.

Generic: it knows no driver. What it keeps are *sessions*; what it promises is that a
session is in one pair of hands at a time, that an idle one is alive and clean, and that
none crosses a fork.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from sharded_orm.exceptions import PoolTimeout

# Another thread may be between two statements of a request when this thread's request
# ends; its session is spared for this long after it expired (seconds).
GRACE = 1.0
DEFAULT_TIMEOUT = 30.0


class PooledSession(Protocol):
    """What the pool needs of a physical session."""

    close_at: float | None
    #: Idle since an earlier request: is pinged before it is used again.
    suspect: bool
    #: Must not come back to the pool (it was disposed of, or belongs to the parent process).
    retired: bool
    #: Identifier of the thread that used it last.
    user: int

    @property
    def poll(self) -> Callable[[int], Any]:
        """Truthy if the socket has something to say, which on an idle session is bad news."""

    def ping(self) -> bool: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


S = TypeVar("S", bound=PooledSession)


@dataclass
class PoolStats:
    """Counters of one pool since the process started; for logs and tests.

    They are incremented without a lock, so under contention they may lose a count.
    """

    opened: int = 0
    closed: int = 0
    dead: int = 0
    """Sessions that were found dead when they were to be used."""
    pins: int = 0
    """Sessions that an alias kept for itself because a statement set session state."""
    retries: int = 0
    pin_reasons: dict[str, int] = field(default_factory=dict)


class SessionPool(Generic[S]):
    """The sessions of one node; last in, first out; thread-safe.

    :param name: what errors and logs call it.
    :param open_session: opens a session; called outside any lock.
    :param max_age: seconds until a session counts as expired, None for never. Expired
        idle sessions are closed by :meth:`close_expired`, as Django's ``CONN_MAX_AGE``.
    """

    def __init__(
        self, name: str, open_session: Callable[[], S], max_age: float | None = None
    ) -> None:
        self.name = name
        self.max_age = max_age
        self.stats = PoolStats()
        self._open_session = open_session
        # Invariant: a session is in this list or in somebody's hands, never both.
        # list.append, pop and remove are atomic, so leasing needs no lock.
        self._idle: list[S] = []
        # Every session that may be open: what a forked child has to let go of. Only atomic
        # operations on it, no lock: a garbage collection in the middle of one may close a
        # session in the same thread.
        self._sessions: dict[int, weakref.ref[S]] = {}
        self._left: int | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} idle={len(self._idle)} {self.stats}>"

    @property
    def idle(self) -> int:
        """How many sessions wait for work."""
        return len(self._idle)

    @property
    def size(self) -> int:
        """How many sessions are open: idle and leased."""
        return len(self._sessions)

    def lease(self) -> S:
        """A live session, for the caller alone until :meth:`release` or :meth:`discard`.

        The socket of an idle session is polled first (a third of a microsecond), so one
        that the server closed meanwhile is replaced without anybody noticing.
        """
        pop = self._idle.pop
        while True:
            try:
                session = pop()
            except IndexError:
                break
            if session.poll(0) or (session.suspect and not self._revalidate(session)):
                self.stats.dead += 1
                self._close(session)
                continue
            return session
        return self._open()

    def lease_new(self) -> S:
        """A session that nobody has used before."""
        return self._open()

    def take(self, session: S) -> bool:
        """Lease this very session, if it is idle and alive."""
        try:
            self._idle.remove(session)
        except ValueError:
            return False
        if session.poll(0):
            self.stats.dead += 1
            self._close(session)
            return False
        return True

    def release(self, session: S) -> None:
        """Give back a clean session."""
        if session.retired:
            self._close(session)
            return
        session.user = threading.get_ident()
        self._idle.append(session)

    def discard(self, session: S) -> None:
        """Close a leased session that is broken or no longer clean."""
        self._close(session)

    def prepare(self) -> None:
        """Make sure that a session can be had: fails early when the node is down.

        Opens one only if there is none at all: never waits for one that is leased.

        :raises: what the driver raises when it cannot connect.
        """
        if self._idle or not self._sessions:
            self.release(self.lease())

    def close_expired(self, *, revalidate: bool = False) -> None:
        """Close idle sessions older than ``max_age``; called when a request ends.

        :param revalidate: let the others be pinged before their next use
            (``CONN_HEALTH_CHECKS``).
        """
        if self.max_age is not None:
            now = time.monotonic()
            me = threading.get_ident()
            for session in self._idle[:]:
                close_at = session.close_at
                if close_at is None or now < close_at:
                    continue
                if session.user != me and now < close_at + GRACE:
                    continue
                # remove() decides who owns it: a concurrent lease() may have been faster.
                try:
                    self._idle.remove(session)
                except ValueError:
                    continue
                self._close(session)
        if revalidate:
            for session in self._idle[:]:
                session.suspect = True

    def dispose(self) -> None:
        """Close idle sessions now and leased ones when they come back."""
        for session in self._open_sessions():
            session.retired = True
        while self._idle:
            try:
                session = self._idle.pop()
            except IndexError:
                break
            self._close(session)

    def leave(self, occasion: int) -> None:
        """Some of those who used the pool have moved away: :meth:`dispose`, once per occasion.

        Those who stay open sessions anew; on a node that nobody uses any more none is left.
        """
        if occasion != self._left:
            self._left = occasion
            self.dispose()

    def _revalidate(self, session: S) -> bool:
        session.suspect = False
        return session.ping()

    def _open(self) -> S:
        session = self._open_session()
        session.close_at = None if self.max_age is None else time.monotonic() + self.max_age
        key, sessions = id(session), self._sessions
        sessions[key] = weakref.ref(session, lambda _: sessions.pop(key, None))
        self.stats.opened += 1
        return session

    def _close(self, session: S) -> None:
        session.retired = True
        self._sessions.pop(id(session), None)
        self.stats.closed += 1
        session.close()

    def _after_fork(self) -> None:
        # In the child: only this thread exists, and every socket is the parent's.
        for session in self._open_sessions():
            session.retired = True
            session.abandon()
        self._idle = []
        self._sessions = {}

    def _open_sessions(self) -> list[S]:
        return [s for ref in list(self._sessions.values()) if (s := ref()) is not None]


class BoundedPool(SessionPool[S]):
    """A pool with at most ``maximum`` sessions in use at once.

    :param timeout: seconds to wait for one to come back before :exc:`PoolTimeout`.
    """

    def __init__(
        self,
        name: str,
        open_session: Callable[[], S],
        max_age: float | None = None,
        *,
        maximum: int,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(name, open_session, max_age)
        self.maximum = maximum
        self.timeout = timeout
        # Invariant: a permit is held for each leased session that is not retired. As a
        # new session is opened only when none is idle, open ones never exceed the permits.
        self._permits = threading.Semaphore(maximum)

    def lease(self) -> S:
        with self._permit():
            return super().lease()

    def lease_new(self) -> S:
        with self._permit():
            # Stay below the maximum: an idle session gives way to the new one.
            try:
                idle = self._idle.pop(0)
            except IndexError:
                pass
            else:
                self._close(idle)
            return super().lease_new()

    def take(self, session: S) -> bool:
        if not self._permits.acquire(blocking=False):
            return False
        if super().take(session):
            return True
        self._permits.release()
        return False

    def release(self, session: S) -> None:
        permit = not session.retired
        super().release(session)
        if permit:
            self._permits.release()

    def discard(self, session: S) -> None:
        permit = not session.retired
        super().discard(session)
        if permit:
            self._permits.release()

    def dispose(self) -> None:
        super().dispose()
        # Retired sessions come back without a permit.
        self._permits = threading.Semaphore(self.maximum)

    @contextmanager
    def _permit(self) -> Iterator[None]:
        permits = self._permits
        if not permits.acquire(timeout=self.timeout):
            raise PoolTimeout(
                f"All {self.maximum} connections of node {self.name!r} are in use and none came"
                f" back within {self.timeout:g} s. Each shard that is in a transaction holds one:"
                " open fewer transactions at once, or raise POOL['MAX'] of the node."
            )
        try:
            yield
        except BaseException:
            permits.release()
            raise

    def _after_fork(self) -> None:
        super()._after_fork()
        self._permits = threading.Semaphore(self.maximum)


_pools: dict[Hashable, SessionPool[Any]] = {}
_pools_lock = threading.Lock()


def get_pool(key: Hashable, make: Callable[[], SessionPool[S]]) -> SessionPool[S]:
    """The process's pool of ``key``, made at first use."""
    try:
        return _pools[key]
    except KeyError:
        with _pools_lock:
            if key not in _pools:
                _pools[key] = make()
            return _pools[key]


def pools() -> list[SessionPool[Any]]:
    """All pools of this process."""
    return list(_pools.values())


def dispose_all() -> None:
    """Close every idle session of the process; leased ones follow when they come back."""
    for pool in pools():
        pool.dispose()


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in pools():
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
