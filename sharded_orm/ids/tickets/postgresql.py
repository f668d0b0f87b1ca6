"""A ticket server on PostgreSQL: a ``SEQUENCE`` for each sequence."""

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
#: Two processes that run CREATE … IF NOT EXISTS at the same moment may both fail. A number
#: that nobody else locks, probably; if somebody does, we wait.
_CREATING = 0x5348_4F52_4D53_4551
_WAITS_FOR_INPUT = select.POLLIN
_WAITS_FOR_BOTH = select.POLLIN | select.POLLOUT


class PostgreSQLSession(TicketSession):
    """``nextval`` and nothing else moves a sequence while it is in use.

    It cannot reserve n numbers at once: with ``setval(… nextval(…) + n)`` another session's
    ``nextval`` between the two gives a number that is in the batch, too. So a batch calls
    it n times, on the server; what others take in between leaves gaps.
    """

    forms = ("sequence",)
    blocks_drop = True
    wrapper_path = "django.db.backends.postgresql.base.DatabaseWrapper"

    def _limits(self, seconds: int) -> dict[str, Any]:
        # A pool would take the connection back; this one is ours.
        return {"connect_timeout": seconds, "pool": False}

    def _prepare(self) -> None:
        self._pgconn: pq.abc.PGconn = self.connection.pgconn
        self._escaping = pq.Escaping(self._pgconn)
        self._prepared: dict[tuple[str, bool], bytes] = {}
        self._socket = select.poll()
        self._socket.register(self._pgconn.socket, _WAITS_FOR_INPUT)
        # By the driver's own limits: this runs where a session is opened.
        self.connection.execute(
            # The server ends what waits for a lock on behalf of a client that has given up.
            "SET client_connection_check_interval = '1s';"
            # Of any stricter level, two that keep a mark at once would be an error.
            "SET default_transaction_isolation = 'read committed'"
        )

    # ##### Handing out #####

    def take(self, row: SequenceRow, count: int, mark: int, deadline: float) -> Sequence[int]:
        try:
            name = self._statement(row.name, count == 1, deadline)
            params = None if count == 1 else [b"%d" % count]
            result = self._ask(
                lambda: self._pgconn.send_query_prepared(name, params, result_format=_BINARY),
                deadline,
            )
        except OperationalError as exc:
            # Another session has used up the sequence or dropped it since the last look.
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
        """The name of the prepared statement; the first time it costs a round trip."""
        found = self._prepared.get((name, single))
        if found is None:
            found = b"take_%d" % len(self._prepared)
            text = self._single(name) if single else self._batch(name)
            self._ask(lambda: self._pgconn.send_prepare(found, text.encode()), deadline)
            self._prepared[(name, single)] = found
        return found

    # nextval logs 32 numbers in advance. The session whose call did the logging waits for
    # the disk when it commits; the sessions that get the next numbers meanwhile do not,
    # and if the server dies before the disk is done, it gives their numbers again. So: is
    # anything of the log not on disk yet, and not by us (who logs has a transaction id),
    # write into the log, which makes our commit wait.
    _ON_DISK = (
        "CASE WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()"
        " AND pg_current_xact_id_if_assigned() IS NULL"
        " THEN pg_logical_emit_message(true, 'sharded_orm', '') END"
    )

    def _single(self, name: str) -> str:
        # OFFSET 0: the subquery stays one, so the log is looked at after nextval.
        return (
            f"SELECT number, {self._ON_DISK} FROM"
            f" (SELECT nextval({self._regclass(name)}) AS number {self._from_valid(name, '1')}"
            " OFFSET 0) AS taken"
        )

    def _batch(self, name: str) -> str:
        # Eight bytes each, in the order in which they were taken.
        return (
            f"SELECT string_agg(int8send(nextval({self._regclass(name)})), ''), {self._ON_DISK}"
            f" {self._from_valid(name, '$1::bigint')} CROSS JOIN generate_series(1, $1::bigint)"
        )

    def _from_valid(self, name: str, count: str) -> str:
        """One row while the sequence is what it should be, and has numbers; otherwise none."""
        place = self.place
        return (
            f"FROM (SELECT 1 FROM {self.table} AS kept, pg_sequence AS made,"
            f" {self._counter(name)} AS counter"
            f" WHERE kept.name = {self._literal(name)} AND kept.form = 'sequence'"
            f" AND kept.step = {place.step:d} AND kept.position = {place.position:d}"
            f" AND made.seqrelid = {self._regclass(name)} AND made.seqincrement = {place.step:d}"
            f" AND made.seqcache = 1 AND NOT made.seqcycle"
            f" AND {self._last('counter.')} <= {LAST_ID:d} - {count} * {place.step:d}) AS valid"
        )

    def _last(self, of: str = "") -> str:
        """The last number that was taken. A new sequence holds the first that will be."""
        return f"({of}last_value - CASE WHEN {of}is_called THEN 0 ELSE {self.place.step:d} END)"

    # ##### Asking #####

    def _ask(self, send: Callable[[], None], deadline: float) -> pq.abc.PGresult:
        """Send, and return the last result; nothing here waits beyond the deadline."""
        # Of one request, however many pieces its answer comes in.
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
            pgconn.consume_input()  # so that the server is not kept from reading
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
    def _is(exc: Exception, *kinds: type[Exception]) -> bool:
        return isinstance(exc.__cause__, kinds)

    # ##### The catalog #####

    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        """See the contract. Without parameters also several statements, as one transaction."""
        if params:
            first, *rest = sql.split("%s")
            text = first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))
            values = [None if value is None else str(value).encode() for value in params]
            result = self._ask(
                lambda: self._pgconn.send_query_params(text.encode(), values), deadline
            )
        else:
            result = self._ask(lambda: self._pgconn.send_query(sql.encode()), deadline)
        columns = range(result.nfields)
        kinds = [int if result.ftype(column) in _INTEGERS else _decoded for column in columns]
        return [
            tuple(
                None if (value := result.get_value(number, column)) is None else kind(value)
                for column, kind in zip(columns, kinds, strict=True)
            )
            for number in range(result.ntuples)
        ]

    def is_missing_table(self, exc: Exception) -> bool:
        return self._is(exc, errors.UndefinedTable)

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        """See the contract. Two round trips: the row, and the sequence itself."""
        row = super().read(name, deadline)
        if row is None or row.form not in self.forms:
            return row
        made = self._made(name, deadline)
        if made is None:
            return None
        wanted = (row.step, 1, "f")
        if made != wanted:
            raise TicketServerMisconfigured(
                f"The SEQUENCE of {name!r} on {self.alias!r} was altered: (INCREMENT, CACHE, CYCLE)"
                f" is {made!r} instead of {wanted!r}, so it may repeat ids. Run ALTER SEQUENCE"
                f" {self._counter(name)} INCREMENT {row.step:d} CACHE 1 NO CYCLE, then"
                " 'manage.py tickets verify'."
            )
        return row

    def _made(self, name: str, deadline: float) -> tuple[Any, ...] | None:
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
            if self._made(name, deadline) is None:
                raise InvalidSequence(
                    f"Sequence {name!r} on {self.alias!r} was begun before, but its SEQUENCE is gone:"
                    f" restore {self._counter(name)}, or delete its row of the catalog and begin it"
                    " again above all ids in use."
                )
            return
        # One that is there already was made by another process, or by one that was cut off:
        # what it has counted stays, but it may be below.
        self._create(
            f"CREATE SEQUENCE IF NOT EXISTS {self._counter(name)} AS bigint"
            f" INCREMENT BY {self.place.step:d} START WITH {self.place.position:d}"
            f" CACHE 1 NO CYCLE; {self._forward(name, value)}",
            deadline,
        )

    def _create(self, sql: str, deadline: float) -> None:
        self.execute(f"SELECT pg_advisory_xact_lock({_CREATING:d}); {sql}", (), deadline)

    def _advance(self, row: SequenceRow, value: int, deadline: float) -> None:
        self.execute(self._forward(row.name, value), (), deadline)

    def _forward(self, name: str, value: int) -> str:
        # The first statement changes nothing. It is here for its lock, which keeps nextval
        # of other sessions out until both are done: one between the comparison and setval
        # could go beyond ``value``, and its number would come again.
        return (
            f"ALTER SEQUENCE {self._counter(name)} OWNED BY NONE;"
            f" SELECT setval({self._regclass(name)}, {value:d}) FROM {self._counter(name)}"
            f" WHERE {self._last()} < {value:d}"
        )

    def durability(self, deadline: float) -> str | None:
        found = self.execute(
            "SELECT name FROM pg_settings WHERE setting = 'off'"
            " AND name IN ('fsync', 'full_page_writes', 'synchronous_commit') ORDER BY name",
            (),
            deadline,
        )
        if not found:
            return None
        names = " and ".join(str(name) for (name,) in found)
        return (
            f"{names} {'is' if len(found) == 1 else 'are'} off: ids that were handed out before a"
            " crash can be handed out again; switch on"
        )

    def abandon(self) -> None:
        if self.connection is not None:
            # psycopg closes nothing of another process on its own account; should somebody
            # ask it to, the goodbye goes nowhere.
            send_nowhere(self._pgconn.socket)

    # ##### Names #####

    def _counter(self, name: str) -> str:
        """The sequence, as an identifier."""
        return self._escaping.escape_identifier(_counter_name(name).encode()).decode()

    def _regclass(self, name: str) -> str:
        """The sequence, as an argument of functions."""
        return f"{self._literal(self._counter(name))}::regclass"

    def _literal(self, text: str) -> str:
        return self._escaping.escape_literal(text.encode()).decode()


def _counter_name(name: str) -> str:
    return f"{CATALOG}_{name}"


def _decoded(value: bytes) -> str:
    return value.decode()
