"""One ticket server: its place, its health, and what is known to have left it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import OperationalError, connections

from sharded_orm.circuit_breaker import CircuitBreaker
from sharded_orm.exceptions import (
    SequenceExhausted,
    SequenceNotChecked,
    TicketError,
    TicketServerBehind,
    TicketServerMisconfigured,
    UnknownSequence,
)
from sharded_orm.forks import identity
from sharded_orm.ids.tickets.pool import FAILURES, Lent, TicketSessionPool
from sharded_orm.ids.tickets.session import (
    LAST_ID,
    CheckedSequence,
    SequenceRow,
    SequenceSlot,
    TicketSession,
)

logger = logging.getLogger("sharded_orm.tickets")

#: The server answered; what is wrong is one sequence.
OF_ONE_SEQUENCE = (UnknownSequence, SequenceExhausted, TicketServerBehind)
# An open connection does not tell that rows were restored under it.
_SECONDS_CHECKED = 10.0
_SECONDS_BETWEEN_MARKS = 1.0

# Pools that a fork copied into this process. To use, close or finalise their sessions
# would speak into the parent's conversations; kept, so that nothing does.
_of_parents: list[TicketSessionPool] = []


@dataclass
class _State:
    """What belongs to one process and one database; replaced as a whole, never repaired."""

    database: Any
    pool: TicketSessionPool
    breaker: CircuitBreaker
    process: tuple[int, int] = field(default_factory=identity)
    #: The highest id of each sequence that is known to have left the server.
    marks: dict[str, int] = field(default_factory=dict)
    #: Guards the marks: they never go back.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: Held by the one caller that asks a server which is left alone; the others share its luck.
    probing: threading.Lock = field(default_factory=threading.Lock)
    #: Sequence -> when the partner's mark was last written here.
    marks_kept: dict[str, float] = field(default_factory=dict)
    unchecked: set[str] = field(default_factory=set)
    #: Sequence -> how often it was refused as one that is behind.
    refusals: dict[str, int] = field(default_factory=dict)


class TicketServer:
    """Hands out the ids of its :class:`SequenceSlot`. Thread-safe and fork-safe.

    :param patience: seconds that the server has to answer.
    :param backoff: seconds that it, or a sequence of it, is left alone after a failure.
    :param needs_partner: whether a new session waits for the partner's mark (the policy
        ``PARTNER_DOWN``).

    Its marks are kept by its :attr:`partner`, the next server of the ring; it keeps those
    of its :attr:`ward`. A server that falls below a mark is one that has forgotten ids, and
    hands out nothing (:exc:`TicketServerBehind`).
    """

    partner: TicketServer | None = None
    ward: TicketServer | None = None

    def __init__(
        self,
        alias: str,
        place: SequenceSlot,
        patience: float,
        backoff: float,
        needs_partner: bool = False,
    ) -> None:
        self.alias = alias
        self.place = place
        self.patience = patience
        self._backoff = backoff
        self._needs_partner = needs_partner
        # Guards the swap of the state.
        self._lock = threading.Lock()
        self._state = self._new_state(None)

    # ##### Handing out #####

    def take(self, name: str, count: int) -> Sequence[int]:
        """``count`` ids, ascending.

        One round trip. Two more for the first id of a connection, and every ten seconds:
        one asks the partner for the mark, one where the sequence stands.
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
            raise  # The partner's doing.
        except FAILURES as exc:
            self._failed(state, None, exc)
            raise
        self._recovered(state, None, name)
        return ids

    def probe(self, name: str, count: int, began: float) -> Sequence[int]:
        """:meth:`take` while the server is left alone, because no other one serves.

        One caller at a time asks; who waited meanwhile shares a failure that is younger than
        its own request.

        :param began: when the caller's request did.
        """
        state = self._current()
        if self._share_luck(state, name, began):
            return self.take(name, count)
        if not state.probing.acquire(timeout=self.patience):
            raise OperationalError("it is left alone, and does not answer another caller")
        try:
            if not self._share_luck(state, name, began):
                return self.take(name, count)
        finally:
            state.probing.release()
        return self.take(name, count)

    def _share_luck(self, state: _State, name: str, began: float) -> bool:
        """Whether it is well by now. Raises what another caller has met since ``began``."""
        for key in (None, name):
            if (cause := state.breaker.cause(key, since=began)) is not None:
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
            began = time.monotonic()
            learned = self._learn_mark(state, name, anew=checked is None)
            # The partner's silence does not shorten this server's time.
            lent.deadline += time.monotonic() - began
            row = self._verify(state, session, name, lent.deadline)
            seconds = _SECONDS_CHECKED if learned else self._backoff
            session.checked[name] = CheckedSequence(row, time.monotonic() + seconds, refusals)
        else:
            row = checked.row
        deadline = lent.deadline
        # Read before the request is sent: answers that overtake each other are no alarm.
        mark = state.marks.get(name, 0)
        of_ward = self.ward.mark(name) if self.ward is not None else 0
        ids = session.take(row, count, of_ward, deadline)
        if not ids:
            session.checked.pop(name, None)
            raise self._nothing_left(session, name, count, deadline)
        if not self.place.owns(ids[-1]):
            raise self._misplaced(row, f"its last id was {ids[-1]!r}")
        if ids[0] <= mark:
            with state.lock:
                state.refusals[name] = state.refusals.get(name, 0) + 1
            raise self._behind(name, f"gave id {ids[0]!r}", mark)
        self._raise_mark(state, name, ids[-1])
        if of_ward and row.form not in session.carries_marks:
            self._keep_mark_of_ward(state, session, name, of_ward, deadline)
        return ids

    def _verify(
        self, state: _State, session: TicketSession, name: str, deadline: float
    ) -> SequenceRow:
        # The mark before the position, which may rise at any time and does not fall.
        mark = state.marks.get(name, 0)
        row = self._check(session, name, deadline)
        position = session.position(row, deadline)
        if position < mark and mark:  # 0 is none, and a new sequence stands at -1.
            # Not found out by taking ids, as each attempt would bring it nearer to the mark:
            # between that and the last id that left it may be some that nobody here knows of.
            raise self._behind(name, f"stands at {position!r}", mark)
        return row

    def _behind(self, name: str, found: str, mark: int) -> TicketServerBehind:
        return TicketServerBehind(
            f"{self.alias!r} {found} in sequence {name!r}, but {mark!r} has left it before: it may"
            " have come back from a backup. Run 'manage.py tickets verify', then 'manage.py tickets"
            " advance'."
        )

    def _check(self, session: TicketSession, name: str, deadline: float) -> SequenceRow:
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
        self, session: TicketSession, name: str, count: int, deadline: float
    ) -> Exception:
        """Why nothing was handed out: no row, another server's, no counter, or used up."""
        row = self._check(session, name, deadline)
        position = session.position(row, deadline)
        if position <= LAST_ID - count * self.place.step:
            return UnknownSequence(
                f"what sequence {name!r} on {self.alias!r} counts with is gone; run 'manage.py tickets"
                f" advance {name}'"
            )
        return SequenceExhausted(
            f"Sequence {name!r} on {self.alias!r} stands at {position!r} and has fewer than"
            f" {count!r} numbers left below 2**63. Continue with a new sequence."
        )

    # ##### Marks #####

    def mark(self, name: str) -> int:
        """The highest id of ``name`` that is known to have left this server; 0 for none."""
        return self._state.marks.get(name, 0)

    def _raise_mark(self, state: _State, name: str, mark: int) -> None:
        with state.lock:
            if mark > state.marks.get(name, 0):
                state.marks[name] = mark

    def _learn_mark(self, state: _State, name: str, *, anew: bool) -> bool:
        """Ask the partner for the mark that other processes have left with it.

        Whether it told.

        :param anew: nothing was taken on this connection yet.
        """
        if self.partner is None:
            return True
        try:
            # If this server is left alone itself, this is the one caller that tries it. Without
            # the partner it could not, and the partner's one not without this server.
            at_any_rate = self._needs_partner and anew and state.breaker.cause() is not None
            mark = self.partner.mark_of_ward(name, at_any_rate=at_any_rate)
        except (*FAILURES, UnknownSequence) as exc:
            if self._needs_partner and anew:
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
        self._raise_mark(state, name, mark)
        return True

    def mark_of_ward(self, name: str, *, at_any_rate: bool = False) -> int:
        """What is kept here for the server before this one. One round trip.

        :param at_any_rate: ask also while this server is left alone; otherwise that raises
            at once.
        """
        state = self._current()
        if not state.breaker.claim(None) and not at_any_rate:
            raise OperationalError(f"it is left alone: {state.breaker.cause()}")
        deadline = time.monotonic() + self.patience
        try:
            with state.pool.lend(deadline) as lent:
                row = lent.ask(lambda session: self._check(session, name, deadline))
        except FAILURES as exc:
            self._failed(state, None, exc)
            raise
        # It may be that it can read and not write.
        state.breaker.half_open(None)
        return row.partner_mark

    def _keep_mark_of_ward(
        self, state: _State, session: TicketSession, name: str, mark: int, deadline: float
    ) -> None:
        # A statement of its own: not for every id.
        now = time.monotonic()
        if now - state.marks_kept.get(name, -_SECONDS_BETWEEN_MARKS) >= _SECONDS_BETWEEN_MARKS:
            state.marks_kept[name] = now
            session.keep_mark(name, mark, deadline)

    # ##### Health #####

    def claim(self, name: str) -> bool:
        """Whether to ask for ids of ``name`` now; if it was left alone, this caller tries it."""
        # Without a lock that a thread of the parent may have held when this process was forked.
        return self._state.breaker.is_closed or self._current().breaker.claim(None, name)

    def cause(self, name: str | None = None) -> Exception | None:
        """Why the server, or a sequence of it, is left alone; None while it is well."""
        return self._current().breaker.cause(name)

    def _failed(self, state: _State, key: str | None, exc: Exception) -> None:
        if key is None:
            state.pool.close()  # They are as dead, most likely.
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
        """A context manager that lends a session, for administration."""
        return self._current().pool.lend(deadline)

    def close(self) -> None:
        """Close the idle sessions."""
        self._current().pool.close()

    def _current(self) -> _State:
        """The state of this process and database: tests change the database under an alias."""
        state = self._state
        database = connections.settings[self.alias]["NAME"]
        if state.database == database and state.process == identity():
            return state
        return self._renewed(state, database)

    def _renewed(self, state: _State, database: Any) -> _State:
        if state.process != identity():
            _of_parents.append(state.pool)
            # Another thread of the parent may have held it.
            self._lock = threading.Lock()
        with self._lock:
            if self._state is not state:
                return self._state
            new = self._state = self._new_state(database)
            if state.database == database:
                new.marks.update(state.marks)
        if state.process == new.process:
            state.pool.close(for_good=True)
        return new

    def _new_state(self, database: Any) -> _State:
        pool = TicketSessionPool(self.alias, self.place, self.patience)
        return _State(database, pool, CircuitBreaker(self._backoff))


def _again(cause: Exception) -> Exception:
    """The same error for another caller, with a traceback of its own."""
    if isinstance(cause, TicketError):
        return type(cause)(*cause.args)
    return OperationalError(*cause.args)
