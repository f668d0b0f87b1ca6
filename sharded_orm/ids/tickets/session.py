"""Sessions: the connections of the id generator to a ticket server, and the requests that they can make."""

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

from sharded_orm.ids.tickets.exceptions import InvalidSequence

#: Name of the catalog: the table of a ticket server that has one row per sequence of ids.
CATALOG = "sharded_orm_sequence"
#: The largest id: ids are the positive numbers of a signed BIGINT.
LAST_ID = 2**63 - 1
MAX_NAME = 100
_A_MOMENT = 0.01  # seconds

# The columns of the catalog table. "partner_mark" is the column of SequenceRow.predecessor_mark,
# whose name was "partner_mark" in an earlier version.
_COLUMNS = ("name", "form", "step", "position", "value", "partner_mark")


@dataclass(frozen=True)
class SequenceSlot:
    """The numbers that one ticket server may hand out (Flickr, F2).

    For example, the second of three servers hands out 2, 5, 8, …: its ``position`` is 2, and its
    ``step`` is 3. ``step`` is the number of ticket servers. ``position`` is the server's place in
    the list of them, counted from 1 like MySQL's ``auto_increment_offset``.
    """

    position: int
    step: int

    def owns(self, number: int) -> bool:
        return (number - self.position) % self.step == 0

    def at_or_below(self, number: int) -> int:
        """Return the largest number up to ``number`` that the ticket server of this slot may hand
        out.
        """
        return number - (number - self.position) % self.step


@dataclass(frozen=True)
class SequenceRow:
    """A row of the catalog table: the state of one sequence on one ticket server.

    ``form`` says how the server counts: ``"update"``, for example, by an SQL UPDATE of this row.
    ``position`` and ``step`` say which numbers the server may hand out, see :class:`SequenceSlot`.
    """

    name: str
    form: str
    step: int
    position: int
    #: If the server counts in this row, the last id that was handed out. If it counts in a separate
    #: table or ``SEQUENCE``, this number never changes: it is the start value, below the first id.
    value: int
    #: The highest id that the predecessor (the server before this one in the list) is known to have
    #: handed out.
    predecessor_mark: int

    @property
    def slot(self) -> SequenceSlot:
        return SequenceSlot(self.position, self.step)


@dataclass(frozen=True)
class CheckedSequence:
    """A sequence whose row in the catalog table was checked, and was right.

    ``until`` is the time (``time.monotonic()``) after which the row must be checked again.
    """

    row: SequenceRow
    until: float
    #: A server that has forgotten ids of a sequence is behind. This is the number of times that the
    #: process had found the server behind in this sequence before the check. If it finds the server
    #: behind once more, the number is out of date, and the row must be checked again.
    refusals: int


class TicketSession(ABC):
    """A connection to a ticket server, in autocommit mode, that only the id generator uses.

    Only one thread may use a session at a time. Deadlines are times of ``time.monotonic()``. A
    request that is not answered by its deadline raises :exc:`OperationalError`, and so does every
    error of the driver. After such an error, the session must be closed. A failed request may
    always be repeated: ids in a lost answer are never handed out again.
    """

    #: The forms (ways to count) that this kind of database has, the default first.
    forms: ClassVar[tuple[str, ...]]
    #: The forms (ways to count) with which :meth:`take` also stores the predecessor's mark, the
    #: highest known id of the server before this one. It does so in the same statement, at no cost.
    carries_predecessor_mark: ClassVar[frozenset[str]] = frozenset()
    #: Dotted path of the ``DatabaseWrapper`` class that connects. The class gets the settings of
    #: the database alias, but the setting ENGINE is not used.
    wrapper_path: ClassVar[str]
    #: Whether an open session prevents other connections from dropping its database.
    prevents_drop: ClassVar[bool] = False

    def __init__(
        self, alias: str, settings: Mapping[str, Any], slot: SequenceSlot, patience: float
    ):
        """Connect to the server. The driver may block for any length of time, so do not call this
        in a thread for which a caller must wait.

        :param alias: the alias of the server's database.
        :param settings: the database settings of the alias.
        :param slot: the numbers that this server may hand out.
        :param patience: the driver's own time limits, in seconds. The number is rounded up, because
            drivers accept only whole seconds.
        """
        self.alias = alias
        self.slot = slot
        self._wrapper: Any = self._make_wrapper(settings, max(1, math.ceil(patience)))
        # Connect with Django's ensure_connection(): it sends Django's signals, and Django's test
        # cases can forbid the connection.
        self._wrapper.ensure_connection()
        self.connection: Any = self._wrapper.connection
        self._wrapper.set_autocommit(True)
        self.table = self._wrapper.ops.quote_name(CATALOG)
        #: Maps sequences to the result of their last check on this connection. The
        #: :class:`TicketServer` fills and reads this dict.
        self.checked: dict[str, CheckedSequence] = {}
        # Turn errors of the driver into errors of Django, because the generator tries the next
        # server only after an error of Django.
        with self._wrapper.wrap_database_errors:
            self._prepare()
        _open.add(self)

    def _make_wrapper(self, settings: Mapping[str, Any], seconds: int) -> BaseDatabaseWrapper:
        wrapper_class: type[BaseDatabaseWrapper] = import_string(self.wrapper_path)
        options = {**settings.get("OPTIONS", {}), **self._limits(seconds)}
        return wrapper_class({**settings, "OPTIONS": options, "CONN_MAX_AGE": None}, self.alias)

    @abstractmethod
    def _limits(self, seconds: int) -> dict[str, Any]:
        """Return the database ``OPTIONS`` that make the driver wait at most ``seconds``."""

    @abstractmethod
    def _prepare(self) -> None:
        """Set and verify the variables of the database session. Called right after connecting."""

    # ##### Handing out #####

    @abstractmethod
    def take(
        self, row: SequenceRow, count: int, predecessor_mark: int, deadline: float
    ) -> Sequence[int]:
        """Take and return ``count`` new ids of a sequence, ascending. Costs one round trip.

        In two cases, return no id and change nothing: the sequence has fewer than ``count`` numbers
        left; or it does not match ``row`` any more, because it was dropped, or because its slot
        (which numbers the server may hand out) or its form was changed.

        :param row: the sequence's row in the catalog table, as returned by :meth:`read`.
        :param predecessor_mark: the highest id that the predecessor (the server before this one in
            ``TICKETS``) is known to have handed out. The mark is stored if the row's form is in
            :attr:`carries_predecessor_mark`, and otherwise ignored.
        """

    # ##### The catalog #####

    @abstractmethod
    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        """Run one statement with ``%s`` placeholders for ``params``, and return its rows."""

    @abstractmethod
    def is_missing_table(self, exc: Exception) -> bool:
        """Whether ``exc`` means that a table does not exist."""

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        """Return the row of sequence ``name`` in the catalog; None if there is no such row.

        The catalog is the table of sequences. Costs one round trip.
        """
        rows = self._read(" WHERE name = %s", [name], deadline)
        return rows[0] if rows else None

    def read_all(self, deadline: float) -> list[SequenceRow]:
        """Return the catalog's rows of all sequences, ordered by name. Costs one round trip.

        The list is empty if the catalog table does not exist.
        """
        return self._read(" ORDER BY name", [], deadline)

    def _read(self, clause: str, params: list[Any], deadline: float) -> list[SequenceRow]:
        columns = ", ".join(map(self._wrapper.ops.quote_name, _COLUMNS))
        try:
            rows = self.execute(f"SELECT {columns} FROM {self.table}{clause}", params, deadline)
        except Exception as exc:
            # The drivers have no common base class of errors, so catch every error.
            if self.is_missing_table(exc):
                return []
            raise
        return [
            SequenceRow(str(row[0]), str(row[1]), *(int(number) for number in row[2:]))
            for row in rows
        ]

    def keep_predecessor_mark(self, name: str, predecessor_mark: int, deadline: float) -> None:
        """Store the predecessor's mark for sequence ``name`` in the catalog table. One round trip.

        The mark is the highest id that the server before this one is known to have handed out. If a
        higher mark is stored already, that mark stays.
        """
        quoted = self._wrapper.ops.quote_name("partner_mark")
        self.execute(
            f"UPDATE {self.table} SET {quoted} = %s WHERE name = %s AND {quoted} < %s",
            [predecessor_mark, name, predecessor_mark],
            deadline,
        )

    # ##### Administration #####

    def position(self, row: SequenceRow, deadline: float) -> int:
        """Return the highest id that the sequence of ``row`` has handed out, or may have handed out."""
        return row.value

    @abstractmethod
    def create_catalog(self, deadline: float) -> None:
        """Create the catalog, the table of sequences, if it is missing."""

    def create(self, name: str, form: str, value: int, deadline: float) -> SequenceRow:
        """Create a sequence whose first id is above ``value``, and return its row in the catalog table.

        If the sequence exists already, only return its row. Many processes may do this at the same
        time, and it may be repeated after an interruption.
        """
        value = self.slot.at_or_below(value)
        self._create_counter(name, form, value, deadline)
        ops = self._wrapper.ops
        columns = ", ".join(map(ops.quote_name, _COLUMNS))
        placeholders = ", ".join(["%s"] * len(_COLUMNS))
        # Ignore the conflict if another process has inserted the row in the meantime.
        ignore = OnConflict.IGNORE
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
        """Create the table or ``SEQUENCE`` in which the server counts.

        Does nothing if the server counts in the sequence's row of the catalog table.
        """
        return

    def advance(self, row: SequenceRow, value: int, deadline: float) -> int:
        """Move the sequence forward to ``value`` or above, and return its position afterwards.

        If its position is higher already, it stays there.

        :raises InvalidSequence: ``value`` is too near to 2**63, where ids end.
        """
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
        """Return a sentence that says why this server may forget its last ids in a crash, and hand
        them out again. Return None if it cannot.
        """

    def abandon(self) -> None:
        """Prevent this process, a forked child, from closing its parent's connection.

        The child has inherited the connection object. Python would close it when the child ends.
        The driver would then send the server a message that ends the parent's connection, too.
        """
        return

    def close(self) -> None:
        """Close the connection, whatever its state. Never raises an error and never waits long."""
        connection, self.connection = self.connection, None
        try:
            if connection is not None:
                connection.close()
        except Exception:
            # The connection is not used any more, so its errors do not matter.
            pass


_open: weakref.WeakSet[TicketSession] = weakref.WeakSet()


def _abandon_all() -> None:
    for session in list(_open):
        # This runs in a child process, right after a fork. If abandon() of one session fails, for
        # example because too many files are open, still go on with the other sessions. For the
        # failed one, accept the damage: the child keeps the parent's socket of this session. When
        # the child closes the session, the parent's session ends, too.
        with suppress(Exception):
            session.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


def seconds_left(deadline: float) -> float:
    """Return the seconds until ``deadline``, but at least 0.01.

    If the deadline has passed already, this process was slow and not the server. So the server
    still gets 10 ms, in which a healthy server answers.
    """
    return max(deadline - time.monotonic(), _A_MOMENT)


_SESSIONS = {
    "mysql": "sharded_orm.ids.tickets.mysql.MySQLSession",
    "sqlite": "sharded_orm.ids.tickets.sqlite3.SQLiteSession",
    "postgresql": "sharded_orm.ids.tickets.postgresql.PostgreSQLSession",
}


def session_class(vendor: str) -> type[TicketSession]:
    """Return the session class for ``vendor``, Django's name of a kind of database ("mysql").

    :raises InvalidSequence: databases of this vendor cannot be ticket servers.
    """
    try:
        session_type: type[TicketSession] = import_string(_SESSIONS[vendor])
    except KeyError:
        raise InvalidSequence(
            f"A ticket server cannot be a database of vendor {vendor!r}; use one of"
            f" {sorted(_SESSIONS)!r}."
        ) from None
    return session_type
