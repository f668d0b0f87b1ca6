"""The sessions of one ticket server in one process, each lent to one caller at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

from django.db import OperationalError, connections
from django.db.utils import Error

from sharded_orm.exceptions import SequenceNotChecked, TicketError, TicketServerBehind
from sharded_orm.ids.tickets.session import SequenceSlot, TicketSession, seconds_left, session_class

#: Errors of a server that is down, unreachable or broken.
FAILURES = (Error, OSError)
# Errors that any other session would raise as well.
_SAME_FROM_ANY = (TicketServerBehind, SequenceNotChecked)
_MAX_IDLE = 64

T = TypeVar("T")


class TicketSessionPool:
    """Sessions of one server, for one process and one database. Thread-safe.

    :param patience: seconds for the driver's own time limits.
    """

    def __init__(self, alias: str, slot: SequenceSlot, patience: float) -> None:
        self.alias = alias
        self._slot = slot
        self._patience = patience
        self._keep = True
        # Guards the list. Invariant: a session is in the list, or lent to one caller.
        self._lock = threading.Lock()
        self._idle: list[TicketSession] = []

    def lend(self, deadline: float) -> Lent:
        """A context manager that lends a session until ``deadline``, by ``time.monotonic()``."""
        return Lent(self, deadline)

    def close(self, *, for_good: bool = False) -> None:
        """Close the idle sessions; with ``for_good`` also each session that is given back later."""
        with self._lock:
            self._keep = self._keep and not for_good
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def pop(self) -> TicketSession | None:
        """The idle session that was used last; None if there is none."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, session: TicketSession) -> None:
        """Take back a session that waits for no answer."""
        with self._lock:
            if self._keep and len(self._idle) < _MAX_IDLE:
                self._idle.append(session)
                return
        session.close()

    def open(self, deadline: float) -> TicketSession:
        """A new session.

        :raises OperationalError: there is none by ``deadline``, even if the driver still waits.
        """
        session_type = session_class(connections[self.alias].vendor)
        settings = connections.settings[self.alias]
        future: Future[TicketSession] = Future()

        def connect() -> None:
            try:
                future.set_result(session_type(self.alias, settings, self._slot, self._patience))
            except BaseException as exc:  # Raised by the caller, which waits in another thread.
                future.set_exception(exc)

        # The driver's limits are whole seconds, and resolving a host name has no limit.
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
    """Let ``pool_class`` choose the class of pool for the database of an alias."""
    global _pool_class
    _pool_class = pool_class


def make_pool(alias: str, slot: SequenceSlot, patience: float) -> TicketSessionPool:
    """A pool for the database that ``alias`` names now."""
    return _pool_class(alias)(alias, slot, patience)


class Lent:
    """Lends a session to one caller; closes it if a request failed in the middle."""

    def __init__(self, pool: TicketSessionPool, deadline: float) -> None:
        self._pool = pool
        #: When the server must have answered. A caller that waits for another server extends it.
        self.deadline = deadline
        self._session: TicketSession | None = None

    def __enter__(self) -> Lent:
        return self

    def ask(self, work: Callable[[TicketSession], T]) -> T:
        """Return ``work(session)``.

        An idle session may be dead: if it fails, a new session is opened and ``work`` runs again.
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
        # After any other error the answer may still be on its way, and would be taken for the
        # answer to the next request: a signal handler may raise anything at any point.
        if exc is None or isinstance(exc, TicketError):
            self._pool.give_back(self._session)
        else:
            self._discard()
