"""Cursors that lease a session for as long as they need it.

They replace the driver's cursor and the wrapper that Django puts around it, which saves a layer
of Python on the path of every statement.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from django.db import IntegrityError
from MySQLdb import MySQLError, OperationalError, ProgrammingError
from MySQLdb.cursors import BaseCursor, Cursor, CursorStoreResultMixIn

from sharded_orm.backends.mysql import traces
from sharded_orm.backends.mysql.connection import SessionMode, VirtualConnection
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession, is_syntax_error
from sharded_orm.backends.mysql.statement_kind import (
    SEVERAL_STATEMENTS,
    StatementKind,
    classify,
    reason,
)

# django.db.backends.mysql.base.CursorWrapper.codes_for_integrityerror
_INTEGRITY_ERRORS = frozenset([1048, 1690, 3819, 4025])
# Seconds. A read that ran for longer before its session was lost is not repeated: it may have been
# killed for being slow.
RETRY_WITHIN = 1.0
_OUT_OF_SYNC = 2014

# Statements that may insert although their last result has no id.
_MAY_INSERT = (SEVERAL_STATEMENTS, "CALL", "EXECUTE")
_READ, _WRITE, _IMPLICIT, _AFFINE = (
    StatementKind.READ,
    StatementKind.WRITE,
    StatementKind.IMPLICIT,
    StatementKind.AFFINE,
)
_SAVEPOINT, _RELEASE = StatementKind.SAVEPOINT, StatementKind.RELEASE
_CHECKS_OFF, _CHECKS_ON, _STATE = (
    StatementKind.CHECKS_OFF,
    StatementKind.CHECKS_ON,
    StatementKind.STATE,
)
_FREE, _TRANSACTION, _PINNED, _LOST = (
    SessionMode.FREE,
    SessionMode.TRANSACTION,
    SessionMode.PINNED,
    SessionMode.LOST,
)


class LeaseMixin(BaseCursor):
    """First base of a leasing cursor, before a cursor class of the driver; see :func:`leased`."""

    connection: VirtualConnection | None
    #: execute() fetches all rows.
    stores = True

    # Class attributes: most cursors live for one statement, and assigning the defaults in
    # __init__ would cost more time than leasing does.
    description: Any = None
    rowcount: Any = 0
    arraysize = 1
    lastrowid: Any = None
    rownumber: Any = None
    warning_count = 0
    _executed: Any = None
    _result: Any = None
    _rows: Any = None
    # The session that runs a statement of this cursor, or has results for it.
    _session: NodeSession | None = None
    # Our entry in connection.open_cursors, if the session was leased for this cursor alone.
    _registration: weakref.ref[Any] | None = None
    _kind: StatementKind | None = None

    def __init__(self, connection: VirtualConnection) -> None:
        self.connection = connection

    # --- execute ------------------------------------------------------------------------

    def execute(self, query: Any, args: Any = None) -> Any:
        """Run one statement.

        :raises django.db.IntegrityError: for the error codes for which Django does.
        """
        connection = self.connection
        if connection is None:
            raise ProgrammingError("cursor closed")
        if self._session is not None:
            self._discard()
        kind = self._kind
        if kind is None:
            kind = classify(query)
        try:
            if kind <= _AFFINE and connection.mode is _FREE:
                return self._run_free(connection, kind, query, args)
            return self._run_held(connection, kind, query, args)
        except OperationalError as exc:
            if exc.args and exc.args[0] in _INTEGRITY_ERRORS:
                raise IntegrityError(*exc.args) from exc
            raise

    def _run_free(
        self, connection: VirtualConnection, kind: StatementKind, query: Any, args: Any
    ) -> Any:
        """Run a statement in autocommit on a leased session. A read may be repeated once."""
        pool = connection.pool
        session = pool.lease() if kind is not _AFFINE else traces.lease(connection, query)
        session.last_user = connection
        connection.last_session = session
        retry_until = 0.0 if kind else time.monotonic() + RETRY_WITHIN
        while True:
            try:
                statement = session.bind(query, args)
            except BaseException:
                pool.release(session)
                raise
            schema = connection.schema
            is_current = session.schema == schema or (kind is _AFFINE and traces.is_show(query))
            # Unknown until everything has succeeded, also after an exception that another
            # thread raises in this one.
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
        if session.more_results() or not session.autocommits() or self._result is not None:
            self._register_pending(connection, session)
        else:
            pool.release(session)
        return self.rowcount

    def _run_held(
        self, connection: VirtualConnection, kind: StatementKind, query: Any, args: Any
    ) -> Any:
        """Run a statement on the session that the connection holds, or holds from now on."""
        mode = connection.mode
        pin_reason = ""
        if mode >= _LOST:
            if kind is _CHECKS_ON and connection.checks_off and not connection.transaction.is_open:
                # The session without checks is gone, and checks are on in any other.
                connection.record_checks(off=False)
                return self._empty_result(query)
            connection.begin_statement()  # raises
        if kind is _IMPLICIT or kind is _STATE:
            connection.announce_implicit_commit()
        if mode is not _PINNED:
            if kind >= _SAVEPOINT:
                if kind <= _RELEASE:
                    if mode is _TRANSACTION and connection.transaction.defer(kind, str(query)):
                        return self._empty_result(query)
                elif kind is _STATE or (
                    kind is _CHECKS_ON and not connection.checks_off and connection.pool.sets_checks
                ):
                    pin_reason = reason(query)
                    connection.pin(pin_reason)
                elif kind is _CHECKS_OFF and mode is _FREE:
                    connection.mode = SessionMode.HELD
            elif kind is _AFFINE and connection.session is None and traces.is_show(query):
                # No session is held yet: the last one has the state that the statement reads.
                session = connection.session = traces.lease(connection, query)
                session.last_user = connection
        prefix: list[bytes] = []
        sent = False
        try:
            session, prefix = connection.begin_statement(plain=kind is not _IMPLICIT)
            if kind is _AFFINE and traces.is_show(query):
                # Any statement before it would empty the list that it shows.
                prefix = []
            elif kind is _AFFINE and traces.must_forget(connection, session, query):
                prefix = [FORGET_INSERT_ID, *prefix]
            statement = session.bind(query, args)
            if session.busy:
                raise ProgrammingError(
                    _OUT_OF_SYNC, "Commands out of sync: a cursor has results left to read"
                )
            sent = True
            if prefix:
                session.send(prefix, statement)
            else:
                session.stored = False
                session.query(statement)
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
        if session.more_results() or self._result is not None:
            self._session = session
            session.busy = True
        return self.rowcount

    def _fetch_result(self, session: NodeSession) -> None:
        """Fetch the result of a statement that was sent on ``session``."""
        self._session = session
        try:
            self._do_get_result(session.raw)
            session.stored = self.stores
            self._post_get_result()
        finally:
            self._session = None

    def _empty_result(self, query: Any) -> int:
        """Return the result of a statement that need not be sent now."""
        self.description = None
        self._rows = ()
        self.rownumber = 0
        self.rowcount = 0
        self.lastrowid = 0
        self._executed = query.encode() if isinstance(query, str) else query
        return 0

    # --- pending results ------------------------------------------------------------------

    def _register_pending(self, connection: VirtualConnection, session: NodeSession) -> None:
        self._session = session
        self._registration = weakref.ref(self)
        connection.open_cursors.append(self._registration)

    def _return_session(self, session: NodeSession, *, broken: bool = False) -> None:
        """Results need the session no longer; the connection may still hold it."""
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
        """Give up results that were not read, and close their session."""
        if self._session is not None:
            self._return_session(self._session, broken=True)

    def _discard(self) -> None:
        self.description = None
        self._rows = None
        self.rownumber = None
        result, self._result = self._result, None
        session = self._session
        if session is None:
            return
        try:
            if result is not None:
                result.discard()
            session.drain()
        except BaseException:
            self.abandon()
            raise
        self._return_session(session)

    def close(self) -> None:
        """Close the cursor; unread results are dropped."""
        if self.connection is None:
            return
        try:
            if self._session is not None or self._rows is not None:
                self._discard()
        finally:
            self.connection = None
            self._result = None

    def nextset(self) -> int | None:
        """Go to the next result; return None if there is none."""
        if self._executed:
            self.fetchall()
        session = self._session
        if session is None:
            return None
        if session.next_result() == -1:
            # The session is free, and the cursor keeps the rows of the last result.
            self._return_session(session)
            return None
        try:
            self._fetch_result(session)
        finally:
            self._session = session
        return 1

    def __del__(self) -> None:
        # Nobody reads the results of a cursor that was dropped.
        if self._registration is not None:
            self.abandon()
        elif self._session is not None:
            # The connection goes on using this session, so it has to be read empty.
            with contextlib.suppress(MySQLError):
                self._discard()

    # --- several statements -----------------------------------------------------------------

    def executemany(self, query: Any, args: Any) -> Any:
        """As the driver's: inserts in batches, other statements one by one; on one session."""
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
        """Call a procedure, on a pinned session: it may leave any state there."""
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
            if exc.args and exc.args[0] in _INTEGRITY_ERRORS:
                raise IntegrityError(*exc.args) from exc
            raise

    def _query(self, statement: bytes) -> Any:
        # Only callproc() comes here.
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
        """The statement as it would be sent."""
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


class LeasedCursor(LeaseMixin, Cursor):
    """The default cursor: rows are tuples, and execute() fetches all of them."""

    def _fetch_result(self, session: NodeSession) -> None:
        result = session.store_result()
        session.stored = True
        try:
            if result is None:
                self.description = self.description_flags = None
                self._rows = ()
            else:
                self.description = result.describe()
                self.description_flags = result.field_flags()
                self._rows = result.fetch_row(0, 0)
            self.rowcount = session.affected_rows()
            self.lastrowid = session.insert_id()
            self.warning_count = session.warning_count()
            self.rownumber = 0
        finally:
            # Freeing a result locks its session (mysqlclient 2.3). So it must not outlive the
            # lease, not even in a traceback: another thread would find its session in use.
            result = None

    description_flags: Any = None


@cache
def leased(cursorclass: type) -> Callable[[VirtualConnection], LeasedCursor]:
    """Return the leasing subclass of a cursor class of the driver."""
    if cursorclass is Cursor:
        return LeasedCursor
    if issubclass(cursorclass, LeaseMixin):
        return cursorclass
    stores = issubclass(cursorclass, CursorStoreResultMixIn)
    return type(f"Leased{cursorclass.__name__}", (LeaseMixin, cursorclass), {"stores": stores})
