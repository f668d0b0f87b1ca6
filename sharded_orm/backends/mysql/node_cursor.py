"""A cursor for statements that name their schemas themselves, as scattered reads do."""

from __future__ import annotations

import time
from typing import Any

from MySQLdb import MySQLError, ProgrammingError
from MySQLdb.cursors import Cursor

from sharded_orm.backends.mysql.classify import Kind, classify
from sharded_orm.backends.mysql.cursor import RETRY_WITHIN
from sharded_orm.backends.mysql.node import NodePool
from sharded_orm.backends.mysql.session import Session, is_lost


class NodeCursor(Cursor):  # type: ignore[misc]
    """A cursor of a node, on whatever schema: the statement names its schemas itself.

    Holds one session until it is closed. A read on a session that turns out to be dead is
    repeated once.
    """

    def __init__(self, pool: NodePool) -> None:
        self._pool = pool
        self._session: Session | None = pool.lease()
        super().__init__(self._session.raw)

    def execute(self, query: Any, args: Any = None) -> Any:
        kind = classify(query)
        if kind > Kind.WRITE:
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
        session.last = None
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
        # Not Cursor.close(): the session belongs to somebody else from here on.
        self.connection = None
        if session is None:
            return
        if session.more_results() or not session.autocommits():
            self._pool.discard(session)
        else:
            self._pool.release(session)
