"""Pools of physical sessions (server connections): one pool per node and process, for any driver.

A pool gives each session to one user at a time. When a session is leased, it is alive and
has no state of earlier users. A forked child process never uses a session of its parent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from sharded_orm.circuit_breaker import CircuitBreaker
from sharded_orm.exceptions import PoolTimeout

logger = logging.getLogger("sharded_orm.backends")

# If another thread used an idle session last, close_expired() leaves the session open for this many
# seconds after it has expired. That thread may still be in its request, and use the session again.
GRACE = 1.0
DEFAULT_TIMEOUT = 30.0
# Seconds after a failed attempt to open a session, until SessionPool.failure() makes another one.
BACKOFF = 5.0


class PooledSession(Protocol):
    """What a pool needs of a physical session (server connection)."""

    close_at: float | None
    #: Whether the session must be pinged before its next use, because it has been idle since an
    #: earlier request.
    suspect: bool
    #: Whether the session must be closed when it is released, not returned to the pool. For
    #: example, the pool was disposed of, or this is a forked child and the session belongs to its
    #: parent.
    retired: bool
    #: Identifier of the thread that used the session last.
    user: int
    #: In a :class:`BoundedPool`: the permit (the right to lease one session) with which this
    #: session is leased. The permit is free again when no object refers to it.
    permit: object | None

    @property
    def poll(self) -> Callable[[int], Any]:
        """A function that polls the session's socket, for a number of milliseconds.

        It returns a true value if the socket has data or an error. An idle session is then dead.
        """

    def ping(self) -> bool: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


S = TypeVar("S", bound=PooledSession)


@dataclass
class PoolStats:
    """Counters of one pool since the process started, for logs and tests.

    No lock guards the counters, so they may be too low if several threads use the pool at once.
    """

    opened: int = 0
    closed: int = 0
    dead: int = 0
    """Idle sessions that proved dead when the pool was about to lease them."""
    pins: int = 0
    """Sessions that an alias kept for itself because a statement left state in the session."""
    retries: int = 0
    pin_reasons: dict[str, int] = field(default_factory=dict)


class SessionPool(Generic[S]):
    """The pool of one node's sessions. Thread-safe.

    If several sessions are idle, a lease gets the one that was released last.

    :param name: name of the node, for errors and logs.
    :param open_session: function that opens a session. It is called while no lock is held.
    :param max_age: seconds until a session expires, as Django's ``CONN_MAX_AGE``; None for never.
        :meth:`close_expired` closes idle sessions that have expired.
    """

    def __init__(
        self, name: str, open_session: Callable[[], S], max_age: float | None = None
    ) -> None:
        self.name = name
        self.max_age = max_age
        self.stats = PoolStats()
        #: Remembers whether the last attempt to open a session has failed, for :meth:`failure`. If
        #: no session is idle, lease() tries to open one even after a failure.
        self.breaker = CircuitBreaker(BACKOFF)
        #: The most rows that the server sends of a query without LIMIT, as the session opened last
        #: has said; None if it sends all.
        self.most_rows: int | None = None
        #: Whether the server sorts texts by fewer bytes than it does by default.
        self.sorts_short = False
        self._open_session = open_session
        # The idle sessions. Each open session is either in this list or leased. Changes of the list
        # need no lock, because its append(), pop() and remove() are atomic.
        self._idle: list[S] = []
        # Weak references to every session that may be open, keyed by id(). With them, a forked
        # child finds the sessions of its parent to abandon them. No lock guards the dict: garbage
        # collection may remove a session at any moment, even in the thread that holds the lock. So
        # the code uses only operations of dict that are atomic.
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

    @property
    def is_exhausted(self) -> bool:
        """Whether a lease would have to wait until another session is released."""
        return False

    def lease(self) -> S:
        """Return a live session. Only the caller may use it until :meth:`release` or :meth:`discard`.

        The socket of an idle session is polled first (0.3 µs). If the server has closed that session,
        the caller gets another one and notices nothing.
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
        """Lease a session that is opened now, even if the pool has idle sessions."""
        return self._open()

    def take(self, session: S) -> bool:
        """Lease exactly ``session``. Return False if it is in use or dead."""
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
        """Return a leased session to the pool. The session must have no state and no unread results."""
        if session.retired:
            self._close(session)
            return
        session.user = threading.get_ident()
        self._idle.append(session)

    def discard(self, session: S) -> None:
        """Close a leased session instead of returning it, because it is broken, has state or has
        unread results.
        """
        self._close(session)

    def prepare(self) -> None:
        """Check that the node's server can be reached, so that an error is raised early.

        Tests an idle session. Opens a new one if all idle ones are dead, or if the pool has no
        session at all. Never waits: if all sessions are leased, nothing is checked.

        :raises: the driver's error if the driver cannot connect.
        """
        if self._idle or not self._sessions:
            self.release(self.lease())

    def failure(self) -> Exception | None:
        """Return the error of the last attempt to open a session; None if it succeeded.

        While the node fails, one caller tries again every :data:`BACKOFF` seconds, and waits for
        the result. All other callers get the last error at once.
        """
        if not self.breaker.is_closed and self.breaker.claim(None):
            # Open a new session even if the pool has idle ones: only a new session proves that the
            # node answers. If that fails, _open() records the error in the breaker.
            with suppress(Exception):
                self._close(self._open())
        return self.breaker.cause()

    def close_expired(self, *, revalidate: bool = False) -> None:
        """Close idle sessions that are older than ``max_age``. Called at the end of a request.

        :param revalidate: whether to have the remaining idle sessions pinged before their next use,
            as with Django's ``CONN_HEALTH_CHECKS``.
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
                # Skip the session if another thread has leased it meanwhile (ValueError).
                try:
                    self._idle.remove(session)
                except ValueError:
                    continue
                self._close(session)
        if revalidate:
            for session in self._idle[:]:
                session.suspect = True

    def dispose(self) -> None:
        """Close idle sessions now, and each leased session as soon as it is released."""
        for session in self._open_sessions():
            session.retired = True
        while self._idle:
            try:
                session = self._idle.pop()
            except IndexError:
                break
            self._close(session)

    def leave(self, occasion: int) -> None:
        """Record that a connection object does not use this pool any more, because the topology has
        changed.

        The first call for a change of the topology closes the pool's sessions as :meth:`dispose`
        does, so that no session stays open to a node that nobody uses. Other connection objects can
        still use this pool, which opens new sessions for them. Each call also forgets an earlier
        failure of the node.

        :param occasion: number of the change of the topology. All connection objects that leave
            because of the same change pass the same number.
        """
        if occasion != self._last_occasion:
            self._last_occasion = occasion
            self.dispose()
        # The node may be gone for good, so forget its failure. If another connection object still
        # uses the node, its next attempt to open a session records the failure again.
        self.breaker.reset(None)

    def _revalidate(self, session: S) -> bool:
        session.suspect = False
        return session.ping()

    def _open(self) -> S:
        try:
            session = self._open_session()
        except Exception as exc:  # Recorded, whatever the driver.
            if self.breaker.trip(None, exc):
                logger.info("Node %r cannot be reached: %s", self.name, exc)
            raise
        self.breaker.reset(None)
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
        # This runs in a forked child, which has only this thread. Abandon all sessions: their
        # sockets belong to the parent.
        for session in self._open_sessions():
            session.retired = True
            session.abandon()
        self._idle = []
        self._sessions = {}
        self.breaker.after_fork()

    def _open_sessions(self) -> list[S]:
        return [s for ref in list(self._sessions.values()) if (s := ref()) is not None]


class _Permit:
    """The right to lease one session of a :class:`BoundedPool`. It is free again as soon as no
    object refers to it.
    """

    __slots__ = ("__weakref__",)


class BoundedPool(SessionPool[S]):
    """A pool that leases at most ``maximum`` sessions at the same time.

    :param maximum: the largest number of leased sessions.
    :param timeout: seconds for which a lease waits for another session's release, before it raises
        :exc:`PoolTimeout`.
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
        # The permits in use. Each leased session refers to a permit. (Sessions that were leased
        # before dispose() do not count. They are closed at their release.) A new session is opened
        # only if none is idle, so there are never more open sessions than permits. A permit leaves
        # this set when nothing refers to it any more. So even if a signal handler raises an error
        # just after a session was leased, the permit becomes free.
        self._permits: weakref.WeakSet[_Permit] = weakref.WeakSet()
        # Guards _permits, because several threads may add to it. The release of a session notifies
        # the threads that wait for a permit. If a permit leaves the set without a release, waiting
        # threads notice it only at the next release, or when their timeout ends.
        self._permit_freed = threading.Condition()

    @property
    def is_exhausted(self) -> bool:
        return not self._has_free_permit()

    def lease(self) -> S:
        with self._permit() as permit:
            session = super().lease()
            session.permit = permit
        return session

    def lease_new(self) -> S:
        with self._permit() as permit:
            # If a session is idle, close it first. With the new one, the pool might otherwise have
            # more open sessions than its maximum.
            try:
                idle = self._idle.pop(0)
            except IndexError:
                pass
            else:
                self._close(idle)
            session = super().lease_new()
            session.permit = permit
        return session

    def take(self, session: S) -> bool:
        permit = self._take_permit(0)
        if permit is None:
            return False
        if super().take(session):
            session.permit = permit
            return True
        self._free(permit)
        return False

    def release(self, session: S) -> None:
        permit, session.permit = session.permit, None
        super().release(session)
        self._free(permit)

    def discard(self, session: S) -> None:
        permit, session.permit = session.permit, None
        super().discard(session)
        self._free(permit)

    def dispose(self) -> None:
        super().dispose()
        # dispose() has marked all leased sessions, so that they are closed at their release. They
        # no longer count, so all permits become free for new sessions.
        with self._permit_freed:
            self._permits = weakref.WeakSet()
            self._permit_freed.notify_all()

    @contextmanager
    def _permit(self) -> Iterator[_Permit]:
        """Context manager that yields a permit (the right to lease one session). If the block
        raises an error, the permit becomes free again.
        """
        permit = self._take_permit(self.timeout)
        if permit is None:
            raise PoolTimeout(
                f"All {self.maximum} connections of node {self.name!r} are in use and none came"
                f" back within {self.timeout:g} s. Each shard that is in a transaction holds one:"
                " open fewer transactions at once, or raise POOL['MAX'] of the node."
            )
        try:
            yield permit
        except BaseException:
            self._free(permit)
            raise

    def _take_permit(self, timeout: float) -> _Permit | None:
        """Return a permit (the right to lease one session), or None if no permit became free within
        ``timeout`` seconds.
        """
        permit = _Permit()
        with self._permit_freed:
            if not self._permit_freed.wait_for(self._has_free_permit, timeout):
                return None
            self._permits.add(permit)
        return permit

    def _free(self, permit: object) -> None:
        with self._permit_freed:
            if permit is not None:
                self._permits.discard(cast(_Permit, permit))
            self._permit_freed.notify()

    def _has_free_permit(self) -> bool:
        return len(self._permits) < self.maximum

    def _after_fork(self) -> None:
        super()._after_fork()
        self._permits = weakref.WeakSet()
        self._permit_freed = threading.Condition()


_pools: dict[Hashable, SessionPool[Any]] = {}
_pools_lock = threading.Lock()


def get_pool(key: Hashable, make: Callable[[], SessionPool[S]]) -> SessionPool[S]:
    """Return this process's pool for ``key``. If there is none yet, ``make`` creates it."""
    try:
        return _pools[key]
    except KeyError:
        with _pools_lock:
            if key not in _pools:
                _pools[key] = make()
            return _pools[key]


def frozen(value: Any) -> Hashable:
    """Return a hashable value that stands for a connection parameter. Equal parameters have equal
    values.

    Aliases share a pool if these values of all their parameters are equal. For an object that
    cannot be hashed, such as the driver's dict of converters, the value is its id(). So aliases
    share a pool only if they have the very same object.
    """
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            return id(value)
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), tuple(frozen(item) for item in value))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return cast("Hashable", value)


def pools() -> list[SessionPool[Any]]:
    """Return all pools of this process."""
    return list(_pools.values())


def all_nodes_answer() -> bool:
    """Whether no pool of this process has failed in its last attempt to open a session. Costs no
    I/O.
    """
    return all(pool.breaker.is_closed for pool in pools())


def _after_fork_in_child() -> None:
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in pools():
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
