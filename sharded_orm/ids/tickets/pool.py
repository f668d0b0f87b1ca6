"""The sessions of one server in one process: opened in time, lent to one caller each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, TypeVar

from django.core import mail
from django.db import OperationalError, connections
from django.db.utils import Error

from sharded_orm.exceptions import SequenceNotChecked, TicketError, TicketServerBehind
from sharded_orm.ids.tickets.session import SequenceSlot, TicketSession, seconds_left, session_class

#: What a server that is down, unreachable or unwell raises.
FAILURES = (Error, OSError)
# These are not about the session: another one would tell the same.
_SAME_FROM_ANY = (TicketServerBehind, SequenceNotChecked)
_MAX_IDLE = 64

T = TypeVar("T")


class TicketSessionPool:
    """Sessions of one server. Thread-safe; of one process and one database.

    :param patience: seconds, for the driver's own limits.
    """

    def __init__(self, alias: str, place: SequenceSlot, patience: float) -> None:
        self.alias = alias
        self._place = place
        self._patience = patience
        self._keep = True
        # Invariant: a session is in the list, or with one caller.
        self._lock = threading.Lock()
        self._idle: list[TicketSession] = []

    def lend(self, deadline: float) -> Lent:
        """A context manager that lends sessions until it is left."""
        return Lent(self, deadline)

    def close(self, *, for_good: bool = False) -> None:
        """Close the idle sessions; with ``for_good`` also those that come back later."""
        with self._lock:
            self._keep = self._keep and not for_good
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def pop(self) -> TicketSession | None:
        """An idle session, the last that was used."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, session: TicketSession) -> None:
        """Take back a session whose last request was answered."""
        with self._lock:
            if self._keep and len(self._idle) < _MAX_IDLE and not self._is_to_be_dropped(session):
                self._idle.append(session)
                return
        session.close()

    def _is_to_be_dropped(self, session: TicketSession) -> bool:
        # In a test run, which drops its databases at the end.
        return session.blocks_drop and hasattr(mail, "outbox")

    def open(self, deadline: float) -> TicketSession:
        """A new session by ``deadline``, whatever the driver does until then."""
        kind = session_class(connections[self.alias].vendor)
        settings = connections.settings[self.alias]
        opened: Future[TicketSession] = Future()

        def connect() -> None:
            try:
                opened.set_result(kind(self.alias, settings, self._place, self._patience))
            except BaseException as exc:  # For the caller, who waits in another thread.
                opened.set_exception(exc)

        # The driver's limits are whole seconds, and looking up a name has none.
        thread = threading.Thread(target=connect, name=f"connect to {self.alias}", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            raise OperationalError(f"no thread to connect in: {exc}") from exc
        left = seconds_left(deadline)
        try:
            return opened.result(left)
        except NotInTime as exc:
            if opened.done():
                return opened.result()
            opened.add_done_callback(self._keep_late)
            raise OperationalError(f"no connection within {left:.3g} seconds") from exc

    def _keep_late(self, late: Future[TicketSession]) -> None:
        if late.exception() is None:
            self.give_back(late.result())


def _refuse_where_tests_do(alias: str) -> None:
    """In a test case that may not use ``alias``, raise what Django raises there."""
    connect: Any = connections[alias].__dict__.get("connect")
    if hasattr(connect, "wrapped"):
        # SimpleTestCase._add_databases_failures has put it in the method's place.
        connect()


class Lent:
    """A session for one caller. It goes back if nothing failed, else it is closed."""

    def __init__(self, pool: TicketSessionPool, deadline: float) -> None:
        self._pool = pool
        #: Of the server that is asked. Who waits for another one meanwhile moves it.
        self.deadline = deadline
        self._session: TicketSession | None = None

    def __enter__(self) -> Lent:
        if hasattr(mail, "outbox"):  # Made by Django's setup_test_environment().
            _refuse_where_tests_do(self._pool.alias)
        return self

    def ask(self, work: Callable[[TicketSession], T]) -> T:
        """``work(session)``. One that waited in the pool may be dead; then a new one is asked."""
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
        # After any other error the answer may still be on its way, and would be taken for that
        # to the next request: a signal handler may raise anything at any point.
        if exc is None or isinstance(exc, TicketError):
            self._pool.give_back(self._session)
        else:
            self._discard()
