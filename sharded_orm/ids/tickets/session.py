"""One connection of the generator's own to a ticket server, and what it can ask there."""

from __future__ import annotations

import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.constants import OnConflict
from django.utils.module_loading import import_string

from sharded_orm.exceptions import InvalidSequence

CATALOG = "sharded_orm_sequence"
#: Ids are positive numbers of a signed BIGINT.
LAST_ID = 2**63 - 1
MAX_NAME = 100
_A_MOMENT = 0.01  # seconds

_COLUMNS = ("name", "form", "step", "position", "value", "partner_mark")


@dataclass(frozen=True)
class SequenceSlot:
    """Which of the servers one is: it gives ``position``, ``position + step``, … (F2).

    Counted from 1, as MySQL's ``auto_increment_offset`` is.
    """

    position: int
    step: int

    def owns(self, number: int) -> bool:
        return (number - self.position) % self.step == 0

    def at_or_below(self, number: int) -> int:
        """The largest number of this server that is not above ``number``."""
        return number - (number - self.position) % self.step


@dataclass(frozen=True)
class SequenceRow:
    """A row of the catalog, as one server has it."""

    name: str
    form: str
    step: int
    position: int
    #: The last id that was handed out.
    value: int
    #: Of the server before this one in the ring: the highest id known to have left it.
    partner_mark: int

    @property
    def place(self) -> SequenceSlot:
        return SequenceSlot(self.position, self.step)


@dataclass(frozen=True)
class CheckedSequence:
    """A row that was found to be right; to be looked at again when ``until`` has passed."""

    row: SequenceRow
    until: float
    #: How often the sequence had been refused by then: a refusal is news for all sessions.
    refusals: int


class TicketSession(ABC):
    """A physical connection in autocommit that belongs to the generator alone.

    Used by one thread at a time. Deadlines are of ``time.monotonic()``; what is not
    answered by then raises :exc:`OperationalError`, as every error of the driver does,
    and the session must be closed. To ask again is always safe: an answer that is lost
    loses ids.
    """

    #: Forms of sequences that the database can serve, the default first.
    forms: ClassVar[tuple[str, ...]]
    #: Forms whose statement writes the partner's mark on the way, for nothing.
    carries_marks: ClassVar[frozenset[str]] = frozenset()
    #: The server does not drop a database that has open sessions.
    blocks_drop: ClassVar[bool] = False
    #: Django's own backend. Whatever the alias uses (a leasing backend, say), its parameters serve.
    wrapper_path: ClassVar[str]

    def __init__(
        self, alias: str, settings: Mapping[str, Any], place: SequenceSlot, patience: float
    ):
        """Connect. Takes as long as the driver likes: call it where that does no harm.

        :param patience: seconds that the driver's own time limits are set to, rounded up.
        """
        self.alias = alias
        self.place = place
        self._wrapper: Any = self._make_wrapper(settings, max(1, math.ceil(patience)))
        # Django's own point for opening: signals, and whatever forbids it in tests.
        self._wrapper.ensure_connection()
        self.connection: Any = self._wrapper.connection
        self._wrapper.set_autocommit(True)
        self.table = self._wrapper.ops.quote_name(CATALOG)
        #: The sequences that were checked on this connection. Kept by :class:`TicketServer`.
        self.checked: dict[str, CheckedSequence] = {}
        # The driver's own errors, which are not Django's, would pass by whoever asks the next server.
        with self._wrapper.wrap_database_errors:
            self._prepare()
        _open.add(self)

    def _make_wrapper(self, settings: Mapping[str, Any], seconds: int) -> BaseDatabaseWrapper:
        kind: type[BaseDatabaseWrapper] = import_string(self.wrapper_path)
        options = {**settings.get("OPTIONS", {}), **self._limits(seconds)}
        return kind({**settings, "OPTIONS": options, "CONN_MAX_AGE": None}, self.alias)

    @abstractmethod
    def _limits(self, seconds: int) -> dict[str, Any]:
        """``OPTIONS`` that keep the driver from waiting for ever."""

    def _prepare(self) -> None:
        """What a session sets and verifies when it has connected."""
        return

    # ##### Handing out #####

    @abstractmethod
    def take(self, row: SequenceRow, count: int, mark: int, deadline: float) -> Sequence[int]:
        """``count`` new ids of the sequence, ascending; one round trip.

        :param row: as :meth:`read` told it. If it no longer holds (dropped, moved, or
            without enough numbers), the answer is empty and nothing has happened.
        :param mark: of the partner, to be kept here if the form carries marks.
        """

    # ##### The catalog #####

    @abstractmethod
    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        """Run one statement with ``%s`` parameters; its rows, if it has any."""

    @abstractmethod
    def is_missing_table(self, exc: Exception) -> bool:
        """Whether ``exc`` says that there is no such table."""

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        """The row of one sequence; None when the server has none. One round trip."""
        rows = self._read(" WHERE name = %s", [name], deadline)
        return rows[0] if rows else None

    def read_all(self, deadline: float) -> list[SequenceRow]:
        """All sequences by name; none when even the table is missing. One round trip."""
        return self._read(" ORDER BY name", [], deadline)

    def _read(self, rest: str, params: list[Any], deadline: float) -> list[SequenceRow]:
        columns = ", ".join(map(self._wrapper.ops.quote_name, _COLUMNS))
        try:
            rows = self.execute(f"SELECT {columns} FROM {self.table}{rest}", params, deadline)
        except Exception as exc:  # Of which class, the driver decides.
            if self.is_missing_table(exc):
                return []
            raise
        return [
            SequenceRow(str(row[0]), str(row[1]), *(int(number) for number in row[2:]))
            for row in rows
        ]

    def keep_mark(self, name: str, mark: int, deadline: float) -> None:
        """Keep the partner's mark here; it never goes back. One round trip."""
        quoted = self._wrapper.ops.quote_name("partner_mark")
        self.execute(
            f"UPDATE {self.table} SET {quoted} = %s WHERE name = %s AND {quoted} < %s",
            [mark, name, mark],
            deadline,
        )

    # ##### Administration #####

    def position(self, row: SequenceRow, deadline: float) -> int:
        """The last id that the sequence has handed out (or may have), read from what counts."""
        return row.value

    @abstractmethod
    def create_catalog(self, deadline: float) -> None:
        """Make the table if it is missing."""

    def create(self, name: str, form: str, value: int, deadline: float) -> SequenceRow:
        """Begin a sequence after ``value``, or return the one that is there.

        Safe to run at the same time, and again when it was cut off.
        """
        value = self.place.at_or_below(value)
        self._create_counter(name, form, value, deadline)
        ops = self._wrapper.ops
        columns = ", ".join(map(ops.quote_name, _COLUMNS))
        marks = ", ".join(["%s"] * len(_COLUMNS))
        ignore = OnConflict.IGNORE  # Another process may be faster.
        self.execute(
            f"{ops.insert_statement(on_conflict=ignore)} {self.table} ({columns})"
            f" VALUES ({marks}) {ops.on_conflict_suffix_sql([], ignore, [], [])}",
            [name, form, self.place.step, self.place.position, value, 0],
            deadline,
        )
        row = self.read(name, deadline)
        assert row is not None
        return row

    def _create_counter(self, name: str, form: str, value: int, deadline: float) -> None:
        """What the form counts with beside the row of the catalog."""
        return

    def advance(self, row: SequenceRow, value: int, deadline: float) -> int:
        """Let the sequence go on above ``value``; it never goes back. Its position now."""
        value = self.place.at_or_below(value + self.place.step - 1)
        if value > LAST_ID:
            raise InvalidSequence(
                f"Sequence {row.name!r} cannot be moved to {value!r}: ids end at {LAST_ID!r}."
            )
        self._advance(row, value, deadline)
        now = self.read(row.name, deadline)
        return self.position(now if now is not None else row, deadline)

    def _advance(self, row: SequenceRow, value: int, deadline: float) -> None:
        quoted = self._wrapper.ops.quote_name("value")
        self.execute(
            f"UPDATE {self.table} SET {quoted} = %s WHERE name = %s AND {quoted} < %s",
            [value, row.name, value],
            deadline,
        )

    @abstractmethod
    def durability(self, deadline: float) -> str | None:
        """What lets this server forget ids that it has handed out; None when nothing does."""

    def abandon(self) -> None:
        """In a child: whatever closes the driver's copy, the parent's connection goes on.

        Python closes what it finds open when a process ends, and drivers say goodbye.
        """
        return

    def close(self) -> None:
        """Close the connection, whatever state it is in. Never raises, never waits long."""
        connection, self.connection = self.connection, None
        try:
            if connection is not None:
                connection.close()
        except Exception:
            pass  # Whatever the driver says of it, the connection is given up.


_open: weakref.WeakSet[TicketSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_open):
        # Too many open files, or a driver that has lost it: Python then says goodbye for it.
        with suppress(Exception):
            session.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


def seconds_left(deadline: float) -> float:
    """Until ``deadline``, and never nothing: if it has passed, this process was late.

    A server that is well answers within that moment, too.
    """
    return max(deadline - time.monotonic(), _A_MOMENT)


_SESSIONS = {
    "mysql": "sharded_orm.ids.tickets.mysql.MySQLSession",
    "sqlite": "sharded_orm.ids.tickets.sqlite3.SQLiteSession",
    "postgresql": "sharded_orm.ids.tickets.postgresql.PostgreSQLSession",
}


def session_class(vendor: str) -> type[TicketSession]:
    """The kind of session for a database of ``vendor``, as Django calls it."""
    try:
        found: type[TicketSession] = import_string(_SESSIONS[vendor])
    except KeyError:
        raise InvalidSequence(
            f"A ticket server cannot be a database of vendor {vendor!r}; use one of"
            f" {sorted(_SESSIONS)!r}."
        ) from None
    return found
