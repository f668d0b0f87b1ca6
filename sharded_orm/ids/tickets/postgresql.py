"""A ticket server on PostgreSQL: each sequence is a ``SEQUENCE`` of the database."""

from __future__ import annotations

import select
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from sharded_orm.exceptions import InvalidSequence, TicketServerMisconfigured
from sharded_orm.forks import send_nowhere
from sharded_orm.ids.tickets.session import (
    CATALOG,
    LAST_ID,
    SequenceRow,
    TicketSession,
    seconds_left,
)

try:
    import psycopg
    from psycopg import errors, pq
except ImportError as exc:
    raise ImproperlyConfigured(
        f"Ticket servers on PostgreSQL need psycopg 3 ({exc}); install sharded-orm[postgresql]."
    ) from exc

_MAX_IDENTIFIER = 63  # bytes
_BINARY = pq.Format.BINARY
_INTEGERS = {20, 21, 23, 26}  # the types int8, int2, int4, oid
#: Advisory lock around CREATE … IF NOT EXISTS, which may fail if two processes run it at the same
#: moment. If another application uses the same number, we only wait.
_CREATING = 0x5348_4F52_4D53_4551
_WAITS_FOR_INPUT = select.POLLIN
_WAITS_FOR_BOTH = select.POLLIN | select.POLLOUT


class PostgreSQLSession(TicketSession):
    """Only ``nextval`` moves a sequence while it is in use.

    ``nextval`` cannot reserve n numbers at once: with ``setval(… nextval(…) + n)``, another
    session's ``nextval`` between the two would give a number of the batch. So a batch calls
    ``nextval`` n times, on the server; numbers that others take meanwhile are gaps in the batch.
    """

    forms = ("sequence",)
    wrapper_path = "django.db.backends.postgresql.base.DatabaseWrapper"
    prevents_drop = True

    def _limits(self, seconds: int) -> dict[str, Any]:
        # No pool of Django: it would take the connection back.
        return {"connect_timeout": seconds, "pool": False}

    def _prepare(self) -> None:
        self._pgconn: pq.abc.PGconn = self.connection.pgconn
        self._escaping = pq.Escaping(self._pgconn)
        self._prepared: dict[tuple[str, bool], bytes] = {}
        self._socket = select.poll()
        self._socket.register(self._pgconn.socket, _WAITS_FOR_INPUT)
        # This statement has the driver's own time limit.
        self.connection.execute(
            # The server ends a statement that waits for a lock if its client has given up.
            "SET client_connection_check_interval = '1s';"
            # At a stricter level, two sessions that store a mark at once would fail.
            "SET default_transaction_isolation = 'read committed'"
        )

    # ##### Handing out #####

    def take(
        self, row: SequenceRow, count: int, predecessor_mark: int, deadline: float
    ) -> Sequence[int]:
        try:
            name = self._statement(row.name, count == 1, deadline)
            params = None if count == 1 else [b"%d" % count]
            result = self._result_of(
                lambda: self._pgconn.send_query_prepared(name, params, result_format=_BINARY),
                deadline,
            )
        except OperationalError as exc:
            # Another session has used up or dropped the sequence since the last check.
            if self._is(exc, errors.SequenceGeneratorLimitExceeded, errors.UndefinedTable):
                return ()
            raise
        packed = result.get_value(0, 0) if result.ntuples else None
        if packed is None:
            return ()
        if count == 1:
            return (int.from_bytes(packed),)
        ids = array("q")
        ids.frombytes(packed)
        if sys.byteorder == "little":
            ids.byteswap()
        return ids

    def _statement(self, name: str, single: bool, deadline: float) -> bytes:
        """The name of the prepared statement. Preparing it costs a round trip, once per session."""
        statement = self._prepared.get((name, single))
        if statement is None:
            statement = b"take_%d" % len(self._prepared)
            text = self._single(name) if single else self._batch(name)
            self._result_of(lambda: self._pgconn.send_prepare(statement, text.encode()), deadline)
            self._prepared[(name, single)] = statement
        return statement

    # nextval logs 32 numbers in advance. The session whose call did the logging waits for the disk
    # when it commits; sessions that get the next numbers meanwhile do not. If the server dies
    # before the log is on disk, it gives their numbers again. So, if a part of the log is not on
    # disk yet and this session has not logged (it has no transaction id), it writes to the log,
    # which makes its commit wait.
    _ON_DISK = (
        "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"
        " AND pg_current_xact_id_if_assigned() IS NULL"
        " THEN pg_logical_emit_message(true, 'sharded_orm', '') END"
    )

    def _single(self, name: str) -> str:
        # OFFSET 0 keeps the subquery separate, so that the log is checked after nextval.
        return (
            f"SELECT number, {self._ON_DISK} FROM"
            f" (SELECT nextval({self._regclass(name)}) AS number {self._from_valid(name, '1')}"
            " OFFSET 0) AS taken"
        )

    def _batch(self, name: str) -> str:
        # Eight bytes per number, in the order in which they were taken.
        return (
            f"SELECT string_agg(int8send(nextval({self._regclass(name)})), ''), {self._ON_DISK}"
            f" {self._from_valid(name, '$1::bigint')} CROSS JOIN generate_series(1, $1::bigint)"
        )

    def _from_valid(self, name: str, count: str) -> str:
        """A FROM with one row if the sequence is unaltered and has ``count`` numbers left, else none."""
        slot = self.slot
        return (
            f"FROM (SELECT 1 FROM {self.table} AS kept, pg_sequence AS made,"
            f" {self._counter(name)} AS counter"
            f" WHERE kept.name = {self._literal(name)} AND kept.form = 'sequence'"
            f" AND kept.step = {slot.step:d} AND kept.position = {slot.position:d}"
            f" AND made.seqrelid = {self._regclass(name)} AND made.seqincrement = {slot.step:d}"
            f" AND made.seqcache = 1 AND NOT made.seqcycle"
            f" AND {self._last('counter.')} <= {LAST_ID:d} - {count} * {slot.step:d}) AS valid"
        )

    def _last(self, of: str = "") -> str:
        """SQL of the last number that was taken: a new sequence holds the first one to be taken."""
        return f"({of}last_value - CASE WHEN {of}is_called THEN 0 ELSE {self.slot.step:d} END)"

    # ##### Sending #####

    def _result_of(self, send: Callable[[], None], deadline: float) -> pq.abc.PGresult:
        """Send a request, and return its last result. Does not wait beyond the deadline."""
        # One deadline for the request, however many pieces its answer has.
        deadline = time.monotonic() + seconds_left(deadline)
        try:
            send()
            return self._answer(deadline)
        except psycopg.Error as exc:
            raise OperationalError(*exc.args) from exc

    def _answer(self, deadline: float) -> pq.abc.PGresult:
        pgconn, last, failed = self._pgconn, None, None
        while pgconn.flush():
            self._wait(_WAITS_FOR_BOTH, deadline)
            pgconn.consume_input()  # The server may read only after we have read.
        while True:
            while pgconn.is_busy():
                self._wait(_WAITS_FOR_INPUT, deadline)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            last = result
            if result.status == pq.ExecStatus.FATAL_ERROR:
                failed = result
        if failed is not None:
            raise errors.error_from_result(failed)
        assert last is not None
        return last

    def _wait(self, events: int, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        self._socket.modify(self._pgconn.socket, events)
        if not self._socket.poll(left * 1000):
            raise OperationalError("no answer within the time limit")

    @staticmethod
    def _is(exc: Exception, *classes: type[Exception]) -> bool:
        return isinstance(exc.__cause__, classes)

    # ##### The catalog #####

    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        """Run a statement, and return its rows.

        Without parameters, ``sql`` may be several statements, which are one transaction.
        """
        if params:
            first, *parts = sql.split("%s")
            text = first + "".join(f"${number}{part}" for number, part in enumerate(parts, 1))
            values = [None if value is None else str(value).encode() for value in params]
            result = self._result_of(
                lambda: self._pgconn.send_query_params(text.encode(), values), deadline
            )
        else:
            result = self._result_of(lambda: self._pgconn.send_query(sql.encode()), deadline)
        columns = range(result.nfields)
        converters = [int if result.ftype(column) in _INTEGERS else _decode for column in columns]
        return [
            tuple(
                None if (value := result.get_value(number, column)) is None else convert(value)
                for column, convert in zip(columns, converters, strict=True)
            )
            for number in range(result.ntuples)
        ]

    def is_missing_table(self, exc: Exception) -> bool:
        return self._is(exc, errors.UndefinedTable)

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        """The row of one sequence; None if the server has none. Two round trips.

        :raises TicketServerMisconfigured: the ``SEQUENCE`` was altered.
        """
        row = super().read(name, deadline)
        if row is None or row.form not in self.forms:
            return row
        actual = self._definition(name, deadline)
        if actual is None:
            return None
        expected = (row.step, 1, "f")
        if actual != expected:
            raise TicketServerMisconfigured(
                f"The SEQUENCE of {name!r} on {self.alias!r} was altered: (INCREMENT, CACHE, CYCLE)"
                f" is {actual!r} instead of {expected!r}, so it may repeat ids. Run ALTER SEQUENCE"
                f" {self._counter(name)} INCREMENT {row.step:d} CACHE 1 NO CYCLE, then"
                " 'manage.py tickets verify'."
            )
        return row

    def _definition(self, name: str, deadline: float) -> tuple[Any, ...] | None:
        """(INCREMENT, CACHE, CYCLE) of the ``SEQUENCE``; None if it is gone."""
        rows = self.execute(
            "SELECT seqincrement, seqcache, seqcycle FROM pg_sequence"
            " WHERE seqrelid = to_regclass(%s)",
            [self._counter(name)],
            deadline,
        )
        return rows[0] if rows else None

    # ##### Administration #####

    def position(self, row: SequenceRow, deadline: float) -> int:
        rows = self.execute(f"SELECT {self._last()} FROM {self._counter(row.name)}", (), deadline)
        return int(rows[0][0])

    def create_catalog(self, deadline: float) -> None:
        self._create(
            f"CREATE TABLE IF NOT EXISTS {self.table} ("
            ' name varchar(100) COLLATE "C" NOT NULL PRIMARY KEY, form varchar(10) NOT NULL,'
            " step bigint NOT NULL, position bigint NOT NULL,"
            " value bigint NOT NULL, partner_mark bigint NOT NULL)",
            deadline,
        )

    def _create_counter(self, name: str, form: str, value: int, deadline: float) -> None:
        room = _MAX_IDENTIFIER - len(_counter_name("").encode())
        if len(name.encode()) > room:
            raise InvalidSequence(
                f"Sequence {name!r} is too long for PostgreSQL, where a SEQUENCE is named after it:"
                f" {room} bytes at most. Name another one in TicketField(sequence=…)."
            )
        if super().read(name, deadline) is not None:
            if self._definition(name, deadline) is None:
                raise InvalidSequence(
                    f"Sequence {name!r} on {self.alias!r} was begun before, but its SEQUENCE is gone:"
                    f" restore {self._counter(name)}, or delete its row of the catalog and begin it"
                    " again above all ids in use."
                )
            return
        # An existing SEQUENCE was made by another process, or by one that was interrupted: its
        # numbers stay, but it may be too low.
        self._create(
            f"CREATE SEQUENCE IF NOT EXISTS {self._counter(name)} AS bigint"
            f" INCREMENT BY {self.slot.step:d} START WITH {self.slot.position:d}"
            f" CACHE 1 NO CYCLE; {self._forward(name, value)}",
            deadline,
        )

    def _create(self, sql: str, deadline: float) -> None:
        self.execute(f"SELECT pg_advisory_xact_lock({_CREATING:d}); {sql}", (), deadline)

    def _advance(self, row: SequenceRow, value: int, deadline: float) -> None:
        self.execute(self._forward(row.name, value), (), deadline)

    def _forward(self, name: str, value: int) -> str:
        # The first statement changes nothing; its lock keeps nextval of other sessions out until
        # both are done. A nextval between the comparison and setval could pass ``value``, and its
        # number would be repeated.
        return (
            f"ALTER SEQUENCE {self._counter(name)} OWNED BY NONE;"
            f" SELECT setval({self._regclass(name)}, {value:d}) FROM {self._counter(name)}"
            f" WHERE {self._last()} < {value:d}"
        )

    def durability(self, deadline: float) -> str | None:
        rows = self.execute(
            "SELECT name FROM pg_settings WHERE setting = 'off'"
            " AND name IN ('fsync', 'full_page_writes', 'synchronous_commit') ORDER BY name",
            (),
            deadline,
        )
        if not rows:
            return None
        names = " and ".join(str(name) for (name,) in rows)
        return (
            f"{names} {'is' if len(rows) == 1 else 'are'} off: ids that were handed out before a"
            " crash can be handed out again; switch on"
        )

    def abandon(self) -> None:
        if self.connection is not None:
            # psycopg does not close a connection of another process by itself. If it is told to
            # close it, the server does not see that.
            send_nowhere(self._pgconn.socket)

    # ##### Names #####

    def _counter(self, name: str) -> str:
        """The name of the ``SEQUENCE``, as a quoted identifier."""
        return self._escaping.escape_identifier(_counter_name(name).encode()).decode()

    def _regclass(self, name: str) -> str:
        """The ``SEQUENCE`` as an argument of functions."""
        return f"{self._literal(self._counter(name))}::regclass"

    def _literal(self, text: str) -> str:
        return self._escaping.escape_literal(text.encode()).decode()


def _counter_name(name: str) -> str:
    return f"{CATALOG}_{name}"


def _decode(value: bytes) -> str:
    return value.decode()
