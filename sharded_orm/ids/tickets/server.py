"""A client for one ticket server: takes ids, and remembers the server's failures and last ids."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import OperationalError, connections

from sharded_orm.circuit_breaker import CircuitBreaker
from sharded_orm.forks import identity
from sharded_orm.ids.tickets.exceptions import (
    SequenceExhausted,
    SequenceNotChecked,
    TicketError,
    TicketServerBehind,
    TicketServerMisconfigured,
    UnknownSequence,
)
from sharded_orm.ids.tickets.pool import FAILURES, Lent, TicketSessionPool, make_pool
from sharded_orm.ids.tickets.session import (
    LAST_ID,
    CheckedSequence,
    SequenceRow,
    SequenceSlot,
    TicketSession,
)

logger = logging.getLogger("sharded_orm.tickets")

#: Errors of one sequence. The server has answered, so its other sequences may be usable.
OF_ONE_SEQUENCE = (UnknownSequence, SequenceExhausted, TicketServerBehind)
# The row of a sequence is checked again after this number of seconds. One check per connection is
# not enough: the row may be restored from a backup while the connection is open.
_SECONDS_CHECKED = 10.0
_SECONDS_BETWEEN_MARKS = 1.0

# A forked child keeps the session pools of its parent here for ever. If they were used, closed or
# finalised in the child, they would write to the parent's connections.
_of_parents: list[TicketSessionPool] = []


@dataclass
class _State:
    """What one process remembers about a ticket server, such as failures and highest ids.

    A forked child makes a new ``_State``. A process also makes a new one if the alias of the server
    names another database than before, as in a test run.
    """

    database: Any
    pool: TicketSessionPool
    breaker: CircuitBreaker
    process: tuple[int, int] = field(default_factory=identity)
    #: Maps sequences to the highest id that the server is known to have handed out.
    high_water_marks: dict[str, int] = field(default_factory=dict)
    #: Held while a number in ``high_water_marks`` or ``refusals`` is raised. These numbers never
    #: become lower.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: After a failure of the server, one caller holds this lock and tries the server again. The
    #: other callers wait for its result.
    probing: threading.Lock = field(default_factory=threading.Lock)
    #: Maps sequences to the time (``time.monotonic()``) at which the predecessor's high-water mark
    #: was last written on this server. The predecessor is the server before this one in
    #: ``TICKETS``.
    predecessor_mark_written: dict[str, float] = field(default_factory=dict)
    #: The sequences for which the partner (the next server in ``TICKETS``) could not tell this
    #: server's high-water mark, its highest id. A warning was logged for each. It is not repeated
    #: while the sequence is in this set.
    unchecked: set[str] = field(default_factory=set)
    #: Maps sequences to the number of times that this process found the server behind: its position
    #: was below its high-water mark, so it had forgotten ids.
    refusals: dict[str, int] = field(default_factory=dict)


class TicketServer:
    """A client that takes ids from one ticket server. Thread-safe and fork-safe.

    The high-water mark of a server is the highest id of a sequence that it is known to have handed
    out. Its :attr:`partner`, the next server in ``TICKETS``, stores this mark. In turn, the server
    stores the mark of its :attr:`predecessor`, the server before it.

    If a server's position in a sequence is below its mark, it has forgotten ids, for example
    because it was restored from a backup. Then it is not used (:exc:`TicketServerBehind`).

    :param slot: the numbers that this server may hand out.
    :param patience: the longest time, in seconds, to wait for an answer of the server.
    :param backoff: seconds for which the server, or one of its sequences, is not asked after a
        failure.
    :param needs_partner: True if ``PARTNER_DOWN`` is ``"refuse"``: a new session then hands out no
        id until this server's high-water mark was read from the partner. If False (the default),
        ids are handed out even if the partner does not answer.
    """

    partner: TicketServer | None = None
    predecessor: TicketServer | None = None

    def __init__(
        self,
        alias: str,
        slot: SequenceSlot,
        patience: float,
        backoff: float,
        needs_partner: bool = False,
    ) -> None:
        self.alias = alias
        self.slot = slot
        self.patience = patience
        self._backoff = backoff
        self._needs_partner = needs_partner
        # Held while _state is replaced.
        self._lock = threading.Lock()
        self._state = self._new_state(None)

    # ##### Handing out #####

    def take(self, name: str, count: int) -> Sequence[int]:
        """Take and return ``count`` new ids of sequence ``name``, ascending.

        Costs one round trip. The first call for a sequence on a connection costs more, and so does
        one call in every ten seconds after that. These calls also read two things:

        - from the partner server, this server's high-water mark: the highest id that it is known to
          have handed out;
        - from this server, the sequence's row and position.
        """
        state = self._current()
        deadline = time.monotonic() + self.patience
        try:
            with state.pool.lend(deadline) as lent:
                ids = lent.ask(lambda session: self._take(state, lent, session, name, count))
        except OF_ONE_SEQUENCE as exc:
            self._recovered(state, None)
            self._failed(state, name, exc)
            raise
        except SequenceNotChecked:
            # Do not record a failure of this server: the partner, which stores the server's
            # high-water mark, did not answer.
            raise
        except FAILURES as exc:
            self._failed(state, None, exc)
            raise
        self._recovered(state, None, name)
        return ids

    def probe(self, name: str, count: int, started: float) -> Sequence[int]:
        """Take ids like :meth:`take`, although this server failed lately. Called if no other server
        has returned ids.

        One caller at a time calls the server, and the other callers wait. If the call fails, its
        error is also raised in each waiting caller whose request had started before the failure.

        :param started: when the caller's request started (``time.monotonic()``).
        """
        state = self._current()
        if self._has_recovered(state, name, started):
            return self.take(name, count)
        if not state.probing.acquire(timeout=self.patience):
            raise OperationalError("it is left alone, and does not answer another caller")
        try:
            if not self._has_recovered(state, name, started):
                return self.take(name, count)
        finally:
            state.probing.release()
        return self.take(name, count)

    def _has_recovered(self, state: _State, name: str, started: float) -> bool:
        """Return True if no failure of the server or of its sequence ``name`` is recorded any more.

        This is so if another caller has taken ids in the meantime.

        :raises Exception: another caller has got an error since the time ``started``. A copy of
            this error is raised.
        """
        for key in (None, name):
            if (cause := state.breaker.cause(key, since=started)) is not None:
                raise _again(cause)
        return state.breaker.cause(None) is None and state.breaker.cause(name) is None

    def _take(
        self, state: _State, lent: Lent, session: TicketSession, name: str, count: int
    ) -> Sequence[int]:
        checked = session.checked.get(name)
        if (
            checked is None
            or checked.until <= time.monotonic()
            or checked.refusals != state.refusals.get(name, 0)
        ):
            refusals = state.refusals.get(name, 0)
            started = time.monotonic()
            learned = self._learn_high_water_mark(state, name, new_connection=checked is None)
            # Waiting for the partner has taken a part of the time. Add it to the deadline, so that
            # this server still has its full time to answer.
            lent.deadline += time.monotonic() - started
            row = self._verify(state, session, name, lent.deadline)
            seconds = _SECONDS_CHECKED if learned else self._backoff
            session.checked[name] = CheckedSequence(row, time.monotonic() + seconds, refusals)
        else:
            row = checked.row
        deadline = lent.deadline
        # Read the high-water mark (the highest id handed out so far) before asking for ids. If it
        # were read later, another thread's newer ids might have raised it already. Then the ids of
        # this request would wrongly seem to be repeated.
        high_water_mark = state.high_water_marks.get(name, 0)
        predecessor_mark = (
            self.predecessor.high_water_mark(name) if self.predecessor is not None else 0
        )
        ids = session.take(row, count, predecessor_mark, deadline)
        if not ids:
            session.checked.pop(name, None)
            raise self._nothing_left(session, name, count, deadline)
        if not self.slot.owns(ids[-1]):
            raise self._misplaced(row, f"its last id was {ids[-1]!r}")
        if ids[0] <= high_water_mark:
            with state.lock:
                state.refusals[name] = state.refusals.get(name, 0) + 1
            raise self._behind(name, f"gave id {ids[0]!r}", high_water_mark)
        self._raise_high_water_mark(state, name, ids[-1])
        if predecessor_mark and row.form not in session.carries_predecessor_mark:
            self._keep_predecessor_mark(state, session, name, predecessor_mark, deadline)
        return ids

    def _verify(
        self, state: _State, session: TicketSession, name: str, deadline: float
    ) -> SequenceRow:
        # Read the high-water mark (the highest id handed out so far) before the sequence's
        # position. Both only rise. So on a healthy server, a position that is read later is never
        # below the mark.
        high_water_mark = state.high_water_marks.get(name, 0)
        row = self._check(session, name, deadline)
        position = session.position(row, deadline)
        # A high-water mark (the highest id handed out so far) of 0 means that no mark is known. Do
        # not compare it with the position, because the position of a new sequence may be below 0.
        if high_water_mark and position < high_water_mark:
            # The server stands below its high-water mark, so it has forgotten ids. Refuse it before
            # an id is taken. Taking ids would raise the position above the mark, and later checks
            # would pass. But other processes may have got ids above the mark, and these would be
            # repeated.
            raise self._behind(name, f"stands at {position!r}", high_water_mark)
        return row

    def _behind(self, name: str, evidence: str, high_water_mark: int) -> TicketServerBehind:
        return TicketServerBehind(
            f"{self.alias!r} {evidence} in sequence {name!r}, but {high_water_mark!r} has left it before:"
            " it may have come back from a backup. Run 'manage.py tickets verify', then 'manage.py"
            " tickets advance'."
        )

    def _check(self, session: TicketSession, name: str, deadline: float) -> SequenceRow:
        row = session.read(name, deadline)
        if row is None:
            raise UnknownSequence(
                f"{self.alias!r} has no sequence {name!r}. Create it with"
                f" 'manage.py tickets create {name}'."
            )
        if row.slot != self.slot:
            raise self._misplaced(row, f"it was made as server {row.position!r} of {row.step!r}")
        return row

    def _misplaced(self, row: SequenceRow, evidence: str) -> TicketServerMisconfigured:
        slot = self.slot
        return TicketServerMisconfigured(
            f"SHARDED_ORM['TICKETS'] has {self.alias!r} as server {slot.position!r} of"
            f" {slot.step!r}, but for its sequence {row.name!r} {evidence}: two servers may give the"
            " same ids. Is one database listed twice, or did order or number of TICKETS change?"
        )

    def _nothing_left(
        self, session: TicketSession, name: str, count: int, deadline: float
    ) -> Exception:
        """Return the error for a sequence that gave no id: its counter is gone, or no ids are left.

        :raises UnknownSequence: the sequence has no row in the catalog, the table of sequences.
        :raises TicketServerMisconfigured: the row was made for another server.
        """
        row = self._check(session, name, deadline)
        position = session.position(row, deadline)
        if position <= LAST_ID - count * self.slot.step:
            return UnknownSequence(
                f"what sequence {name!r} on {self.alias!r} counts with is gone; run 'manage.py tickets"
                f" advance {name}'"
            )
        return SequenceExhausted(
            f"Sequence {name!r} on {self.alias!r} stands at {position!r} and has fewer than"
            f" {count!r} numbers left below 2**63. Continue with a new sequence."
        )

    # ##### Marks #####

    def high_water_mark(self, name: str) -> int:
        """Return the highest id of sequence ``name`` that this server is known to have handed out.

        Return 0 if no such id is known. Costs no round trip: only this process's memory is used.
        """
        return self._state.high_water_marks.get(name, 0)

    def _raise_high_water_mark(self, state: _State, name: str, high_water_mark: int) -> None:
        with state.lock:
            if high_water_mark > state.high_water_marks.get(name, 0):
                state.high_water_marks[name] = high_water_mark

    def _learn_high_water_mark(self, state: _State, name: str, *, new_connection: bool) -> bool:
        """Read this server's high-water mark from the partner, because other processes may have
        raised it.

        The mark is the highest id that this server is known to have handed out. The partner is the
        next server in ``TICKETS``.

        :param new_connection: True if the sequence ``name`` is checked on this connection for the
            first time.
        :returns: True if the mark was read or there is no partner; False if it could not be read.
        :raises SequenceNotChecked: the mark could not be read, the connection is new, and
            ``PARTNER_DOWN`` is ``"refuse"``.
        """
        if self.partner is None:
            return True
        try:
            # With PARTNER_DOWN "refuse", no id may be taken from this server before the partner has
            # told the server's high-water mark. So if both of them failed lately, ask the partner
            # even during its backoff, the seconds for which it is usually not asked.
            even_if_left_alone = (
                self._needs_partner and new_connection and state.breaker.cause() is not None
            )
            high_water_mark = self.partner.predecessor_mark(
                name, even_if_left_alone=even_if_left_alone
            )
        except (*FAILURES, UnknownSequence) as exc:
            if self._needs_partner and new_connection:
                raise SequenceNotChecked(
                    f"{self.partner.alias!r}, which keeps the mark of {self.alias!r}, could not tell"
                    f" it, and PARTNER_DOWN is 'refuse': {exc}"
                ) from exc
            if name not in state.unchecked:
                state.unchecked.add(name)
                logger.warning(
                    "Ticket server %r hands out ids of %r unchecked: %r, which keeps its mark, could"
                    " not tell it (%s).",
                    self.alias, name, self.partner.alias, exc,
                )  # fmt: skip
            return False
        state.unchecked.discard(name)
        self._raise_high_water_mark(state, name, high_water_mark)
        return True

    def predecessor_mark(self, name: str, *, even_if_left_alone: bool = False) -> int:
        """Read the high-water mark of :attr:`predecessor` from this server, which stores it.

        The mark is the highest id that the predecessor, the server before this one in ``TICKETS``,
        is known to have handed out. Costs one round trip.

        :param even_if_left_alone: whether to call this server even if it failed within the last
            ``backoff`` seconds. If False (the default), a call within these seconds raises
            :exc:`OperationalError`.
        :raises OperationalError: this server failed lately and is not called, or does not answer.
        :raises UnknownSequence: this server does not have the sequence.
        """
        state = self._current()
        if not state.breaker.claim(None) and not even_if_left_alone:
            raise OperationalError(f"it is left alone: {state.breaker.cause()}")
        deadline = time.monotonic() + self.patience
        try:
            with state.pool.lend(deadline) as lent:
                row = lent.ask(lambda session: self._check(session, name, deadline))
        except FAILURES as exc:
            self._failed(state, None, exc)
            raise
        # The server has answered this read, but perhaps it cannot write. So do not mark it as
        # recovered. Only let the next caller try to take ids from it, before the backoff ends.
        state.breaker.half_open(None)
        return row.predecessor_mark

    def _keep_predecessor_mark(
        self,
        state: _State,
        session: TicketSession,
        name: str,
        predecessor_mark: int,
        deadline: float,
    ) -> None:
        # Store the predecessor's mark (the highest known id of the server before this one) at most
        # once a second. Storing it with every id would cost an extra statement each time.
        now = time.monotonic()
        written = state.predecessor_mark_written.get(name, -_SECONDS_BETWEEN_MARKS)
        if now - written >= _SECONDS_BETWEEN_MARKS:
            state.predecessor_mark_written[name] = now
            session.keep_predecessor_mark(name, predecessor_mark, deadline)

    # ##### Health #####

    def claim(self, name: str) -> bool:
        """Return False if the caller must not ask the server for ids of sequence ``name`` now.

        This is so for some seconds after a failure; see :meth:`CircuitBreaker.claim`.
        """
        # Right after a fork, self._state is still that of the parent. Reading the breaker's
        # is_closed is safe even then, because it takes no lock, which might have been held at the
        # fork.
        return self._state.breaker.is_closed or self._current().breaker.claim(None, name)

    def cause(self, name: str | None = None) -> Exception | None:
        """Return the last failure of the server or of its sequence ``name``; None if there is none."""
        return self._current().breaker.cause(name)

    def _failed(self, state: _State, key: str | None, exc: Exception) -> None:
        if key is None:
            # This is a failure of the whole server, not of one sequence. The server's idle sessions
            # are most likely dead as well, so close them.
            state.pool.close()
        if state.breaker.trip(key, exc):
            level = logging.ERROR if isinstance(exc, TicketError) else logging.WARNING
            logger.log(level, "Ticket server %r is left alone: %s", self.alias, exc)

    def _recovered(self, state: _State, *keys: str | None) -> None:
        for key in keys:
            if state.breaker.reset(key):
                what = "" if key is None else f" for {key!r}"
                logger.info("Ticket server %r is used again%s.", self.alias, what)

    # ##### Sessions #####

    def session(self, deadline: float) -> Lent:
        """Return a context manager that lends a session with the server, for administration.

        :param deadline: the time (``time.monotonic()``) by which the server must have answered.
        """
        return self._current().pool.lend(deadline)

    def close(self) -> None:
        """Close the idle sessions with this server; later requests open new ones."""
        self._current().pool.close()

    def _current(self) -> _State:
        """Return the state of the server in this process.

        After a fork, or if the alias names another database than before, make a new state first.
        """
        state = self._state
        database = connections.settings[self.alias]["NAME"]
        if state.database == database and state.process == identity():
            return state
        return self._renewed(state, database)

    def _renewed(self, state: _State, database: Any) -> _State:
        if state.process != identity():
            _of_parents.append(state.pool)
            # This is a forked child. Replace the lock, which another thread of the parent may have
            # held at the fork.
            self._lock = threading.Lock()
        with self._lock:
            if self._state is not state:
                return self._state
            new = self._state = self._new_state(database)
            if state.database == database:
                new.high_water_marks.update(state.high_water_marks)
        if state.process == new.process:
            state.pool.close(for_good=True)
        return new

    def _new_state(self, database: Any) -> _State:
        pool = make_pool(self.alias, self.slot, self.patience)
        return _State(database, pool, CircuitBreaker(self._backoff))


def _again(cause: Exception) -> Exception:
    """Return a copy of the error ``cause``: each caller raises a copy with its own traceback."""
    if isinstance(cause, TicketError):
        return type(cause)(*cause.args)
    return OperationalError(*cause.args)
