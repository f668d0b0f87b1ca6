"""Cursors of a node, which read many shards of the node at once.

Their statements name the schema of each table, because the cursors belong to no shard.
"""

from __future__ import annotations

import time
from typing import Any

from MySQLdb import MySQLError, ProgrammingError
from MySQLdb.cursors import BaseCursor, Cursor, SSCursor

from sharded_orm.backends.mysql.cursor import RETRY_WITHIN
from sharded_orm.backends.mysql.node import NodePool
from sharded_orm.backends.mysql.session import NodeSession, is_lost
from sharded_orm.backends.mysql.statement_kind import StatementKind, classify


class _NodeCursorMixin(BaseCursor):
    """Base class of a node's cursors: keeps one leased session of the node until the cursor is closed.

    The cursor's statements must name the schema of each table. If the session turns out to be dead, a
    read is repeated once on another session.

    :param node: name of the node in the topology; None if ``DATABASES`` names the server.
    """

    def __init__(self, pool: NodePool, node: str | None) -> None:
        self.node = node
        self._pool = pool
        self._session: NodeSession | None = pool.lease()
        super().__init__(self._session.raw)

    def execute(self, query: Any, args: Any = None) -> Any:
        kind = classify(query)
        if kind > StatementKind.WRITE:
            raise ProgrammingError(f"a node's cursor takes plain statements only, not {query!r}")
        started = time.monotonic()
        try:
            return self._try(query, args)
        except MySQLError as exc:
            if not is_lost(exc) or kind or time.monotonic() - started > RETRY_WITHIN:
                raise
            self._pool.stats.retries += 1
            self._session = self._pool.lease()
            self.connection = self._session.raw
            return self._try(query, args)

    def _try(self, query: Any, args: Any) -> Any:
        session = self._session
        if session is None:
            raise ProgrammingError("cursor closed")
        session.last_user = None
        try:
            rows = super().execute(query, args)
            if self.lastrowid:
                session.inserter = None
            return rows
        except BaseException as exc:
            if is_lost(exc):
                self.connection = None
                self._session = None
                self._pool.discard(session)
            else:
                session.schema = None
            raise

    def close(self) -> None:
        session, self._session = self._session, None
        # Do not call Cursor.close(), which would read all remaining results.
        self.connection = None
        if session is None:
            return
        if self._has_unread_rows() or session.more_results() or not session.autocommits():
            self._pool.discard(session)
        else:
            self._pool.release(session)

    def _has_unread_rows(self) -> bool:
        return False


class NodeCursor(_NodeCursorMixin, Cursor):
    """A node's cursor whose ``execute`` fetches all rows."""


class NodeStream(_NodeCursorMixin, SSCursor):
    """A node's cursor that leaves rows on the server until ``fetchmany`` fetches them.

    If unread rows are left, ``close`` also closes the session.
    """

    _unread = False

    def execute(self, query: Any, args: Any = None) -> Any:
        rows = super().execute(query, args)
        self._unread = True
        return rows

    def fetchmany(self, size: int | None = None) -> Any:
        size = self.arraysize if size is None else size
        rows = super().fetchmany(size)
        if len(rows) < size:
            self._unread = False
        return rows

    def _has_unread_rows(self) -> bool:
        return self._unread
