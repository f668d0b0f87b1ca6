"""One ticket server: its connections, its health, and what is known to have left it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import OperationalError, connections
from django.db.utils import Error

from sharded_orm.exceptions import (
    SequenceExhausted,
    TicketError,
    TicketServerBehind,
    TicketServerMisconfigured,
    UnknownSequence,
)
from sharded_orm.ids.tickets.session import (
    Place,
    SequenceRow,
    Session,
    seconds_left,
    session_class,
)

T = TypeVar("T")

logger = logging.getLogger("sharded_orm.tickets")

#: What a server that is down, unreachable or unwell raises.
FAILURES = (Error, OSError, TicketServerBehind)
_MAX_IDLE = 16
_SECONDS_BETWEEN_MARKS = 1.0

# Sessions that a fork copied into this process. To use, close or finalise them would
# speak into the parent's conversations; kept, so that nothing does.
_of_parents: list[list[Session]] = []


@dataclass
class _State:
    """What belongs to one process and one database; replaced as a whole, never repaired."""

    database: str
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    idle: list[Session] = field(default_factory=list)
    #: The highest id of each sequence that is known to have left the server.
    marks: dict[str, int] = field(default_factory=dict)
    #: Why the server is left alone, and until when.
    cause: Exception | None = None
    retry_at: float = 0.0
    #: Sequence -> when the partner's mark was last written here.
    marks_kept: dict[str, float] = field(default_factory=dict)
    complained: set[str] = field(default_factory=set)


class TicketServer:
    """Hands out the ids of its :class:`Place`. Thread-safe and fork-safe.

    :param patience: seconds that the server has to answer.
    :param backoff: seconds that it is left alone when it has failed.
    :param needs_partner: whether a new session waits for the partner's mark (the policy
        ``PARTNER_DOWN``).

    Its marks are kept by its :attr:`partner`, the next server of the ring; it keeps those
    of its :attr:`ward`. A server that falls below a mark is one that has forgotten ids, and
    hands out nothing (:exc:`TicketServerBehind`).
    """

    partner: TicketServer | None = None
    ward: TicketServer | None = None

    def __init__(
        self, alias: str, place: Place, patience: float, backoff: float, needs_partner: bool = False
    ) -> None:
        self.alias = alias
        self.place = place
        self.patience = patience
        self._backoff = backoff
        self._needs_partner = needs_partner
        self._state = _State("")

    # ##### Handing out #####

    def take(self, name: str, count: int, deadline: float) -> Sequence[int]:
        """``count`` ids, ascending.

        One round trip; the first time on a connection, two more: one that asks the partner
        for the mark, one that checks the sequence and where it stands.
        """
        state = self._current()
        with _Borrowed(self, state, deadline) as borrowed:
            ids = borrowed.ask(lambda session: self._take(state, session, name, count, deadline))
        self._recovered(state)
        return ids

    def _take(
        self, state: _State, session: Session, name: str, count: int, deadline: float
    ) -> Sequence[int]:
        row = session.known.get(name)
        if row is None or name in session.unmarked:
            row = self._verify(state, session, name, deadline)
        # Read before the request is sent: answers that overtake each other are no alarm.
        mark = state.marks.get(name, 0)
        of_ward = self.ward.mark(name) if self.ward is not None else 0
        ids = session.take(row, count, of_ward, deadline)
        if not ids:
            session.known.pop(name, None)
            raise self._nothing_left(session, name, count, deadline)
        if not self.place.owns(ids[-1]):
            raise self._misplaced(row, f"its last id was {ids[-1]!r}")
        if ids[0] <= mark:
            raise self._behind(name, f"gave id {ids[0]!r}", mark)
        with state.lock:
            if ids[-1] > state.marks.get(name, 0):
                state.marks[name] = ids[-1]
        if of_ward and row.form not in session.carries_marks:
            self._keep_mark_of_ward(state, session, name, of_ward, deadline)
        return ids

    def _verify(self, state: _State, session: Session, name: str, deadline: float) -> SequenceRow:
        """The row of a sequence of which nothing was taken on this connection yet."""
        learned = self._learn_mark(state, session, name, deadline)
        known = session.known.get(name)
        if known is not None and not learned:
            return known
        # Before the position is read, which may rise at any time and does not fall.
        mark = state.marks.get(name, 0)
        row = self._check(session, name, deadline)
        position = session.position(row, deadline)
        if position < mark and mark:  # 0 is none, and a new sequence stands at -1.
            # Not found out by taking ids, as each attempt would bring it nearer to the mark:
            # between that and the last id that left it may be some that nobody here knows of.
            raise self._behind(name, f"stands at {position!r}", mark)
        session.known[name] = row
        return row

    def _behind(self, name: str, found: str, mark: int) -> TicketServerBehind:
        return TicketServerBehind(
            f"{self.alias!r} {found} in sequence {name!r}, but {mark!r} has left it before: it may"
            " have come back from a backup. Run 'manage.py tickets verify', then 'manage.py tickets"
            " advance'."
        )

    def _check(self, session: Session, name: str, deadline: float) -> SequenceRow:
        row = session.read(name, deadline)
        if row is None:
            raise UnknownSequence(
                f"{self.alias!r} has no sequence {name!r}. Create it with"
                f" 'manage.py tickets create {name}'."
            )
        if row.place != self.place:
            raise self._misplaced(row, f"it was made as server {row.position!r} of {row.step!r}")
        return row

    def _misplaced(self, row: SequenceRow, found: str) -> TicketServerMisconfigured:
        place = self.place
        return TicketServerMisconfigured(
            f"SHARDED_ORM['TICKETS'] has {self.alias!r} as server {place.position!r} of"
            f" {place.step!r}, but for its sequence {row.name!r} {found}: two servers may give the"
            " same ids. Is one database listed twice, or did order or number of TICKETS change?"
        )

    def _nothing_left(
        self, session: Session, name: str, count: int, deadline: float
    ) -> SequenceExhausted:
        """Why the row did not serve: gone, another server's, or used up."""
        self._check(session, name, deadline)
        return SequenceExhausted(
            f"Sequence {name!r} on {self.alias!r} has fewer than {count!r} numbers left below"
            " 2**63. Continue with a new sequence."
        )

    # ##### Marks #####

    def mark(self, name: str) -> int:
        """The highest id of ``name`` that is known to have left this server; 0 for none."""
        return self._state.marks.get(name, 0)

    def _learn_mark(self, state: _State, session: Session, name: str, deadline: float) -> bool:
        """Ask the partner for the mark that other processes have left with it.

        Whether it told.
        """
        if self.partner is None:
            return True
        try:
            # Half of the time, so that the partner's silence leaves enough for the id.
            mark = self.partner.mark_of_ward(name, time.monotonic() + seconds_left(deadline) / 2)
        except FAILURES as exc:
            if self._needs_partner:
                raise OperationalError(
                    f"{self.partner.alias!r}, which keeps its mark, does not answer, and"
                    f" PARTNER_DOWN is 'refuse': {exc}"
                ) from exc
            session.unmarked.add(name)
            if f"mark of {name}" not in state.complained:
                state.complained.add(f"mark of {name}")
                logger.warning(
                    "Ticket server %r hands out ids of %r unchecked: %r, which keeps its mark, does"
                    " not answer (%s).",
                    self.alias, name, self.partner.alias, exc,
                )  # fmt: skip
            return False
        session.unmarked.discard(name)
        state.complained.discard(f"mark of {name}")
        with state.lock:
            if mark > state.marks.get(name, 0):
                state.marks[name] = mark
        return True

    def mark_of_ward(self, name: str, deadline: float) -> int:
        """What is kept here for the server before this one. One round trip.

        Raises at once while this server is left alone.
        """
        state = self._current()
        if not self.claim():
            assert state.cause is not None
            raise OperationalError(str(state.cause)) from state.cause
        try:
            with _Borrowed(self, state, deadline) as borrowed:
                row = borrowed.ask(lambda session: self._check(session, name, deadline))
        except UnknownSequence as exc:
            # It may have lost what it kept.
            raise OperationalError(str(exc)) from exc
        except FAILURES as exc:
            self.failed(exc)
            raise
        self._recovered(state)
        return row.partner_mark

    def _keep_mark_of_ward(
        self, state: _State, session: Session, name: str, mark: int, deadline: float
    ) -> None:
        # A statement of its own: not for every id.
        now = time.monotonic()
        if now - state.marks_kept.get(name, -_SECONDS_BETWEEN_MARKS) >= _SECONDS_BETWEEN_MARKS:
            state.marks_kept[name] = now
            session.keep_mark(name, mark, deadline)

    # ##### Health #####

    def claim(self) -> bool:
        """Whether to ask this server now: it is well, or it is this caller's turn to try."""
        state = self._current()
        if state.cause is None:
            return True
        with state.lock:
            now = time.monotonic()
            if now < state.retry_at:
                return False
            state.retry_at = now + self._backoff
            return True

    @property
    def cause(self) -> Exception | None:
        """Why the server is left alone; None while it is well."""
        return self._current().cause

    def failed(self, exc: Exception) -> None:
        """Leave the server alone for a while."""
        state = self._current()
        with state.lock:
            known, state.cause = state.cause, exc
            state.retry_at = time.monotonic() + self._backoff
            idle, state.idle = state.idle, []
        for session in idle:
            session.close()
        if type(known) is not type(exc):
            level = logging.ERROR if isinstance(exc, TicketServerBehind) else logging.WARNING
            logger.log(level, "Ticket server %r is left alone: %s", self.alias, exc)

    def _recovered(self, state: _State) -> None:
        if state.cause is None:
            return
        with state.lock:
            was, state.cause = state.cause, None
        if was is not None:
            logger.info("Ticket server %r is used again.", self.alias)

    def complain_once(self, name: str, exc: Exception) -> None:
        """Log what is wrong with one sequence of a server that is well."""
        state = self._current()
        if name not in state.complained:
            state.complained.add(name)
            logger.error("%s", exc)

    # ##### Sessions #####

    def session(self, deadline: float) -> _Borrowed:
        """A context manager that lends a session, for administration."""
        return _Borrowed(self, self._current(), deadline)

    def _current(self) -> _State:
        """The state of this process and database: tests change the database under an alias."""
        state = self._state
        database = str(connections.settings[self.alias]["NAME"])
        if state.pid != os.getpid():
            _of_parents.append(state.idle)
            marks = dict(state.marks) if state.database == database else {}
            state = self._state = _State(database, marks=marks)
        elif state.database != database:
            idle, state.idle = state.idle, []
            for session in idle:
                session.close()
            state = self._state = _State(database)
        return state

    def _open(self, state: _State, deadline: float) -> Session:
        """A new session by ``deadline``, whatever the driver does until then."""
        wrapper = connections[self.alias]
        kind = session_class(wrapper.vendor)
        settings = connections.settings[self.alias]
        opened: Future[Session] = Future()

        def connect() -> None:
            try:
                opened.set_result(kind(self.alias, settings, self.place, self.patience))
            except BaseException as exc:
                opened.set_exception(exc)

        left = seconds_left(deadline)
        # The driver's limits are whole seconds, and looking up a name has none.
        threading.Thread(target=connect, name=f"connect to {self.alias}", daemon=True).start()
        try:
            return opened.result(left)
        except NotInTime as exc:
            if opened.done():
                raise
            opened.add_done_callback(lambda late: self._keep_late(state, late))
            raise OperationalError(f"no connection within {left:.3g} seconds") from exc

    def _keep_late(self, state: _State, late: Future[Session]) -> None:
        if late.exception() is None:
            self._give_back(state, late.result())

    def _give_back(self, state: _State, session: Session) -> None:
        if state is self._state and len(state.idle) < _MAX_IDLE:
            state.idle.append(session)
        else:
            session.close()

    def close(self) -> None:
        """Close the idle connections."""
        state = self._current()
        idle, state.idle = state.idle, []
        for session in idle:
            session.close()


class _Borrowed:
    """A session for one caller. It goes back if nothing failed, else it is closed."""

    def __init__(self, server: TicketServer, state: _State, deadline: float) -> None:
        self._server, self._state, self._deadline = server, state, deadline
        self._session: Session | None = None

    def __enter__(self) -> _Borrowed:
        connect: Any = connections[self._server.alias].__dict__.get("connect")
        if hasattr(connect, "wrapped"):
            # A test case that may not use this alias: Django has replaced the method by one
            # that raises its error (SimpleTestCase._add_databases_failures).
            connect()
        return self

    def ask(self, work: Callable[[Session], T]) -> T:
        """``work(session)``. One that waited in the pool may be dead; then a new one is asked."""
        try:
            session = self._session = self._state.idle.pop()
        except IndexError:
            session = None
        if session is not None:
            try:
                return work(session)
            except FAILURES as exc:
                if isinstance(exc, TicketServerBehind):
                    raise
                self._discard()
        session = self._session = self._server._open(self._state, self._deadline)
        return work(session)

    def _discard(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __exit__(self, kind: Any, exc: Any, traceback: Any) -> None:
        if self._session is None:
            return
        # After any other error the answer may still be on its way, and would be taken for that
        # to the next request: a signal handler may raise anything at any point.
        if exc is None or (isinstance(exc, TicketError) and not isinstance(exc, FAILURES)):
            self._server._give_back(self._state, self._session)
        else:
            self._discard()
