"""Cursors that lease a session for each statement, and return it when the statement is done.

A cursor has a driver connection. While a statement runs, this is the connection of the leased
session; otherwise it is the alias's virtual connection. All rows of a statement are fetched before
its session is returned. Only named cursors leave rows on the server.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import psycopg
from django.db.backends.postgresql.base import Cursor as StockCursor
from psycopg import sql
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, TransactionStatus

from sharded_orm.backends.postgresql.connection import BEGIN, PostgreSQLConnection
from sharded_orm.backends.postgresql.search_path import EXTENSIONS, packet_of
from sharded_orm.backends.postgresql.sql_quotes import literal, quoted
from sharded_orm.backends.postgresql.statement_kind import (
    PostgreSQLKind,
    begins_anew,
    classify,
    is_repeatable,
    is_several,
    prepares_transaction,
    reason,
    resets_path,
)
from sharded_orm.backends.postgresql.statement_text import without_comments
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.route_check import check_route
from sharded_orm.exceptions import SessionStateRefused

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession

# If the session of a read is lost within this many seconds, the read is repeated. A read that has
# run for longer is not repeated, because somebody may have killed it for its slowness.
RETRY_WITHIN = 1.0

_WRITE, _INSERT = PostgreSQLKind.WRITE, PostgreSQLKind.INSERT
_SAVEPOINT, _RELEASE = PostgreSQLKind.SAVEPOINT, PostgreSQLKind.RELEASE
_FREE = SessionMode.FREE
_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)
# The number of the advisory lock that is held during CREATE EXTENSION. Two sessions must not create the
# same extension in one database at the same time.
_EXTENSION_LOCK = 0x5348_4152_4445_4458
_EXTENSION = re.compile(
    r"CREATE\s+EXTENSION\s+(?:IF\s+NOT\s+EXISTS\s+)?(\"(?:[^\"]|\"\")+\"|[\w$]+)", re.IGNORECASE
)
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)


class _NotSent:
    """A savepoint statement that was deferred, not sent. Django's query log reads it from the
    cursor.
    """

    def __init__(self, query: bytes) -> None:
        self.query = query


class SessionLeaseMixin(psycopg.Cursor[Any]):
    """Mixin for a client-side cursor of the driver: the cursor leases a session for each statement.
    It must be the first base class.
    """

    _conn: Any

    def __init__(self, connection: PostgreSQLConnection, **options: Any) -> None:
        #: The virtual connection (the ``connection`` of a Django alias) to which the cursor belongs.
        self._owner = connection
        #: Statements to send in front of the next one, in one packet. _packet has them as bytes.
        self._prefix: list[bytes] = []
        self._packet = b""
        super().__init__(cast(Any, connection), **options)

    @property
    def _encoding(self) -> str:
        # Overrides BaseCursor._encoding, which reads the encoding from the session. Django's
        # backend uses UTF8 for all sessions.
        return "utf-8"

    # --- Running one statement ----------------------------------------------------------

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        """Run one statement.

        :raises SessionStateRefused: the statement depends on the session in a way that shared
            sessions do not allow. Nothing was sent.
        :raises ShardDatabaseMissing: the schema of the shard does not exist.
        """
        text = query if type(query) is str else self._text(query)
        kind = classify(text)
        connection = self._owner
        if connection.session is not None:
            connection.refuse_if_busy()
        if kind > _INSERT:
            self._run_special(connection, kind, text, query, params, options)
        elif connection.mode is _FREE:
            self._run_free(connection, kind, text, query, params, options)
        else:
            if not kind and connection.only_reads and not is_repeatable(text):
                # The statement calls a function that may write, although its kind is a read. If a
                # transaction uses several shards, those on which it has only read commit first.
                # This shard must not be one of them.
                connection.only_reads = False
            self._run_held(connection, kind, query, params, options)
        return self

    def _text(self, query: Any) -> str:
        if isinstance(query, str):
            return query
        if isinstance(query, bytes):
            return query.decode()
        if isinstance(query, sql.Composable):
            return query.as_string(cast(Any, self._owner))
        raise SessionStateRefused(
            f"Alias {self._owner.alias!r}: a statement must be text or an object of psycopg.sql, not"
            f" {type(query).__name__!r}."
        )

    def _run_free(
        self,
        connection: PostgreSQLConnection,
        kind: PostgreSQLKind,
        text: str,
        query: Any,
        params: Any,
        options: dict[str, Any],
    ) -> None:
        """Run a statement in autocommit, on a session leased for it. Repeat a read once if the
        session turns out to be dead.
        """
        session = connection.lease_session()
        may_retry_until = 0.0 if kind else time.monotonic() + RETRY_WITHIN
        self._packet = connection.autocommit_packet
        while True:
            self._prefix = connection.autocommit_prefix
            try:
                if kind:
                    check_route()
                self._send(session, query, params, options)
            except BaseException as exc:
                connection.return_session(session)
                if (
                    not session.is_dead
                    or time.monotonic() > may_retry_until
                    or not isinstance(exc, psycopg.OperationalError)
                    or not is_repeatable(text)
                ):
                    raise
                may_retry_until = 0.0
                connection.pool.stats.retries += 1
                session = connection.lease_session()
                continue
            connection.return_session(session)
            return

    def _run_held(
        self,
        connection: PostgreSQLConnection,
        kind: PostgreSQLKind,
        query: Any,
        params: Any,
        options: dict[str, Any],
        more: Sequence[bytes] = (),
    ) -> None:
        """Run a statement on the session that the connection holds, or on a newly leased one.

        :param more: statements to send in the same packet, before ``query``.
        """
        if kind and not _SAVEPOINT <= kind <= _RELEASE:
            self._record_write(kind)
        session, prefix = connection.begin_statement(kind)
        try:
            if kind:
                check_route()
            self._prefix = prefix = [*prefix, *more]
            self._packet = packet_of(prefix)
            self._send(session, query, params, options)
        except BaseException as exc:
            if isinstance(exc, psycopg.Error) and exc.sqlstate is not None:
                connection.fail_transaction(prefix)
            connection.record_error(exc)
            raise
        if connection.autocommitted:
            connection.settle()

    def _run_special(
        self,
        connection: PostgreSQLConnection,
        kind: PostgreSQLKind,
        text: str,
        query: Any,
        params: Any,
        options: dict[str, Any],
    ) -> None:
        in_transaction = not connection.autocommitted
        more: Sequence[bytes] = ()
        if kind <= _RELEASE:
            if in_transaction and connection.mode <= SessionMode.PINNED and connection.defer(text):
                self._reset()
                self._query = cast(Any, _NotSent(text.encode()))
                return
        elif kind is PostgreSQLKind.EXTENSION:
            if connection.schema is not None:
                query, more = self._once_per_database(text)
        elif kind is PostgreSQLKind.AFFINE:
            self._check_affinity(connection)
        elif kind is PostgreSQLKind.BARE and prepares_transaction(text):
            connection.refuse_control(text)
        elif kind is PostgreSQLKind.MAYBE_ALONE or kind is PostgreSQLKind.ALONE:
            # The server refuses such a statement in a packet with others, so send it alone. Behind
            # a pooler, this is impossible. There, a statement of the kind MAYBE_ALONE is sent in a
            # packet nevertheless, because the server seldom refuses it.
            can_share = kind is PostgreSQLKind.MAYBE_ALONE and connection.has_pooler
            if not in_transaction and not can_share:
                self._run_alone(connection, query, params, options)
                return
        elif kind is PostgreSQLKind.CONTROL:
            connection.refuse_control(text)
            connection.existing_savepoints.clear()
            if not in_transaction:
                connection.pin(reason(text), own_path=True)
            elif connection.schema is not None and (is_several(text) or begins_anew(text)):
                raise SessionStateRefused(
                    f"Alias {connection.alias!r}: {reason(text)!r}, which ends the transaction and goes"
                    " on, would lose the search path of the schema. Run the statements one by one, and"
                    " leave AND CHAIN out."
                )
        elif kind is PostgreSQLKind.PATH:
            connection.pin(reason(text), own_path=True)
        elif kind is PostgreSQLKind.STATE:
            connection.pin(reason(text))
        self._run_held(connection, kind, query, params, options, more)
        if kind is PostgreSQLKind.EXTENSION:
            connection.pool.type_oids.clear()
        elif kind is PostgreSQLKind.PATH and resets_path(text):
            # The statement has reset the search path, for example by RESET ALL. In a session of the
            # pool, the path is then the server's default. With Django's own backend, it would be
            # the path of the shard, so set that again.
            connection.restore_path()

    def _record_write(self, kind: PostgreSQLKind) -> None:
        connection = self._owner
        connection.only_reads = False
        if kind is _INSERT or kind is PostgreSQLKind.MAYBE_ALONE:
            stays = not connection.autocommitted or connection.mode is SessionMode.PINNED
            connection.may_have_number |= stays

    def _check_affinity(self, connection: PostgreSQLConnection) -> None:
        if not connection.may_have_number:
            raise SessionStateRefused(
                f"Alias {connection.alias!r}: currval() and lastval() read what an earlier statement left"
                " in its session, which may have served another alias since. Run the INSERT and this"
                " statement in one atomic() block, or use INSERT … RETURNING."
            )

    def _run_alone(
        self, connection: PostgreSQLConnection, query: Any, params: Any, options: dict[str, Any]
    ) -> None:
        check_route()
        with connection.standing_session() as session:
            try:
                self._prefix, self._packet = [], b""
                self._send(session, query, params, options)
            except BaseException as exc:
                if session is connection.session:
                    connection.record_error(exc)
                raise

    def _send(
        self, session: PostgreSQLNodeSession, query: Any, params: Any, options: dict[str, Any]
    ) -> None:
        """Run ``query`` on ``session``, in one packet after the statements of ``_prefix``."""
        self._conn, self._pgconn = session.raw, session.pgconn
        # Make the driver create new converters of values. For the same query as before, it would
        # use those that it created for an earlier session.
        self._last_query = None
        try:
            super().execute(query, params, **options)
        finally:
            self._prefix = []
            self._conn = self._owner
        if len(self._results) > 1:
            # There are several results. The driver creates converters of the later ones only when
            # they are read. The session may be closed by then, so use converters without a session.
            self._tx = Transformer(self)
            self._select_current_result(0)

    def _execute_send(self, query: Any, **options: Any) -> None:
        # Overrides ClientCursorMixin._execute_send, to send the statements of _prefix in the same
        # packet.
        if self._prefix:
            self._query = query
            self._pgconn.send_query(self._packet + query.query)
        else:
            super()._execute_send(query, **options)

    def _check_results(self, results: list[Any]) -> None:
        # Overrides BaseCursor._check_results, which raises an error if a result is an error. The
        # driver later passes the same list to _set_results(). So remove the results of the statements
        # in _prefix.
        prefix = self._prefix
        if not prefix:
            super()._check_results(results)
            return
        length = len(prefix)
        done = 0
        for result in results[:length]:
            if result.status not in _GOOD:
                break
            done += 1
        self._owner.record_prefix(prefix, done)
        del results[:done]
        if done == length and not results:
            # If the user's text has no statement, the server returns no result for it. The driver
            # expects one, so add an empty result.
            results.append(self._pgconn.make_empty_result(ExecStatus.EMPTY_QUERY))
        try:
            super()._check_results(results)
        except psycopg.Error as exc:
            shift_position(exc, prefix)
            error = self._owner.prefix_error(exc) if done < length else exc
            if error is exc:
                raise
            raise error from exc

    # --- Statements that cannot share a packet with others ---------------------------------

    @contextmanager
    def _block(self, query: Any, method: str) -> Iterator[None]:
        """Run a ``with`` block in which the cursor has a session in a transaction, with the search
        path.

        In autocommit, the transaction ends with the block: it is committed, or rolled back after an
        error.

        :param query: the statement that will run in the block.
        :param method: the name of the cursor's method that runs the statement, for errors.
        """
        connection = self._owner
        connection.refuse_if_busy()
        self._record_write(self._plain_kind(query, method))
        # Make the driver forget the last query, whose converters belong to an earlier session.
        self._last_query = None
        session = connection.session
        is_own = connection.autocommitted and not (session is not None and session.in_transaction)
        if connection.mode >= SessionMode.LOST:
            # The session is lost, or the connection is closed. begin_statement() raises the error.
            connection.begin_statement(_WRITE)
        is_leased = is_own and session is None
        if is_own:
            session = session or connection.lease_session()
            prefix = [BEGIN] if connection.has_own_path else [BEGIN, *connection.autocommit_prefix]
        else:
            session, prefix = connection.begin_statement(_WRITE)
        try:
            check_route()
            if prefix:
                self._begin(connection, session, prefix)
            self._conn, self._pgconn = session.raw, session.pgconn
            yield
            if is_own and session.in_transaction:
                session.end_transaction("commit")
            elif not is_leased:
                # A COPY that was not read to its end may have left the session unusable.
                connection.record_error(psycopg.OperationalError("COPY was not read to its end"))
        except BaseException as exc:
            if is_own and session.in_transaction:
                session.end_transaction("rollback")
            if not is_leased:
                connection.record_error(exc)
            raise
        finally:
            self._conn = self._owner
            if is_leased:
                connection.return_session(session)

    def _begin(
        self, connection: PostgreSQLConnection, session: PostgreSQLNodeSession, prefix: list[bytes]
    ) -> None:
        try:
            session.run(b";\n".join(prefix))
        except psycopg.Error as exc:
            connection.record_error(exc)
            error = connection.prefix_error(exc)
            if error is exc:
                raise
            raise error from exc
        except BaseException as exc:
            connection.record_error(exc)
            raise
        connection.record_prefix(prefix, len(prefix))

    def _plain_kind(self, query: Any, method: str) -> PostgreSQLKind:
        """Return the kind of a statement. Raise an error if the statement leaves state in the session."""
        kind = classify(self._text(query))
        if kind is PostgreSQLKind.AFFINE:
            self._check_affinity(self._owner)
        elif kind > _INSERT:
            raise SessionStateRefused(
                f"Alias {self._owner.alias!r}: {method}() takes statements that read or write rows, not"
                f" {reason(self._text(query))!r}. Use execute()."
            )
        return kind

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        with self._block(query, "executemany"):
            super().executemany(query, params_seq, **options)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        with self._block(statement, "copy"), self._whole_errors():
            with super().copy(statement, params, **options) as copy:
                yield copy

    @contextmanager
    def _whole_errors(self) -> Iterator[None]:
        """Raise OperationalError, not ValueError, if a session behind a pooler is lost during COPY.

        The driver raises ValueError then, because the pooler sends two results.
        """
        try:
            yield
        except ValueError as exc:
            if self._conn.pgconn.transaction_status == TransactionStatus.IDLE:
                raise
            if self._conn.pgconn.status == ConnStatus.OK:
                with suppress(psycopg.Error):
                    self._pgconn.consume_input()
            if self._conn.pgconn.status == ConnStatus.OK:
                raise
            raise psycopg.OperationalError("the connection was lost in the middle of COPY") from exc

    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        with self._block(query, "stream"):
            yield from super().stream(query, params, **options)

    def mogrify(self, query: Any, params: Any = None) -> str:
        """Return the statement with its parameters filled in, as it would be sent."""
        text: str = psycopg.ClientCursor(cast(Any, self._owner)).mogrify(query, params)
        return text

    def _once_per_database(self, text: str) -> tuple[str, list[bytes]]:
        """Return a CREATE EXTENSION for the schema that all shards of the database share. Also
        return the statements to send before it, which create this schema if it is missing.

        :param text: the CREATE EXTENSION that the caller has sent. It names no schema.
        """
        alone = without_comments(text)
        match = _EXTENSION.match(alone)
        if match is None or is_several(text):
            raise SessionStateRefused(
                f"Alias {self._owner.alias!r}: CREATE EXTENSION must be a statement of its own, because"
                " all schemas of the database share an extension."
            )
        name = match[1]
        name = name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
        # If two sessions create the same extension at the same time, one of them gets an error. So
        # take a lock first.
        prepare = (
            "DO $sharded_orm$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_extension WHERE"
            f" extname OPERATOR(pg_catalog.=) {literal(name)})"
            f" THEN PERFORM pg_catalog.pg_advisory_xact_lock({_EXTENSION_LOCK});"
            f" IF pg_catalog.to_regnamespace({literal(quoted(EXTENSIONS))}) IS NULL"
            f" THEN CREATE SCHEMA {quoted(EXTENSIONS)}; END IF; END IF; END $sharded_orm$"
        )
        return f"{alone} SCHEMA {quoted(EXTENSIONS)}", [prepare.encode()]


class PostgreSQLCursor(SessionLeaseMixin, StockCursor):
    """The default cursor: the driver fills in the parameters, and execute() fetches all rows."""


def shift_position(exc: psycopg.Error, prefix: list[bytes]) -> None:
    """Make the error position in ``exc`` count from the start of the statement, not of the packet."""
    if not prefix:
        return
    if exc.args and isinstance(exc.args[0], str):
        lines = sum(part.count(b"\n") + 1 for part in prefix)
        exc.args = (
            _LINE.sub(lambda m: f"LINE {max(int(m[1]) - lines, 1)}:", exc.args[0], count=1),
            *exc.args[1:],
        )
    result, position = exc.pgresult, exc.diag.statement_position
    shift = sum(len(part.decode()) + 2 for part in prefix)
    if result is not None and position and int(position) > shift:
        # The result in the error cannot be changed. So replace it by a dict of its fields, as the
        # driver does when an error is pickled.
        info: Any = {field: result.error_field(field) for field in DiagnosticField}
        info[DiagnosticField.STATEMENT_POSITION] = b"%d" % (int(position) - shift)
        exc._info = info
