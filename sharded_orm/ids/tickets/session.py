"""A session: one connection of the id generator to a ticket server, with its requests."""

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
#: Ids are the positive numbers of a signed BIGINT.
LAST_ID = 2**63 - 1
MAX_NAME = 100
_A_MOMENT = 0.01  # seconds

# "partner_mark" holds :attr:`SequenceRow.predecessor_mark`: the column is older than that name.
_COLUMNS = ("name", "form", "step", "position", "value", "partner_mark")


@dataclass(frozen=True)
class SequenceSlot:
    """The numbers that one of the servers gives: ``position``, ``position + step``, … (F2).

    ``step`` is the number of servers. Positions count from 1, as MySQL's
    ``auto_increment_offset`` does.
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
    """The row of one sequence in the catalog of one server."""

    name: str
    form: str
    step: int
    position: int
    #: The last id that was handed out.
    value: int
    #: The highest id that the predecessor, the server before this one, is known to have given.
    predecessor_mark: int

    @property
    def slot(self) -> SequenceSlot:
        return SequenceSlot(self.position, self.step)


@dataclass(frozen=True)
class CheckedSequence:
    """A row that was found to be right; it is checked again after ``until``."""

    row: SequenceRow
    until: float
    #: How often the sequence had been refused by then: after a refusal, all sessions check again.
    refusals: int


class TicketSession(ABC):
    """A connection in autocommit that only the generator uses.

    One thread uses it at a time. Deadlines are times of ``time.monotonic()``. A request that is
    not answered by then raises :exc:`OperationalError`, as every error of the driver does,
    and the session must be closed. Repeating a request is always safe: if an answer is lost, its
    ids are lost.
    """

    #: Forms of sequences that the database can serve, the default first.
    forms: ClassVar[tuple[str, ...]]
    #: Forms whose statement also writes the predecessor's mark, at no cost.
    carries_predecessor_mark: ClassVar[frozenset[str]] = frozenset()
    #: Django's own backend, which connects with the alias's parameters, whatever its ENGINE is.
    wrapper_path: ClassVar[str]
    #: Whether a database cannot be dropped while a session is open.
    prevents_drop: ClassVar[bool] = False

    def __init__(
        self, alias: str, settings: Mapping[str, Any], slot: SequenceSlot, patience: float
    ):
        """Connect. The driver may take any time: call this in a thread that nobody waits for.

        :param patience: seconds for the driver's own time limits, which are rounded up.
        """
        self.alias = alias
        self.slot = slot
        self._wrapper: Any = self._make_wrapper(settings, max(1, math.ceil(patience)))
        # Django's own method, so that its signals are sent and test cases can forbid it.
        self._wrapper.ensure_connection()
        self.connection: Any = self._wrapper.connection
        self._wrapper.set_autocommit(True)
        self.table = self._wrapper.ops.quote_name(CATALOG)
        #: The sequences that were checked on this connection; :class:`TicketServer` maintains it.
        self.checked: dict[str, CheckedSequence] = {}
        # The driver's own errors become Django's: the generator asks the next server after those.
        with self._wrapper.wrap_database_errors:
            self._prepare()
        _open.add(self)

    def _make_wrapper(self, settings: Mapping[str, Any], seconds: int) -> BaseDatabaseWrapper:
        wrapper_class: type[BaseDatabaseWrapper] = import_string(self.wrapper_path)
        options = {**settings.get("OPTIONS", {}), **self._limits(seconds)}
        return wrapper_class({**settings, "OPTIONS": options, "CONN_MAX_AGE": None}, self.alias)

    @abstractmethod
    def _limits(self, seconds: int) -> dict[str, Any]:
        """``OPTIONS`` that limit how long the driver waits."""

    def _prepare(self) -> None:
        """Set and verify the session's variables, right after connecting."""
        return

    # ##### Handing out #####

    @abstractmethod
    def take(
        self, row: SequenceRow, count: int, predecessor_mark: int, deadline: float
    ) -> Sequence[int]:
        """``count`` new ids of the sequence, ascending; one round trip.

        :param row: the row that :meth:`read` returned. If the sequence differs from it by now
            (dropped, moved, too few numbers left), the answer is empty and nothing has changed.
        :param predecessor_mark: the predecessor's mark, which is stored if the form carries it.
        """

    # ##### The catalog #####

    @abstractmethod
    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        """Run one statement with ``%s`` parameters, and return its rows."""

    @abstractmethod
    def is_missing_table(self, exc: Exception) -> bool:
        """Whether ``exc`` says that there is no such table."""

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        """The row of one sequence; None when the server has none. One round trip."""
        rows = self._read(" WHERE name = %s", [name], deadline)
        return rows[0] if rows else None

    def read_all(self, deadline: float) -> list[SequenceRow]:
        """All sequences, ordered by name; none if the table is missing. One round trip."""
        return self._read(" ORDER BY name", [], deadline)

    def _read(self, clause: str, params: list[Any], deadline: float) -> list[SequenceRow]:
        columns = ", ".join(map(self._wrapper.ops.quote_name, _COLUMNS))
        try:
            rows = self.execute(f"SELECT {columns} FROM {self.table}{clause}", params, deadline)
        except Exception as exc:  # Each driver has classes of its own.
            if self.is_missing_table(exc):
                return []
            raise
        return [
            SequenceRow(str(row[0]), str(row[1]), *(int(number) for number in row[2:]))
            for row in rows
        ]

    def keep_predecessor_mark(self, name: str, predecessor_mark: int, deadline: float) -> None:
        """Store the predecessor's mark on this server; it never goes back. One round trip."""
        quoted = self._wrapper.ops.quote_name("partner_mark")
        self.execute(
            f"UPDATE {self.table} SET {quoted} = %s WHERE name = %s AND {quoted} < %s",
            [predecessor_mark, name, predecessor_mark],
            deadline,
        )

    # ##### Administration #####

    def position(self, row: SequenceRow, deadline: float) -> int:
        """The last id that the sequence has, or may have, handed out."""
        return row.value

    @abstractmethod
    def create_catalog(self, deadline: float) -> None:
        """Create the catalog table if it is missing."""

    def create(self, name: str, form: str, value: int, deadline: float) -> SequenceRow:
        """Create a sequence that goes on after ``value``; return its row, or the existing one.

        Safe to run in many processes at the same time, and again after an interruption.
        """
        value = self.slot.at_or_below(value)
        self._create_counter(name, form, value, deadline)
        ops = self._wrapper.ops
        columns = ", ".join(map(ops.quote_name, _COLUMNS))
        placeholders = ", ".join(["%s"] * len(_COLUMNS))
        ignore = OnConflict.IGNORE  # Another process may be faster.
        self.execute(
            f"{ops.insert_statement(on_conflict=ignore)} {self.table} ({columns})"
            f" VALUES ({placeholders}) {ops.on_conflict_suffix_sql([], ignore, [], [])}",
            [name, form, self.slot.step, self.slot.position, value, 0],
            deadline,
        )
        row = self.read(name, deadline)
        assert row is not None
        return row

    def _create_counter(self, name: str, form: str, value: int, deadline: float) -> None:
        """Create the counter, if the form has one beside the row of the catalog."""
        return

    def advance(self, row: SequenceRow, value: int, deadline: float) -> int:
        """Move the sequence to ``value`` or above, never back, and return its position."""
        value = self.slot.at_or_below(value + self.slot.step - 1)
        if value > LAST_ID:
            raise InvalidSequence(
                f"Sequence {row.name!r} cannot be moved to {value!r}: ids end at {LAST_ID!r}."
            )
        self._advance(row, value, deadline)
        moved = self.read(row.name, deadline)
        return self.position(moved if moved is not None else row, deadline)

    def _advance(self, row: SequenceRow, value: int, deadline: float) -> None:
        quoted = self._wrapper.ops.quote_name("value")
        self.execute(
            f"UPDATE {self.table} SET {quoted} = %s WHERE name = %s AND {quoted} < %s",
            [value, row.name, value],
            deadline,
        )

    @abstractmethod
    def durability(self, deadline: float) -> str | None:
        """Why this server may forget ids that it has handed out, in a sentence; None if it cannot."""

    def abandon(self) -> None:
        """In a forked child, let no close of the driver's copy reach the parent's connection.

        Python closes open connections when a process ends, and drivers then tell the server.
        """
        return

    def close(self) -> None:
        """Close the connection in any state. Never raises, never waits long."""
        connection, self.connection = self.connection, None
        try:
            if connection is not None:
                connection.close()
        except Exception:
            pass  # The connection is given up in any case.


_open: weakref.WeakSet[TicketSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_open):
        # If that fails (too many open files, say), closing it ends the parent's session, too.
        with suppress(Exception):
            session.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


def seconds_left(deadline: float) -> float:
    """Seconds until ``deadline``, but never less than 10 ms.

    If the deadline has passed, this process was late; a healthy server answers within 10 ms.
    """
    return max(deadline - time.monotonic(), _A_MOMENT)


_SESSIONS = {
    "mysql": "sharded_orm.ids.tickets.mysql.MySQLSession",
    "sqlite": "sharded_orm.ids.tickets.sqlite3.SQLiteSession",
    "postgresql": "sharded_orm.ids.tickets.postgresql.PostgreSQLSession",
}


def session_class(vendor: str) -> type[TicketSession]:
    """The class of session for databases of ``vendor``, one of Django's names.

    :raises InvalidSequence: such a database cannot be a ticket server.
    """
    try:
        session_type: type[TicketSession] = import_string(_SESSIONS[vendor])
    except KeyError:
        raise InvalidSequence(
            f"A ticket server cannot be a database of vendor {vendor!r}; use one of"
            f" {sorted(_SESSIONS)!r}."
        ) from None
    return session_type
