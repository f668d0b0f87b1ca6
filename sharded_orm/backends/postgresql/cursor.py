"""Cursors that lease a session for each statement, and give it back when the statement is done.

The driver's cursor keeps a reference to a connection. Here that is a session while a statement runs, and
the alias's virtual connection at other times. All rows of a statement are in the process by then, but
those of a cursor with a name.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import psycopg
from django.db.backends.postgresql.base import Cursor as StockCursor
from django.db.backends.postgresql.base import ServerSideCursor as StockServerCursor
from psycopg import sql
from psycopg.pq import DiagnosticField, ExecStatus

from sharded_orm.backends.postgresql.connection import BEGIN, EXTENSIONS, PostgreSQLConnection
from sharded_orm.backends.postgresql.statement_kind import (
    PostgreSQLKind,
    classify,
    extension_name,
    is_several,
    reason,
)
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.route_check import check_route
from sharded_orm.exceptions import SessionStateRefused

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.session import PostgreSQLSession

# Seconds. A read that loses its session is repeated only if it has run for less than this time. After a
# longer time, the read may have been killed because it was slow.
RETRY_WITHIN = 1.0

_READ, _WRITE = PostgreSQLKind.READ, PostgreSQLKind.WRITE
_SAVEPOINT, _RELEASE = PostgreSQLKind.SAVEPOINT, PostgreSQLKind.RELEASE
_FREE, _TRANSACTION = SessionMode.FREE, SessionMode.TRANSACTION
_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)
# What the server does not run twice at the same time in one database.
_EXTENSION_LOCK = 0x5348_4152_4445_4458


class LeaseMixin(psycopg.Cursor[Any]):
    """Mixin for a client-side cursor of the driver: the cursor leases its session. Must be the first
    base class.
    """

    _conn: Any

    def __init__(self, connection: PostgreSQLConnection, **options: Any) -> None:
        #: The virtual connection, to which the cursor belongs.
        self._owner = connection
        #: The statements that are sent before the next one, in its packet.
        self._prefix: list[bytes] = []
        super().__init__(cast(Any, connection), **options)

    @property
    def _encoding(self) -> str:
        # Overrides BaseCursor._encoding, which asks the session. Django's backend sets UTF8 for all.
        return "utf-8"

    # --- Running one statement ----------------------------------------------------------

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        """Run one statement.

        :raises SessionStateRefused: the statement depends on the session in a way that a shared
            session cannot offer. Nothing was sent.
        :raises ShardDatabaseMissing: the schema does not exist.
        """
        text = self._text(query)
        kind = classify(text)
        connection = self._owner
        if kind <= _WRITE:
            if kind and connection.schema is not None and "EXTENSION" in text[:40].upper():
                query = self._once_per_database(query, text)
            if connection.mode is _FREE:
                self._run_free(connection, kind, query, params, options)
            else:
                self._run_held(connection, kind, query, params, options)
        else:
            self._run_special(connection, kind, text, query, params, options)
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
        query: Any,
        params: Any,
        options: dict[str, Any],
    ) -> None:
        """Run a statement in autocommit, on a session leased for this statement.

        A read is repeated once if its session turns out to be dead.
        """
        pool = connection.pool
        session = connection.lease_session()
        retry_until = 0.0 if kind else time.monotonic() + RETRY_WITHIN
        while True:
            try:
                if kind:
                    check_route()
                self._send(session, connection.autocommit_prefix, query, params, options)
            except BaseException as exc:
                connection.return_session(session)
                if (
                    not session.is_dead
                    or not retry_until
                    or time.monotonic() > retry_until
                    or not isinstance(exc, psycopg.OperationalError)
                ):
                    raise
                retry_until = 0.0
                pool.stats.retries += 1
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
    ) -> None:
        """Run a statement on the session that the connection holds. If there is none, lease one."""
        if kind:
            connection.only_reads = False
        session, prefix = connection.begin_statement(kind)
        try:
            if kind:
                check_route()
            self._send(session, prefix, query, params, options)
        except BaseException as exc:
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
        """Run a statement that is more than a plain read or write."""
        in_transaction = not connection.autocommitted
        if kind <= _RELEASE:
            if in_transaction and connection.mode <= SessionMode.PINNED and connection.defer(text):
                self._reset()
                return
        elif kind is PostgreSQLKind.AFFINE:
            if not in_transaction and connection.mode is not SessionMode.PINNED:
                raise SessionStateRefused(
                    f"Alias {connection.alias!r}: currval() and lastval() read what an earlier statement"
                    " left in its session, which may have served another alias since. Run both"
                    " statements in one atomic() block, or use INSERT … RETURNING."
                )
        elif kind is PostgreSQLKind.ALONE:
            if not in_transaction:
                self._run_alone(connection, query, params, options)
                return
        elif kind is PostgreSQLKind.CONTROL:
            if not in_transaction:
                connection.pin(reason(text), own_path=True)
            elif connection.schema is not None and is_several(text):
                raise SessionStateRefused(
                    f"Alias {connection.alias!r}: a text of several statements that ends the transaction"
                    " would lose the search path of the schema. Run the statements one by one."
                )
        elif kind is PostgreSQLKind.PATH:
            connection.pin(reason(text), own_path=True)
        elif kind is PostgreSQLKind.STATE:
            connection.pin(reason(text))
        self._run_held(connection, kind, query, params, options)

    def _run_alone(
        self, connection: PostgreSQLConnection, query: Any, params: Any, options: dict[str, Any]
    ) -> None:
        check_route()
        with connection.standing_session() as session:
            try:
                self._send(session, [], query, params, options)
            except BaseException as exc:
                if session is connection.session:
                    connection.record_error(exc)
                raise

    def _send(
        self,
        session: PostgreSQLSession,
        prefix: list[bytes],
        query: Any,
        params: Any,
        options: dict[str, Any],
    ) -> None:
        """Run ``query`` on ``session``, with the statements ``prefix`` in the same packet."""
        self._conn, self._pgconn = session.raw, session.pgconn
        self._prefix = prefix
        try:
            super().execute(query, params, **options)
        finally:
            self._prefix = []
            self._conn = self._owner

    def _execute_send(self, query: Any, **options: Any) -> None:
        # Overrides ClientCursorMixin._execute_send. It sends the statement, values filled in.
        if self._prefix:
            self._query = query
            self._pgconn.send_query(b";\n".join([*self._prefix, query.query]))
        else:
            super()._execute_send(query, **options)

    def _check_results(self, results: list[Any]) -> None:
        # Overrides BaseCursor._check_results, which raises an error for a result that is one.
        # Afterwards, the driver gives the same list to _set_results().
        prefix = self._prefix
        if prefix:
            done = 0
            while done < min(len(prefix), len(results)) and results[done].status in _GOOD:
                done += 1
            self._owner.record_prefix(prefix, done)
            is_complete = done == len(prefix)
            del results[:done]
            try:
                super()._check_results(results)
            except psycopg.errors.InvalidSchemaName as exc:
                if not is_complete:
                    raise self._owner.missing(exc) from exc
                _shift_position(exc, prefix)
                raise
            except psycopg.Error as exc:
                _shift_position(exc, prefix)
                raise
        else:
            super()._check_results(results)

    # --- Statements that cannot share a packet with others ---------------------------------

    @contextmanager
    def _block(self) -> Iterator[None]:
        """Give the cursor a session that stands in the schema, in a transaction, for a ``with`` block.

        In autocommit, the transaction ends with the block: committed, or rolled back after an error.
        """
        connection = self._owner
        connection.only_reads = False
        session = connection.session
        is_own = connection.autocommitted and not (session is not None and session.in_transaction)
        if connection.mode >= SessionMode.LOST:
            connection.begin_statement(_WRITE)  # Raises, because the session is lost.
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
            if is_own:
                session.raw.commit()
        except BaseException as exc:
            if is_own and session.in_transaction:
                session.raw.rollback()
            if not is_leased:
                connection.record_error(exc)
            raise
        finally:
            self._conn = self._owner
            if is_leased:
                connection.return_session(session)

    def _begin(
        self, connection: PostgreSQLConnection, session: PostgreSQLSession, prefix: list[bytes]
    ) -> None:
        try:
            session.run(b";\n".join(prefix))
        except psycopg.errors.InvalidSchemaName as exc:
            connection.record_error(exc)
            raise connection.missing(exc) from exc
        except BaseException as exc:
            connection.record_error(exc)
            raise
        connection.record_prefix(prefix, len(prefix))

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        kind = classify(self._text(query))
        if kind > _WRITE:
            raise SessionStateRefused(
                f"Alias {self._owner.alias!r}: executemany() takes statements that read or write rows."
            )
        with self._block():
            super().executemany(query, params_seq, **options)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        with self._block(), super().copy(statement, params, **options) as copy:
            yield copy

    def stream(self, query: Any, params: Any = None, **options: Any) -> Iterator[Any]:
        with self._block():
            yield from super().stream(query, params, **options)

    def mogrify(self, query: Any, params: Any = None) -> str:
        """Return the statement as it would be sent: with the parameters filled in."""
        text: str = psycopg.ClientCursor(cast(Any, self._owner)).mogrify(query, params)
        return text

    def _once_per_database(self, query: Any, text: str) -> Any:
        """Return a statement that creates an extension for all schemas of the database, not for one.

        Any other ``query`` is returned as it is.
        """
        name = extension_name(text)
        if name is None:
            return query
        schema = f'"{EXTENSIONS}"'
        return (
            f"SELECT pg_catalog.pg_advisory_xact_lock({_EXTENSION_LOCK});"
            f" CREATE SCHEMA IF NOT EXISTS {schema};"
            f" {text.rstrip().rstrip(';')} SCHEMA {schema}"
        )


class PostgreSQLCursor(LeaseMixin, StockCursor):
    """The default cursor: the driver fills in the values, and execute() fetches all rows."""

    @staticmethod
    def named(
        connection: PostgreSQLConnection, name: str, **options: Any
    ) -> PostgreSQLServerCursor:
        return PostgreSQLServerCursor(connection, name=name, **options)


class PostgreSQLServerCursor(LeaseMixin, StockServerCursor):
    """A cursor with a name: its rows stay on the server until they are fetched.

    In autocommit, the cursor has a session of its own until it is closed. In a transaction, it is
    closed at the latest when the transaction ends.
    """

    # The session of this cursor; None if the cursor was not executed, or is closed.
    _session: PostgreSQLSession | None = None
    # Whether the session was leased for this cursor only.
    _is_leased = False

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        connection = self._owner
        if self._session is not None:
            self._leave()
        kind = max(classify(self._text(query)), _WRITE)
        self._is_leased = connection.mode is _FREE
        if self._is_leased:
            session, prefix = connection.lease_session(), connection.autocommit_prefix
        else:
            session, prefix = connection.begin_statement(kind)
            if prefix and not connection.autocommitted:
                # The driver looks only at the last result of a packet that declares a cursor. So send
                # these statements before, to learn which of them the server has executed.
                self._begin(connection, session, prefix)
                prefix = []
        self._session = session
        connection.bound_cursors.append(weakref.ref(self))
        self._conn, self._pgconn = session.raw, session.pgconn
        self._prefix = prefix
        try:
            super(LeaseMixin, self).execute(query, params, **options)
        except BaseException as exc:
            self._prefix = []
            self._leave()
            if not self._is_leased:
                connection.record_error(exc)
            raise
        finally:
            self._prefix = []
        return self

    def _raise_for_result(self, result: Any) -> Any:
        # Overrides BaseCursor._raise_for_result, which ServerCursorMixin._declare_gen() calls.
        prefix = self._prefix
        try:
            super()._raise_for_result(result)
        except psycopg.errors.InvalidSchemaName as exc:
            raise self._owner.missing(exc) from exc
        except psycopg.Error as exc:
            _shift_position(exc, prefix)
            raise

    def _check_results(self, results: list[Any]) -> None:
        # The driver describes the cursor after it was declared: then nothing is sent with it.
        psycopg.Cursor._check_results(self, results)

    def close(self) -> None:
        if not self._closed and self._session is not None:
            try:
                super().close()
            finally:
                self._leave()
        elif not self._closed:
            self._close()

    def expire(self) -> None:
        """Close this cursor without a word to the server, because its transaction ends."""
        self._close()
        session, self._session = self._session, None
        self._conn = self._owner
        if session is not None and self._is_leased:
            self._owner.pool.discard(session)

    def _leave(self) -> None:
        session, self._session = self._session, None
        self._conn = self._owner
        bound = self._owner.bound_cursors
        bound[:] = [reference for reference in bound if reference() not in (None, self)]
        if session is not None and self._is_leased:
            self._owner.return_session(session)


def _shift_position(exc: psycopg.Error, prefix: list[bytes]) -> None:
    """Make the position that ``exc`` gives count from the user's statement, not from the packet."""
    result, position = exc.pgresult, exc.diag.statement_position
    shift = sum(len(part.decode()) + 2 for part in prefix)
    if result is not None and position and int(position) > shift:
        # The driver replaces the result by such a dict if an error is pickled.
        info: Any = {field: result.error_field(field) for field in DiagnosticField}
        info[DiagnosticField.STATEMENT_POSITION] = b"%d" % (int(position) - shift)
        exc._info = info
