"""Cursors of a node, with which one query reads many shards of the node at once.

The cursors belong to no shard, so their statements name the schema of each table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from MySQLdb import MySQLError, ProgrammingError
from MySQLdb.cursors import BaseCursor, Cursor, SSCursor

from sharded_orm.backends.mysql.cursor import RETRY_WITHIN
from sharded_orm.backends.mysql.errors import integrity_error
from sharded_orm.backends.mysql.node import NodePool
from sharded_orm.backends.mysql.session import NodeSession, is_lost
from sharded_orm.backends.mysql.statement_kind import (
    StatementKind,
    calls_stored_function,
    classify,
)
from sharded_orm.backends.server_connection import session_state_refusal


class _NodeCursorMixin(BaseCursor):
    """Base class of a node's cursors: leases a session of the node, and keeps it until the cursor
    is closed.

    The cursor's statements must name the schema of each table. If the session turns out to be dead,
    a read is repeated once on another session.

    :param node: name of the node in the topology, the map of shards to nodes. None if the server is
        named only in ``DATABASES``.
    """

    # Whether a statement was sent whose answer has not been received yet.
    _is_awaited = False
    # _statement is the last statement, as a pair (query, parameters). If its session is lost before
    # the moment _may_repeat_until of time.monotonic(), the statement is repeated. _may_repeat_until
    # is 0 for a statement that may change rows, so that it is never repeated.
    _statement: tuple[Any, Any]
    _text: Any
    _may_repeat_until: float

    def __init__(self, pool: NodePool, node: str | None) -> None:
        self.node = node
        self._pool = pool
        self._session: NodeSession | None = pool.lease()
        super().__init__(self._session.raw)

    def execute(self, query: Any, args: Any = None) -> Any:
        self._begin(query, args)
        return self._answered(self._run)

    def _begin(self, query: Any, args: Any, select: str | None = None) -> None:
        if self._is_awaited:
            # The answer to the earlier statement has not been read. If another statement were sent
            # now, the driver would return that answer for it.
            raise ProgrammingError("this cursor has sent a statement whose answer was not received")
        self._text = select or query
        kind = classify(self._text)
        if kind > StatementKind.WRITE:
            raise session_state_refusal(self._text)
        self._statement = query, args
        self._may_repeat_until = 0.0 if kind else time.monotonic() + RETRY_WITHIN

    def _answered(self, run: Callable[[], Any]) -> Any:
        try:
            return self._try(run)
        except MySQLError as exc:
            if (error := integrity_error(exc)) is not None:
                raise error from exc
            if (
                not is_lost(exc)
                or time.monotonic() > self._may_repeat_until
                # Do not repeat a query with a stored function, which may have written rows.
                or calls_stored_function(self._text)
            ):
                raise
            self._pool.stats.retries += 1
            self._session = self._pool.lease()
            self.connection = self._session.raw
            return self._try(self._run)

    def _leased(self) -> NodeSession:
        if self._session is None:
            raise ProgrammingError("cursor closed")
        return self._session

    def _run(self) -> Any:
        query, args = self._statement
        return super().execute(self._leased().bind(query, args))

    def _try(self, run: Callable[[], Any]) -> Any:
        session = self._leased()
        session.last_user = None
        try:
            rows = run()
            if self.lastrowid:
                session.inserter = None
            return rows
        except BaseException as exc:
            if self._is_awaited or is_lost(exc):
                self.connection = None
                self._session = None
                self._is_awaited = False
                self._pool.discard(session)
            else:
                session.schema = None
            raise

    def close(self) -> None:
        session, self._session = self._session, None
        # Do not call Cursor.close(): it would first read all remaining results.
        self.connection = None
        if session is None:
            return
        is_unread = self._is_awaited or self._has_unread_rows()
        if is_unread or session.more_results() or not session.autocommits():
            self._pool.discard(session)
        else:
            self._pool.release(session)

    def _has_unread_rows(self) -> bool:
        return False


class NodeCursor(_NodeCursorMixin, Cursor):
    """A node's cursor that fetches all rows at once, in ``execute`` or ``receive``."""

    # The error with which the driver has refused to send the last statement; None if it was sent.
    _not_sent: MySQLError | None = None

    @property
    def writes_digits(self) -> bool:
        """Whether the driver writes an ``int`` parameter into a statement simply as its digits. If
        so, callers may write the digits themselves, which is faster.
        """
        return self._leased().writes_digits

    def send(self, query: Any, args: Any = None, select: str | None = None) -> None:
        """Send a statement without waiting for its answer. Then call :meth:`receive` for the
        answer.

        With this, a process can send statements to several nodes, which work on them at the same
        time. If the statement cannot be sent, :meth:`receive` raises the error, or repeats a read
        on another session.

        :param select: if the statement is a UNION ALL of the same SELECT for several schemas, one
            such SELECT; otherwise None. It has the same kind as the long statement, and is
            classified in less time.
        """
        self._begin(query, args, select)
        session = self._leased()
        statement = session.bind(query, args)
        self._is_awaited, self._not_sent = True, None
        try:
            session.raw.send_query(statement)
        except MySQLError as exc:
            self._not_sent = exc

    def receive(self) -> Any:
        """Wait for the answer to the statement that :meth:`send` has sent. Return what
        :meth:`execute` would.

        Unlike ``execute()``, it does not set the ``description`` of the columns.
        """
        if not self._is_awaited:
            # The driver would wait for ever.
            raise ProgrammingError("this cursor has sent no statement, or has received its answer")
        return self._answered(self._receive)

    def _receive(self) -> Any:
        # Do the same as the driver's BaseCursor._query() after it has sent the statement. But leave
        # out the descriptions of the columns and the number of warnings, which no caller needs.
        if self._not_sent is not None:
            raise self._not_sent
        raw = self._leased().raw
        try:
            raw.read_query_result()
        except MySQLError as exc:
            self._is_awaited = is_lost(exc)
            raise
        self._is_awaited = False
        result = raw.store_result()
        self._rows = () if result is None else result.fetch_row(0, self._fetch_type)
        self.rownumber, self.description = 0, None
        self.rowcount, self.lastrowid = raw.affected_rows(), raw.insert_id()
        self._executed = self._statement[0]
        return self.rowcount


class NodeStream(_NodeCursorMixin, SSCursor):
    """A node's cursor that leaves the rows on the server until ``fetchmany`` fetches them, so that
    a large result needs little memory.

    If rows are still unread, ``close`` closes the session rather than read them.
    """

    _unread = False

    def execute(self, query: Any, args: Any = None) -> Any:
        rows = super().execute(query, args)
        self._unread = True
        return rows

    def fetchmany(self, size: int | None = None) -> Any:
        size = self.arraysize if size is None else size
        try:
            rows = super().fetchmany(size)
        except MySQLError as exc:
            if (error := integrity_error(exc)) is not None:
                raise error from exc
            raise
        if len(rows) < size:
            self._unread = False
        return rows

    def _has_unread_rows(self) -> bool:
        return self._unread
