"""Cursors that lease a session for each statement, and return it when all results are read.

One such cursor replaces both the driver's cursor and Django's wrapper around it. That saves a layer
of Python calls for every statement.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

from MySQLdb import MySQLError, OperationalError, ProgrammingError
from MySQLdb.cursors import BaseCursor

from sharded_orm.backends.mysql import previous_statement
from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.errors import error_for_callers
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession, is_syntax_error
from sharded_orm.backends.mysql.statement_kind import (
    SEVERAL_STATEMENTS,
    StatementKind,
    calls_stored_function,
    classify,
    reason,
    returns_no_rows,
)
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.route_check import check_route

# If the session of a read is lost within this many seconds, the read is repeated. A read that has
# run for longer is not repeated, because somebody may have killed it for its slowness.
RETRY_WITHIN = 1.0
_OUT_OF_SYNC = 2014

# Statements that may have inserted a row even if the cursor has no ``lastrowid`` after them. For
# example, a stored procedure (CALL) may insert a row, and then end with a SELECT. Each item is a
# result of statement_kind.reason().
_MAY_INSERT = (SEVERAL_STATEMENTS, "CALL", "EXECUTE")
_WRITE, _IMPLICIT = StatementKind.WRITE, StatementKind.IMPLICIT
_AFFINE, _STATE = StatementKind.AFFINE, StatementKind.STATE
_SAVEPOINT, _RELEASE = StatementKind.SAVEPOINT, StatementKind.RELEASE
_CHECKS_OFF, _CHECKS_ON = StatementKind.CHECKS_OFF, StatementKind.CHECKS_ON
_FREE, _TRANSACTION, _PINNED, _LOST = (
    SessionMode.FREE,
    SessionMode.TRANSACTION,
    SessionMode.PINNED,
    SessionMode.LOST,
)


class LeaseMixin(BaseCursor):
    """Mixin for a cursor class of the driver: the cursor leases a session for each statement. It
    must be the first base class.

    :func:`leased` combines this class with a cursor class.
    """

    connection: VirtualConnection | None
    #: Whether execute() fetches all rows at once. If False, the program reads them from the server
    #: one by one.
    stores = True

    # The defaults are class attributes to save time: most cursors run one statement only, and
    # assigning the defaults in __init__ would take longer than leasing a session.
    description: Any = None
    rowcount: Any = 0
    arraysize = 1
    lastrowid: Any = None
    rownumber: Any = None
    warning_count = 0
    _executed: Any = None
    _result: Any = None
    _rows: Any = None
    # The session that is running a statement of this cursor, or that has results which this cursor
    # has not read. Otherwise None.
    _session: NodeSession | None = None
    # The weak reference to this cursor in connection.open_cursors. None unless the cursor has
    # unread results on a session that it has leased for itself, not on that of the connection.
    _registration: weakref.ref[Any] | None = None
    # The kind of the statements that executemany() runs, so that each need not be classified. None
    # outside of executemany().
    _kind: StatementKind | None = None

    def __init__(self, connection: VirtualConnection) -> None:
        self.connection = connection

    # --- Running one statement ----------------------------------------------------------

    def execute(self, query: Any, args: Any = None) -> Any:
        """Run one statement, and return its row count as the driver's cursor does.

        :raises django.db.IntegrityError: the server refused the values; for the same error codes as
            with Django's own cursors.
        :raises ShardDatabaseMissing: the schema of the shard does not exist.
        """
        connection = self.connection
        if connection is None:
            raise ProgrammingError("cursor closed")
        if self._session is not None:
            self._discard()
        kind = self._kind
        if kind is None:
            kind = classify(query)
        if connection.collects and kind is _WRITE and returns_no_rows(query):
            result = self._empty_result(query)
            self._executed = connection.wait_for_commit(self, query, args)
            return result
        try:
            if kind <= _AFFINE and connection.mode is _FREE:
                return self._run_free(connection, kind, query, args)
            return self._run_held(connection, kind, query, args)
        except OperationalError as exc:
            if (error := error_for_callers(exc, connection)) is not None:
                raise error from exc
            raise

    def _run_free(
        self, connection: VirtualConnection, kind: StatementKind, query: Any, args: Any
    ) -> Any:
        """Run a statement in autocommit, on a session leased for this statement.

        If the session of a read turns out to be dead, the read is repeated once on another session.
        """
        pool = connection.pool
        session = (
            pool.lease() if kind is not _AFFINE else previous_statement.lease(connection, query)
        )
        session.last_user = connection
        connection.last_session = session
        retry_until = 0.0 if kind else time.monotonic() + RETRY_WITHIN
        while True:
            try:
                if kind:
                    check_route()
                statement = session.bind(query, args)
            except BaseException:
                pool.release(session)
                raise
            schema = connection.schema
            is_current = session.schema == schema or (
                kind is _AFFINE and previous_statement.is_show(query)
            )
            # Forget the session's current schema until the statement has succeeded. Another thread
            # may raise an exception here at any point, and it would then be unclear if USE was
            # executed.
            session.schema = None
            try:
                if is_current:
                    session.stored = False
                    session.query(statement)
                else:
                    session.send((connection.use,), statement)
                self._fetch_result(session)
            except BaseException as exc:
                if session.is_in_order(exc):
                    pool.release(session)
                    raise
                pool.discard(session)
                if (
                    not retry_until
                    or time.monotonic() > retry_until
                    or not isinstance(exc, MySQLError)
                    # Do not repeat a query with a stored function, which may have written rows.
                    or calls_stored_function(query)
                ):
                    raise
                retry_until = 0.0
                pool.stats.retries += 1
                session = pool.lease()
                session.last_user = connection
                connection.last_session = session
                continue
            break
        if kind:
            if kind is not _IMPLICIT:
                session.schema = schema
            if self.lastrowid:
                session.inserter = connection
                connection.insert_session = session
        else:
            session.schema = schema
        self._executed = statement
        try:
            is_pending = session.more_results() or not session.autocommits()
        except BaseException:
            pool.discard(session)
            raise
        if is_pending or self._result is not None:
            self._register_pending(connection, session)
        else:
            pool.release(session)
        return self.rowcount

    def _run_held(
        self, connection: VirtualConnection, kind: StatementKind, query: Any, args: Any
    ) -> Any:
        """Run a statement on the session that the connection holds, or on a newly leased one."""
        mode = connection.mode
        pin_reason = ""
        if mode >= _LOST:
            if kind is _CHECKS_ON and connection.checks_off and not connection.transaction.is_open:
                # The session is lost, and the statement only switches foreign key checks on again.
                # They were off in the lost session only, so nothing needs to be sent.
                connection.record_checks(off=False)
                return self._empty_result(query)
            # The session is lost, or the connection is closed. begin_statement() raises the error.
            connection.begin_statement()
        if kind is _IMPLICIT or kind is _STATE:
            connection.announce_implicit_commit()
        if mode is not _PINNED:
            if kind >= _SAVEPOINT:
                if kind <= _RELEASE:
                    if mode is _TRANSACTION and connection.transaction.defer(str(query)):
                        return self._empty_result(query)
                elif kind is _STATE or (
                    kind is _CHECKS_ON and not connection.checks_off and connection.pool.sets_checks
                ):
                    pin_reason = reason(query)
                    connection.pin(pin_reason)
                elif kind is _CHECKS_OFF and mode is _FREE:
                    connection.mode = SessionMode.HELD
            elif (
                kind is _AFFINE and connection.session is None and previous_statement.is_show(query)
            ):
                # SHOW WARNINGS shows the warnings of its session's last statement. So lease the
                # session that ran this connection's last statement.
                session = connection.session = previous_statement.lease(connection, query)
                session.last_user = connection
        prefix: list[bytes] = []
        sent = False
        try:
            session, prefix = connection.begin_statement(plain=kind is not _IMPLICIT)
            if kind is _WRITE:
                check_route()
            if kind is _AFFINE and previous_statement.is_show(query):
                # Send no prefix, such as USE, before SHOW WARNINGS: it would clear the warnings.
                prefix = []
            elif kind is _AFFINE and previous_statement.must_forget(connection, session, query):
                prefix = [FORGET_INSERT_ID, *prefix]
            statement = session.bind(query, args)
            if session.busy:
                raise ProgrammingError(
                    _OUT_OF_SYNC, "Commands out of sync: a cursor has results left to read"
                )
            if mode is _TRANSACTION and (
                # If several shards commit, those that were only read commit first. A stored function
                # might write, so a query that calls one does not count as a read.
                kind or (connection.transaction.only_reads and calls_stored_function(query))
            ):
                connection.transaction.only_reads = False
            sent = True
            limited = connection.limit + statement if kind is _WRITE else statement
            if prefix:
                session.send(prefix, limited)
            else:
                session.stored = False
                session.query(limited)
            self._fetch_result(session)
        except BaseException as exc:
            connection.record_error(exc, prefix, sent)
            if pin_reason and is_syntax_error(exc) and pin_reason != SEVERAL_STATEMENTS:
                connection.unpin(pin_reason)
            raise
        self._executed = statement
        if kind and (self.lastrowid or (kind is _STATE and reason(query) in _MAY_INSERT)):
            session.inserter = connection
            connection.insert_session = session
        elif kind is _AFFINE and prefix[:1] == [FORGET_INSERT_ID]:
            session.inserter = None
        if connection.mode is not _PINNED:
            connection.record_prefix(prefix, len(prefix))
            if kind < _IMPLICIT:
                session.schema = connection.schema
            else:
                connection.transaction.unsure = True
            if kind is _CHECKS_OFF or kind is _CHECKS_ON:
                connection.record_checks(kind is _CHECKS_OFF)
            elif mode is _FREE:
                connection.settle()
        # If the connection still holds the session, and results are unread, mark the session as
        # busy. If the session was returned to the pool, do not touch it, because another thread may
        # use it by now. Nothing is unread then, because return_session() closes a session with
        # unread results.
        if connection.session is session and (session.more_results() or self._result is not None):
            self._session = session
            session.busy = True
        return self.rowcount

    def _fetch_result(self, session: NodeSession) -> None:
        self._session = session
        try:
            self._do_get_result(session.raw)
            session.stored = self.stores
            self._post_get_result()
        finally:
            self._session = None

    def _empty_result(self, query: Any) -> int:
        """Set the attributes of this cursor as if a statement without rows had run. Return 0, the
        row count.

        Called if a statement is not sent, because it is not needed or is kept for later.
        """
        self.description = None
        self._rows = ()
        self.rownumber = 0
        self.rowcount = 0
        self.lastrowid = 0
        self._executed = query.encode() if isinstance(query, str) else query
        return 0

    # --- Unread results -------------------------------------------------------------------

    def _register_pending(self, connection: VirtualConnection, session: NodeSession) -> None:
        self._session = session
        self._registration = weakref.ref(self)
        connection.open_cursors.append(self._registration)

    def _return_session(self, session: NodeSession, *, broken: bool = False) -> None:
        """Stop using the session, because this cursor's results were read, or will not be read.

        If the session was leased only for this cursor, it is returned to the pool. Otherwise the
        connection goes on holding it.

        :param broken: whether unread results are left in the session. If so, a session that was
            leased only for this cursor is closed.
        """
        if not broken:
            # Free the result now, before another thread can use the session. When mysqlclient 2.3
            # frees a result, it takes the session's lock, so that calls of other threads fail
            # meanwhile. If garbage collection freed the result later, in a thread that already
            # holds the lock, that thread would wait for ever.
            self._result = None
        self._session = None
        session.busy = False
        registration, self._registration = self._registration, None
        connection = self.connection
        if connection is None or registration is None:
            return
        connection.open_cursors.remove(registration)
        if broken:
            connection.pool.discard(session)
        else:
            connection.return_session(session)

    def abandon(self) -> None:
        """Give up the unread results: close the session, rather than read the results from it."""
        if self._session is not None:
            self._return_session(self._session, broken=True)

    def _discard(self) -> None:
        self.description = self._rows = self.rownumber = None
        session = self._session
        if session is None:
            self._result = None
            return
        try:
            if self._result is not None:
                self._result.discard()
            session.drain()
        except BaseException:
            self._result = None
            self.abandon()
            raise
        self._return_session(session)

    def close(self) -> None:
        """Close the cursor. Its unread results are dropped."""
        if self.connection is None:
            return
        try:
            if self._session is not None or self._rows is not None:
                self._discard()
        finally:
            self.connection = None
            self._result = None

    def nextset(self) -> int | None:
        """Go to the next result of the statement. Return 1, or None if there is no further result."""
        if self._executed:
            self.fetchall()
        session = self._session
        if session is None:
            return None
        if session.next_result() == -1:
            # All results have been read, so this cursor does not need its session any more.
            self._return_session(session)
            return None
        try:
            self._fetch_result(session)
        finally:
            self._session = session
        return 1

    def __del__(self) -> None:
        # The program has dropped this cursor, so nobody can read its remaining results any more.
        # Close the session that was leased for them.
        if self._registration is not None:
            self.abandon()
        elif self._session is not None:
            # The cursor uses the session that the connection holds, and the connection still needs
            # it. Read the remaining results and discard them, because the session can run no other
            # statement before that.
            with contextlib.suppress(MySQLError):
                self._discard()

    # --- Running several statements ---------------------------------------------------------

    def executemany(self, query: Any, args: Any) -> Any:
        """Run ``query`` with each element of ``args``, all on one session.

        Like the driver's method, it sends inserts in batches and other statements one by one.
        """
        connection = self.connection
        if connection is None:
            raise ProgrammingError("cursor closed")
        self._kind = classify(query)
        try:
            with connection.one_session():
                return super().executemany(query, args)
        finally:
            self._kind = None

    def callproc(self, procname: Any, args: Any = ()) -> Any:
        """Call a stored procedure. Pin the session first (keep it until close()), because the
        procedure may leave state in it.
        """
        connection = self.connection
        if connection is None:
            raise ProgrammingError("cursor closed")
        if self._session is not None:
            self._discard()
        connection.announce_implicit_commit()
        try:
            connection.pin("CALL")
            return super().callproc(procname, args)
        except OperationalError as exc:
            if (error := error_for_callers(exc, connection)) is not None:
                raise error from exc
            raise

    def _query(self, statement: bytes) -> Any:
        # Overrides the driver's method that sends a statement. execute() does not use it: only the
        # driver's callproc() calls it.
        connection = self.connection
        assert connection is not None
        session, prefix = connection.begin_statement()
        try:
            session.stored = False
            session.query(statement)
            self._fetch_result(session)
        except BaseException as exc:
            connection.record_error(exc, prefix, sent=True)
            raise
        self._executed = statement
        session.inserter = connection
        connection.insert_session = session
        if session.more_results():
            self._session = session
            session.busy = True
        return self.rowcount

    def mogrify(self, query: Any, args: Any = None) -> str:
        """Return the statement with its parameters filled in, as it would be sent."""
        with self._encoder() as session:
            statement: str = session.bind(query, args).decode(session.raw.encoding)
        return statement

    def _mogrify(self, query: Any, args: Any = None) -> bytes:
        with self._encoder() as session:
            statement: bytes = session.bind(query, args)
        return statement

    def _encoder(self) -> Any:
        if self.connection is None:
            raise ProgrammingError("cursor closed")
        return self.connection.any_session()

    def _get_db(self) -> Any:
        if self.connection is None:
            raise ProgrammingError("cursor closed")
        if self._session is not None:
            return self._session.raw
        with self.connection.any_session() as session:
            return session.raw
