"""A pool of sessions with one ticket server; each session is lent to one caller at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

from django.db import OperationalError, connections
from django.db.utils import Error

from sharded_orm.ids.tickets.exceptions import SequenceNotChecked, TicketError, TicketServerBehind
from sharded_orm.ids.tickets.session import SequenceSlot, TicketSession, seconds_left, session_class

#: Exceptions that mean that a ticket server is down, unreachable or broken.
FAILURES = (Error, OSError)
# After these errors, a second try with a new session is pointless: it would raise the same error.
_SAME_FROM_ANY = (TicketServerBehind, SequenceNotChecked)
_MAX_IDLE = 64

T = TypeVar("T")


class TicketSessionPool:
    """A pool of sessions with one ticket server, for one process and one database. Thread-safe.

    :param slot: the numbers that this server may hand out.
    :param patience: the driver's own time limits, in seconds.
    """

    def __init__(self, alias: str, slot: SequenceSlot, patience: float) -> None:
        self.alias = alias
        self._slot = slot
        self._patience = patience
        self._keep = True
        # Held while _idle is used. Each open session is either in _idle or lent to one caller.
        self._lock = threading.Lock()
        self._idle: list[TicketSession] = []

    def lend(self, deadline: float) -> Lent:
        """Return a context manager that lends a session.

        :param deadline: the time (``time.monotonic()``) by which the server must have answered.
        """
        return Lent(self, deadline)

    def close(self, *, for_good: bool = False) -> None:
        """Close the idle sessions.

        :param for_good: if True, the pool keeps no sessions from now on: a session that is lent now
            is closed when it is given back. If False (the default), such a session is kept then.
        """
        with self._lock:
            self._keep = self._keep and not for_good
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def pop(self) -> TicketSession | None:
        """Remove and return the idle session that was used last; return None if no session is idle."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, session: TicketSession) -> None:
        """Keep ``session`` for the next caller; close it if the pool is full or was closed for good.

        The session must have received the answers to all its requests.
        """
        with self._lock:
            if self._keep and len(self._idle) < _MAX_IDLE:
                self._idle.append(session)
                return
        session.close()

    def open(self, deadline: float) -> TicketSession:
        """Connect to the server and return the new session.

        :raises OperationalError: the session was not open by ``deadline``. If the driver still connects
            later, the pool keeps the new session for the next caller.
        """
        session_type = session_class(connections[self.alias].vendor)
        settings = connections.settings[self.alias]
        future: Future[TicketSession] = Future()

        def connect() -> None:
            try:
                future.set_result(session_type(self.alias, settings, self._slot, self._patience))
            except BaseException as exc:
                # The caller's thread gets the error from future.result().
                future.set_exception(exc)

        # Connect in another thread, so that the calling thread can stop waiting at the deadline.
        # The driver's own time limits are whole seconds, and the driver resolves host names without
        # a time limit.
        thread = threading.Thread(target=connect, name=f"connect to {self.alias}", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            raise OperationalError(f"no thread to connect in: {exc}") from exc
        left = seconds_left(deadline)
        try:
            return future.result(left)
        except NotInTime as exc:
            if future.done():
                return future.result()
            future.add_done_callback(self._give_back_late)
            raise OperationalError(f"no connection within {left:.3g} seconds") from exc

    def _give_back_late(self, late: Future[TicketSession]) -> None:
        if late.exception() is None:
            self.give_back(late.result())


def _ordinary_pool(alias: str) -> type[TicketSessionPool]:
    return TicketSessionPool


_pool_class: Callable[[str], type[TicketSessionPool]] = _ordinary_pool


def provide_pool_class(pool_class: Callable[[str], type[TicketSessionPool]]) -> None:
    """Set the function that chooses the class of each new pool.

    :param pool_class: called with the alias of the pool's database; returns the class.
    """
    global _pool_class
    _pool_class = pool_class


def make_pool(alias: str, slot: SequenceSlot, patience: float) -> TicketSessionPool:
    """Return a new pool of sessions with the database that has the alias ``alias`` now."""
    return _pool_class(alias)(alias, slot, patience)


class Lent:
    """A context manager that lends a session to one caller.

    At the end of the ``with`` block, the session goes back to the pool. But if a request failed,
    its answer may still be on its way, so the session is closed instead.
    """

    def __init__(self, pool: TicketSessionPool, deadline: float) -> None:
        self._pool = pool
        #: The time (``time.monotonic()``) by which the server must have answered. If the caller has
        #: to wait for another server in between, it moves this deadline by the time that it waited.
        self.deadline = deadline
        self._session: TicketSession | None = None

    def __enter__(self) -> Lent:
        return self

    def ask(self, work: Callable[[TicketSession], T]) -> T:
        """Call ``work`` with a session, and return its result.

        ``work`` may run twice: a session that was idle in the pool may have lost its connection. If
        ``work`` fails with such a session, it is called again with a new session.
        """
        self._session = self._pool.pop()
        if self._session is not None:
            try:
                return work(self._session)
            except FAILURES as exc:
                if isinstance(exc, _SAME_FROM_ANY) or time.monotonic() >= self.deadline:
                    raise
                self._discard()
        self._session = self._pool.open(self.deadline)
        return work(self._session)

    def _discard(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __exit__(self, kind: Any, exc: Any, traceback: Any) -> None:
        if self._session is None:
            return
        # Give the session back only if its last request was answered: after success, or a
        # TicketError. After any other error, a late answer could be taken for the answer to the
        # next request.
        if exc is None or isinstance(exc, TicketError):
            self._pool.give_back(self._session)
        else:
            self._discard()
