"""Named cursors. Their rows stay on the server until they are fetched."""

from __future__ import annotations

import weakref
from typing import Any, cast

import psycopg
from django.db.backends.postgresql.base import ServerSideCursor as StockServerCursor

from sharded_orm.backends.postgresql.cursor import SessionLeaseMixin, shift_position
from sharded_orm.backends.postgresql.search_path import packet_of
from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession
from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind, is_repeatable
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.route_check import check_route


class PostgreSQLServerCursor(SessionLeaseMixin, StockServerCursor):
    """A named cursor. Its rows stay on the server until they are fetched.

    In autocommit, it keeps a session of its own until it is closed. In a transaction, it is closed
    at the latest when the transaction ends, unless it was declared WITH HOLD.
    """

    # Attributes of the driver's class that are missing in its type hints.
    _withhold: bool
    _close_gen: Any

    # The session in which the cursor's statement runs. None before the first statement, and after
    # close().
    _session: PostgreSQLNodeSession | None = None
    # Whether the session was leased for this cursor alone, so that the cursor must return it.
    _is_leased = False

    # Whether the end of the connection's transaction closes the cursor, because it was declared in
    # the transaction without WITH HOLD.
    _ends_with_transaction = False

    @property
    def outlives_transactions(self) -> bool:
        return not self._ends_with_transaction

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        connection = self._owner
        connection.refuse_if_busy()
        kind = self._plain_kind(query, "execute")
        if self._session is not None:
            try:
                self._conn.wait(self._close_gen())
            finally:
                self._leave()
            self._described = False
        in_transaction = not connection.autocommitted
        if self._withhold:
            if connection.has_pooler:
                raise connection.pooler_refusal("a cursor WITH HOLD")
            if in_transaction:
                connection.pin("a cursor WITH HOLD")
        self._ends_with_transaction = in_transaction and not self._withhold
        self._is_leased = connection.mode is SessionMode.FREE and self._withhold
        if kind or (connection.only_reads and not is_repeatable(self._text(query))):
            self._record_write(kind)
        if self._is_leased:
            session, prefix = connection.lease_session(), connection.autocommit_prefix
        else:
            # Outside of a transaction, the server refuses a cursor that is not WITH HOLD. It raises
            # its usual error only if the statement is alone in its packet. So pass the kind BARE:
            # begin_statement() then puts nothing before the statement.
            session, prefix = connection.begin_statement(
                kind if in_transaction or self._withhold else PostgreSQLKind.BARE
            )
        self._session = session
        connection.bound_cursors.append(weakref.ref(self))
        self._conn, self._pgconn = session.raw, session.pgconn
        self._last_query = None
        try:
            if kind:
                check_route()
            if prefix and in_transaction:
                # The driver checks only the last result of the packet that declares a cursor. To
                # know which of the statements of ``prefix`` have succeeded, send them in a packet
                # before.
                self._begin(connection, session, prefix)
                prefix = []
            self._prefix, self._packet = prefix, packet_of(prefix)
            super(SessionLeaseMixin, self).execute(query, params, **options)
        except BaseException as exc:
            error = exc
            if self._prefix and session.is_idle and isinstance(exc, psycopg.Error):
                # The driver does not say which statement of the packet has failed. So query whether
                # the schema exists, which is the usual cause.
                error = connection.schema_error(session) or exc
            is_leased = self._is_leased
            # If the statement was interrupted, the cursor may be open on the server. A session that
            # was leased for it is then closed, not returned to the pool.
            self._leave(discard=not isinstance(exc, psycopg.Error))
            if not is_leased:
                connection.record_error(exc)
            if error is exc:
                raise
            raise error from exc
        finally:
            self._prefix = []
        return self

    def _raise_for_result(self, result: Any) -> Any:
        # Overrides a method of the driver that ServerCursorMixin._declare_gen() calls. Positions in
        # an error shall count from the start of the statement, not of the packet.
        prefix = self._prefix
        try:
            super()._raise_for_result(result)
        except psycopg.Error as exc:
            shift_position(exc, prefix)
            raise

    def _check_results(self, results: list[Any]) -> None:
        # After it has declared the cursor, the driver sends a second packet, which describes the
        # cursor. This packet has no prefix, so use the driver's method as it is.
        psycopg.Cursor._check_results(self, results)

    def _fetch_gen(self, num: int | None) -> Any:
        # Overrides ServerCursorMixin._fetch_gen(), to record the loss of the session.
        if not self._is_leased:
            self._owner.refuse_if_busy()
        try:
            return (yield from cast(Any, super())._fetch_gen(num))
        except psycopg.Error as exc:
            session = self._session
            if session is not None and not self._is_leased and not session.is_usable:
                self._owner.record_error(exc)
            raise

    def __del__(self) -> None:
        if not hasattr(self, "_closed"):
            return  # No session could be opened for the cursor, so the driver's __init__ did not run.
        # The program has dropped the cursor without close(). So close or release its session here.
        session = getattr(self, "_session", None)
        if session is not None and not self._closed:
            if self._is_leased:
                self._owner.pool.discard(session)
            self._is_leased = False
            self._leave()
        cast(Any, super()).__del__()

    def close(self) -> None:
        if not self._closed and self._session is not None:
            is_done = False
            try:
                super().close()
                is_done = True
            finally:
                self._close()
                # If CLOSE has failed, the cursor may still be open on the server. A session that
                # was leased for it is then closed, not returned to the pool.
                self._leave(discard=not is_done)
        elif not self._closed:
            self._close()

    def expire(self) -> None:
        """Close this cursor without sending anything. Its transaction or its session ends, and the
        server then closes the cursor, too.
        """
        self._close()
        session, self._session = self._session, None
        self._conn = self._owner
        if session is not None and self._is_leased:
            self._owner.pool.discard(session)

    def _leave(self, *, discard: bool = False) -> None:
        session, self._session = self._session, None
        self._conn = self._owner
        bound = self._owner.bound_cursors
        bound[:] = [reference for reference in bound if reference() not in (None, self)]
        if session is not None and self._is_leased:
            (self._owner.pool.discard if discard else self._owner.return_session)(session)
