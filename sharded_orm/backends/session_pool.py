"""A process-wide pool of physical sessions per node, for any driver.

The pool promises that a session has one user at a time, that an idle session is alive and clean
when it is leased, and that none crosses a fork.
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

# Seconds for which an expired session of another thread stays open at the end of a request: that
# thread may be between two statements of its own request.
GRACE = 1.0
DEFAULT_TIMEOUT = 30.0


class PooledSession(Protocol):
    """A physical session, for its pool."""

    close_at: float | None
    #: Idle since an earlier request: to be pinged before its next use.
    suspect: bool
    #: To be closed when it is released: the pool was disposed of, or the session is the parent
    #: process's.
    retired: bool
    #: Identifier of the thread that used the session last.
    user: int

    @property
    def poll(self) -> Callable[[int], Any]:
        """Poll the socket. Truthy if it has data or an error: then an idle session is dead."""

    def ping(self) -> bool: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


S = TypeVar("S", bound=PooledSession)


@dataclass
class PoolStats:
    """Counters of one pool since the process started, for logs and tests.

    They have no lock and may lose counts under contention.
    """

    opened: int = 0
    closed: int = 0
    dead: int = 0
    """Sessions that were dead when they were to be leased."""
    pins: int = 0
    """Sessions that an alias kept for itself because a statement left state in them."""
    retries: int = 0
    pin_reasons: dict[str, int] = field(default_factory=dict)


class SessionPool(Generic[S]):
    """The sessions of one node; last in, first out; thread-safe.

    :param name: the node, for errors and logs.
    :param open_session: opens a session; called outside any lock.
    :param max_age: seconds until a session expires, None for never. :meth:`close_expired` closes
        expired idle sessions, as Django's ``CONN_MAX_AGE``.
    """

    def __init__(
        self, name: str, open_session: Callable[[], S], max_age: float | None = None
    ) -> None:
        self.name = name
        self.max_age = max_age
        self.stats = PoolStats()
        self._open_session = open_session
        # Invariant: a session is either in this list or leased. list.append, pop and remove are
        # atomic, so leasing needs no lock.
        self._idle: list[S] = []
        # Every session that may be open, which a forked child has to abandon. Only atomic
        # operations instead of a lock: in the middle of one, garbage collection may close a session
        # in the same thread.
        self._sessions: dict[int, weakref.ref[S]] = {}
        self._last_occasion: int | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} idle={len(self._idle)} {self.stats}>"

    @property
    def idle(self) -> int:
        """The number of idle sessions."""
        return len(self._idle)

    @property
    def size(self) -> int:
        """The number of open sessions, idle and leased."""
        return len(self._sessions)

    def lease(self) -> S:
        """Return a live session, for the caller alone until :meth:`release` or :meth:`discard`.

        The socket of an idle session is polled first (0.3 µs), so a session that the server has
        closed is replaced unnoticed.
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
        """Open a new session and lease it."""
        return self._open()

    def take(self, session: S) -> bool:
        """Lease this session; False if it is not idle, or dead."""
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
        """Return a clean session to the pool."""
        if session.retired:
            self._close(session)
            return
        session.user = threading.get_ident()
        self._idle.append(session)

    def discard(self, session: S) -> None:
        """Close a leased session that is broken or no longer clean."""
        self._close(session)

    def prepare(self) -> None:
        """Check that a session can be leased, so that a node that is down is noticed early.

        Opens a session only if there is none at all. Never waits for a leased one.

        :raises: the driver's error if it cannot connect.
        """
        if self._idle or not self._sessions:
            self.release(self.lease())

    def close_expired(self, *, revalidate: bool = False) -> None:
        """Close idle sessions older than ``max_age``; called at the end of a request.

        :param revalidate: ping the others before their next use (``CONN_HEALTH_CHECKS``).
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
                # A concurrent lease() may have been faster.
                try:
                    self._idle.remove(session)
                except ValueError:
                    continue
                self._close(session)
        if revalidate:
            for session in self._idle[:]:
                session.suspect = True

    def dispose(self) -> None:
        """Close idle sessions now, and leased ones when they are released."""
        for session in self._open_sessions():
            session.retired = True
        while self._idle:
            try:
                session = self._idle.pop()
            except IndexError:
                break
            self._close(session)

    def leave(self, occasion: int) -> None:
        """Users of the pool have moved to another node: :meth:`dispose`, once per occasion.

        The others open new sessions. A node without users has none left.

        :param occasion: a number that is the same for all users that move together.
        """
        if occasion != self._last_occasion:
            self._last_occasion = occasion
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
        # The child has this thread only, and every socket is the parent's.
        for session in self._open_sessions():
            session.retired = True
            session.abandon()
        self._idle = []
        self._sessions = {}

    def _open_sessions(self) -> list[S]:
        return [s for ref in list(self._sessions.values()) if (s := ref()) is not None]


class BoundedPool(SessionPool[S]):
    """A pool with at most ``maximum`` sessions in use at once.

    :param maximum: of leased sessions.
    :param timeout: seconds to wait for a session to be released before :exc:`PoolTimeout`.
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
        # Invariant: each leased session that is not retired has a permit. A new session is opened
        # only if none is idle, so there are never more open sessions than permits.
        self._permits = threading.Semaphore(maximum)

    def lease(self) -> S:
        with self._permit():
            return super().lease()

    def lease_new(self) -> S:
        with self._permit():
            # An idle session is closed, so as to stay below the maximum.
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
        has_permit = not session.retired
        super().release(session)
        if has_permit:
            self._permits.release()

    def discard(self, session: S) -> None:
        has_permit = not session.retired
        super().discard(session)
        if has_permit:
            self._permits.release()

    def dispose(self) -> None:
        super().dispose()
        # Retired sessions have no permit any more.
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
    """Return the process's pool for ``key``, created at first use."""
    try:
        return _pools[key]
    except KeyError:
        with _pools_lock:
            if key not in _pools:
                _pools[key] = make()
            return _pools[key]


def pools() -> list[SessionPool[Any]]:
    """Return all pools of this process."""
    return list(_pools.values())


def dispose_all() -> None:
    """Close every idle session of the process now, and leased ones when they are released."""
    for pool in pools():
        pool.dispose()


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in pools():
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
