"""Sessions with a ticket server on PostgreSQL, where each sequence of ids is an SQL ``SEQUENCE``."""

from __future__ import annotations

import select
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from sharded_orm.forks import send_nowhere
from sharded_orm.ids.tickets.exceptions import InvalidSequence, TicketServerMisconfigured
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

# PostgreSQL's limit for the length of a name, in bytes.
_MAX_IDENTIFIER = 63
_BINARY = pq.Format.BINARY
# The oids of the types int8, int2, int4 and oid.
_INTEGERS = {20, 21, 23, 26}
#: CREATE … IF NOT EXISTS may fail if two processes execute it at once. So this process holds an
#: advisory lock with this key meanwhile. An application that uses the same key only delays it.
_CREATING = 0x5348_4F52_4D53_4551
_WAITS_FOR_INPUT = select.POLLIN
_WAITS_FOR_BOTH = select.POLLIN | select.POLLOUT


class PostgreSQLSession(TicketSession):
    """A session on PostgreSQL, which takes ids by calling ``nextval``.

    To take n ids, one statement calls ``nextval`` n times on the server, because ``nextval`` cannot
    reserve n numbers at once. ``setval(… nextval(…) + n)`` would not be safe: between the two calls,
    another session's ``nextval`` could return one of the n numbers. If other sessions take numbers
    meanwhile, the n numbers have gaps.
    """

    forms = ("sequence",)
    wrapper_path = "django.db.backends.postgresql.base.DatabaseWrapper"
    prevents_drop = True

    def _limits(self, seconds: int) -> dict[str, Any]:
        # The session keeps its connection, so Django's connection pool must not own it.
        return {"connect_timeout": seconds, "pool": False}

    def _prepare(self) -> None:
        self._pgconn: pq.abc.PGconn = self.connection.pgconn
        self._escaping = pq.Escaping(self._pgconn)
        self._prepared: dict[tuple[str, bool], bytes] = {}
        self._socket = select.poll()
        self._socket.register(self._pgconn.socket, _WAITS_FOR_INPUT)
        # These SET statements need no time limit. They run in the thread that connects, and a
        # caller waits for that thread only until the caller's deadline.
        self.connection.execute(
            # If this client goes away while its statement waits for a lock, make the server end the
            # statement.
            "SET client_connection_check_interval = '1s';"
            # Two sessions may store the same predecessor's mark (the highest known id of the server
            # before this one) at the same time. At a stricter isolation level, one of them would
            # fail.
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
            # Since this session has checked the sequence, another session has taken its last
            # numbers or dropped it. Return no ids, so that the caller checks it again.
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
        """Return the name of the prepared statement that takes ids of the sequence ``name``.

        If the session has not prepared it yet, this costs a round trip.

        :param single: True for the statement that takes one id; False for the one that takes
            several.
        """
        statement = self._prepared.get((name, single))
        if statement is None:
            statement = b"take_%d" % len(self._prepared)
            text = self._single(name) if single else self._batch(name)
            self._result_of(lambda: self._pgconn.send_prepare(statement, text.encode()), deadline)
            self._prepared[(name, single)] = statement
        return statement

    # SQL that makes the commit wait until the numbers that nextval returned are safe on disk.
    # Otherwise, a server that crashes could hand out the same numbers again: nextval writes 32
    # numbers at once to the write-ahead log, and only the commit of the session that wrote them
    # waits for the disk. This SQL writes a message to the log, so that this commit waits as well.
    # No message is needed if the whole log is on disk already, or if this transaction has written
    # something else to the log (then it has a transaction id).
    _ON_DISK = (
        "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"
        " AND pg_current_xact_id_if_assigned() IS NULL"
        " THEN pg_logical_emit_message(true, 'sharded_orm', '') END"
    )

    def _single(self, name: str) -> str:
        # OFFSET 0 keeps the planner from merging the subquery into the outer query. So the subquery
        # first calls nextval, and then the outer query looks at the write-ahead log.
        return (
            f"SELECT number, {self._ON_DISK} FROM"
            f" (SELECT nextval({self._regclass(name)}) AS number {self._from_valid(name, '1')}"
            " OFFSET 0) AS taken"
        )

    def _batch(self, name: str) -> str:
        # The statement returns one byte string: eight bytes per number, in the order of the nextval
        # calls.
        return (
            f"SELECT string_agg(int8send(nextval({self._regclass(name)})), ''), {self._ON_DISK}"
            f" {self._from_valid(name, '$1::bigint')} CROSS JOIN generate_series(1, $1::bigint)"
        )

    def _from_valid(self, name: str, count: str) -> str:
        """Return a FROM clause. It yields one row if the sequence can be used; otherwise no row.

        The sequence can be used if its row in the catalog (the table of sequences) and its
        ``SEQUENCE`` are unaltered, and at least ``count`` numbers are left.
        """
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
        """Return an SQL expression for the last number that a ``SEQUENCE`` has returned.

        In a new ``SEQUENCE``, the column ``last_value`` has the first number that will be returned,
        so the expression subtracts one step.

        :param of: a prefix for the column names, such as ``"counter."``; by default none.
        """
        return f"({of}last_value - CASE WHEN {of}is_called THEN 0 ELSE {self.slot.step:d} END)"

    # ##### Sending #####

    def _result_of(self, send: Callable[[], None], deadline: float) -> pq.abc.PGresult:
        """Call ``send``, which sends a request, and return the last result of the request.

        :raises OperationalError: the server reports an error, or has not answered by ``deadline``.
        """
        # An answer may come in many pieces. So compute the deadline once: seconds_left() grants at
        # least 10 ms at each call, so calling it for each piece could go on long after the
        # deadline.
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
            # Receive answers while the request is sent. If nobody receives the server's output, the
            # server may stop reading the request.
            pgconn.consume_input()
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
        """Run ``sql`` and return the rows of its last statement.

        If ``params`` is empty, ``sql`` may consist of several statements, which run in one transaction.
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
        """Return the row of sequence ``name`` in the catalog, the table of sequences.

        Return None if the row or the ``SEQUENCE`` is missing.

        Costs two round trips.

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
        """Return a tuple of the options INCREMENT, CACHE and CYCLE of the ``SEQUENCE``; None if the
        ``SEQUENCE`` is missing.
        """
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
        # Another process, or an interrupted one, may have made the SEQUENCE already. Then keep it,
        # but move it forward to ``value``, because it may stand at a lower number.
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
        # The ALTER SEQUENCE changes nothing, but it locks the SEQUENCE until the SELECT has ended.
        # Without the lock, nextval of another session could go beyond ``value`` after the WHERE
        # clause was evaluated. Then setval would move the SEQUENCE back.
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
            # psycopg does not close the parent's connection in a forked child, but other code may
            # call close(). Its message to the server would end the parent's connection. So redirect
            # the child's socket to nowhere.
            send_nowhere(self._pgconn.socket)

    # ##### Names #####

    def _counter(self, name: str) -> str:
        """Return the name of the ``SEQUENCE`` for sequence ``name``, as a quoted SQL identifier."""
        return self._escaping.escape_identifier(_counter_name(name).encode()).decode()

    def _regclass(self, name: str) -> str:
        """Return the SQL argument that names the ``SEQUENCE`` in calls of functions such as ``nextval``."""
        return f"{self._literal(self._counter(name))}::regclass"

    def _literal(self, text: str) -> str:
        return self._escaping.escape_literal(text.encode()).decode()


def _counter_name(name: str) -> str:
    return f"{CATALOG}_{name}"


def _decode(value: bytes) -> str:
    return value.decode()
