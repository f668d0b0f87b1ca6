"""The connection of one alias: leases a session of its node while there is work.

A session is held for one statement in autocommit, from the first statement of a transaction to
its end, and while a cursor has results to read.

A transaction starts with ``BEGIN``, which is cheaper than the pair of ``SET autocommit`` of
Django's own backend. Where the difference could be seen, the session is put into
``autocommit=0`` first: before statements that commit implicitly, and after any error (such as a
deadlock), because the rest of the block must still run in a transaction.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from MySQLdb import InterfaceError, MySQLError, OperationalError

from sharded_orm.backends.mysql.driver import DriverFace
from sharded_orm.backends.mysql.identity import session_id
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession, is_lost
from sharded_orm.backends.mysql.transaction import AUTOCOMMIT_OFF, BEGIN, ServerTransaction
from sharded_orm.backends.write_hooks.session_id import SessionID

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool

logger = logging.getLogger("sharded_orm.backends")

_LOST = 2006


class SessionMode(IntEnum):
    """How long a virtual connection keeps the session that it leases."""

    FREE = 0
    """Autocommit: for one statement."""
    TRANSACTION = 1
    """Autocommit is off: from the first statement to the end of the transaction."""
    HELD = 2
    """Autocommit, over several statements: foreign key checks are off, or executemany runs."""
    PINNED = 3
    """Until close(): a statement left session state."""
    LOST = 4
    """The session that was held is gone, with the transaction or state that it had."""
    CLOSED = 5


CursorFactory = Callable[[type], Callable[["VirtualConnection"], Any]]


class OpenCursor(Protocol):
    """A cursor with results to read."""

    def abandon(self) -> None:
        """Give up the results: the connection is about to be closed."""


class VirtualConnection(DriverFace):
    """Stands for a connection to one schema of a node. Not thread-safe, as Django's.

    :param schema: None for no schema at all; then the session is never shared.
    :param alias: for logs.
    :param cursor_factory: maps a cursor class of the driver to a factory of our cursors.
    """

    __slots__ = (
        "alias", "autocommitted", "before_commit", "checks_off", "cursor_factory", "default_cursor",
        "held_after_commit", "in_batch", "insert_session", "is_held", "last_session", "mode",
        "open_cursors", "pool", "schema", "session", "transaction", "use",
    )  # fmt: skip

    def __init__(
        self, pool: NodePool, schema: str | None, alias: str, cursor_factory: CursorFactory
    ) -> None:
        self.pool = pool
        self.cursor_factory = cursor_factory
        #: Makes the cursors on which Django's statements run.
        self.default_cursor = cursor_factory(pool.cursorclass)
        self.schema = schema
        self.alias = alias
        self.use = b"" if schema is None else b"USE `%s`" % schema.replace("`", "``").encode()
        #: The session that is leased now.
        self.session: NodeSession | None = None
        #: The session of the last statement.
        self.last_session: NodeSession | None = None
        #: The session of our last insert that had an id.
        self.insert_session: NodeSession | None = None
        self.mode = SessionMode.FREE
        #: Django has switched autocommit on.
        self.autocommitted = True
        #: Foreign key checks are off on the held session.
        self.checks_off = False
        #: Several statements are to run on one session.
        self.in_batch = False
        #: The session has state of a caller of hold().
        self.is_held = False
        #: The session is not shared when the transaction ends, see hold_after_commit().
        self.held_after_commit = False
        #: Called before a statement that may commit the transaction implicitly.
        self.before_commit: weakref.WeakMethod[Callable[[], None]] | None = None
        self.transaction = ServerTransaction()
        #: Cursors with results to read.
        self.open_cursors: list[weakref.ref[OpenCursor]] = []
        if schema is None:
            self.session = pool.lease_new()
            self.mode = SessionMode.PINNED

    def __repr__(self) -> str:
        return f"<VirtualConnection {self.alias!r} schema={self.schema!r} {self.mode.name}>"

    def __del__(self) -> None:
        # Dropped without close(), as when a thread ends: its session must not stay leased.
        session = getattr(self, "session", None)
        if session is not None:
            self.pool.discard(session)

    # --- What DatabaseWrapper asks of a connection ------------------------------------

    def cursor(self, cursorclass: type | None = None) -> Any:
        make = self.cursor_factory(cursorclass) if cursorclass else self.default_cursor
        return make(self)

    def get_autocommit(self) -> bool:
        if self.mode is SessionMode.PINNED:
            return bool(self._require_session().autocommits())
        return self.autocommitted

    def autocommit(self, on: bool) -> None:
        """Switch autocommit; switching it on commits an open transaction, as on the server."""
        on = bool(on)
        mode = self.mode
        if mode is SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.autocommit(on)
            self.autocommitted = on
            return
        if mode is SessionMode.CLOSED or (mode is SessionMode.LOST and on):
            raise self._lost_error()
        if on == self.autocommitted:
            return
        if on and self.transaction.is_open:
            self._end(b"COMMIT")
        self.autocommitted = on
        self.settle()

    def commit(self) -> None:
        if self.mode >= SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.commit()
        else:
            self._end(b"COMMIT")

    def rollback(self) -> None:
        """Roll back. If the session was lost, the server has already done so."""
        if self.mode is SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.rollback()
        elif self.mode is SessionMode.LOST and self.transaction.is_open:
            self.transaction.forget()
            self.checks_off = False
            self.mode = SessionMode.TRANSACTION
            self.settle()
        elif self.mode >= SessionMode.LOST:
            raise self._lost_error()
        else:
            self._end(b"ROLLBACK")

    def close(self) -> None:
        """Return the session to the pool if it is clean, else close it. Repeatable."""
        for reference in self.open_cursors[:]:
            if (cursor := reference()) is not None:
                cursor.abandon()
        session, self.session = self.session, None
        is_clean = self.mode <= SessionMode.HELD and not self._has_state
        self.in_batch = self.is_held = False
        self.transaction.forget()
        self.mode = SessionMode.CLOSED
        if session is not None:
            if is_clean:
                self.pool.release(session)
            else:
                self.pool.discard(session)

    def check(self) -> None:
        """Check that the held session is alive or, if none is held, that one can be leased.

        :raises MySQLdb.Error: otherwise.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.session is None:
            self.pool.release(self.pool.lease())
        elif self.session.poll(0):
            raise self._lose(OperationalError(_LOST, "Server has gone away"))
        else:
            with self._watched_session() as session:
                session.raw.ping()

    @property
    def is_idle(self) -> bool:
        """No session is leased, no cursor has results to read, and no transaction has begun."""
        return self.session is None and not self.open_cursors and self.mode in _RESTING

    @property
    def closed(self) -> bool:
        return self.mode is SessionMode.CLOSED

    # --- What LeasedCursor needs for a statement --------------------------------------

    def announce_implicit_commit(self) -> None:
        """The next statement may commit (``ALTER TABLE``, ``LOCK TABLES``, ``COMMIT``, ``CALL``)."""
        announce = self.before_commit() if self.before_commit is not None else None
        if announce is not None:
            announce()

    def begin_statement(self, *, plain: bool = True) -> tuple[NodeSession, list[bytes]]:
        """The held session, and the statements that must go before the next one on it.

        :param plain: the next one neither commits implicitly nor leaves session state.
        """
        mode = self.mode
        if mode >= SessionMode.PINNED:
            session = self._require_session()
            session.schema = None  # The statement may be USE.
            return session, []
        session = self.session or self._lease_session()
        prefix = [] if session.schema == self.schema else [self.use]
        if mode is SessionMode.TRANSACTION:
            prefix += self.transaction.prefix(plain=plain)
        session.schema = None
        return session, prefix

    def record_prefix(self, prefix: list[bytes], done: int) -> None:
        """The first ``done`` statements of the prefix of :meth:`begin_statement` were executed."""
        if done:
            others = (self.use, FORGET_INSERT_ID)
            self.transaction.record([part for part in prefix[:done] if part not in others])

    def record_error(self, exc: BaseException, prefix: list[bytes], sent: bool) -> None:
        """A statement on the held session failed."""
        session, transaction = self.session, self.transaction
        if not sent or session is None:
            self.settle()
            return
        self.record_prefix(prefix, getattr(exc, "prefix_done", len(prefix)))
        transaction.unsure = True
        # The transaction may have begun or not: do not go on with such a session.
        unclear = not transaction.is_open and (BEGIN in prefix or AUTOCOMMIT_OFF in prefix)
        if session.is_in_order(exc) and not unclear:
            self.settle()
        else:
            self._lose(exc)

    def record_checks(self, off: bool) -> None:
        """Foreign key checks were switched on the held session."""
        self.checks_off = off
        if self.mode is SessionMode.LOST:
            self.mode = SessionMode.HELD
        self.settle()

    # --- How long a session is kept ---------------------------------------------------

    def pin(self, reason: str) -> NodeSession:
        """Keep a session until close(); the connection then behaves as one of Django's backend.

        :param reason: what leaves state in the session, for logs.
        """
        if self.mode >= SessionMode.PINNED:
            return self._require_session()
        session, prefix = self.begin_statement(plain=False)
        try:
            if prefix:
                session.run(*prefix)
        except BaseException as exc:
            self.record_error(exc, [], sent=True)
            raise
        self.record_prefix(prefix, len(prefix))
        session.last_user = None
        self.mode = SessionMode.PINNED
        stats = self.pool.stats
        stats.pins += 1
        stats.pin_reasons[reason] = stats.pin_reasons.get(reason, 0) + 1
        logger.info(
            "Alias %r keeps a connection of node %r for itself until it is closed: %s"
            " leaves state in the session.", self.alias, self.pool.name, reason,
        )  # fmt: skip
        return session

    def unpin(self, reason: str) -> None:
        """The statement that :meth:`pin` was for had no effect: share the session again."""
        if self.mode is SessionMode.PINNED:
            stats = self.pool.stats
            stats.pins -= 1
            stats.pin_reasons[reason] -= 1
            self.mode = SessionMode.HELD
            self.settle()

    @contextmanager
    def one_session(self) -> Iterator[None]:
        """Run the statements of the block on one session, in autocommit as well."""
        before = self.in_batch
        self._ensure_session()
        self.in_batch = True
        self.settle()
        try:
            yield
        finally:
            self.in_batch = before
            self.settle()

    def hold(self) -> None:
        """Keep the session, and state that the caller leaves on it, until release(). Repeatable.

        The state is lost with the session, and at close().
        """
        self._ensure_session()
        self.is_held = True
        self.settle()

    def release(self) -> None:
        """The caller of hold() has no state on the session any more: share it, unless pinned."""
        self.is_held = False
        self.settle()

    def hold_after_commit(self) -> None:
        """Do not share the session when its transaction ends, until release_after_commit()."""
        self.held_after_commit = self.session is not None

    def release_after_commit(self) -> None:
        """Share the session again, unless something else keeps it. Repeatable."""
        self.held_after_commit = False
        self.settle()

    def discard_after_commit(self) -> None:
        """Close the session of hold_after_commit(): the server must not know its id any more.

        A session with other state of this connection stays open, as that would be lost.
        """
        if self.held_after_commit and self.mode <= SessionMode.HELD and not self._has_state:
            session, self.session = self.session, None
            if session is not None:
                self.pool.discard(session)

    @contextmanager
    def any_session(self) -> Iterator[NodeSession]:
        """The held session, or one for the length of the block, which must not change its state."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.session is not None:
            with self._watched_session() as session:
                yield session
            return
        session = self.pool.lease()
        try:
            yield session
        except BaseException as exc:
            if isinstance(exc, MySQLError) and is_lost(exc):
                self.pool.discard(session)
            else:
                self.pool.release(session)
            raise
        self.pool.release(session)

    def session_id(self) -> SessionID:
        """The identity of the held session on its server; an empty one if none is held."""
        if self.session is None:
            return SessionID()
        with self._watched_session() as session:
            return session_id(session, self.pool)

    def settle(self) -> None:
        """Enter the mode that the attributes ask for; return a session that nothing needs."""
        if self.mode > SessionMode.HELD:
            return
        if not self.autocommitted:
            self.mode = SessionMode.TRANSACTION
        elif self.checks_off or self.in_batch or self.is_held:
            self.mode = SessionMode.HELD
        else:
            self.mode = SessionMode.FREE
        if self._has_state or self.in_batch or self.held_after_commit:
            return
        session, self.session = self.session, None
        if session is not None:
            self.return_session(session)

    def return_session(self, session: NodeSession) -> None:
        """Return a session to the pool; one with a transaction or results to read is closed."""
        if session.autocommits() and not session.more_results():
            self.pool.release(session)
        else:
            self.pool.discard(session)

    # --- Inside -----------------------------------------------------------------------

    @property
    def _has_state(self) -> bool:
        """Whether something would be lost with the session."""
        return self.transaction.is_open or self.checks_off or self.is_held

    def _ensure_session(self) -> None:
        if self.mode <= SessionMode.HELD and self.session is None:
            self._lease_session()

    def _lease_session(self) -> NodeSession:
        session = self.session = self.last_session = self.pool.lease()
        session.last_user = self
        return session

    def _require_session(self) -> NodeSession:
        if self.session is None or self.mode >= SessionMode.LOST:
            raise self._lost_error()
        return self.session

    @contextmanager
    def _watched_session(self) -> Iterator[NodeSession]:
        """The held session; if it breaks in the block, its state is recorded as lost."""
        session = self._require_session()
        try:
            yield session
        except MySQLError as exc:
            if is_lost(exc):
                self._lose(exc)
            raise

    def _end(self, how: bytes) -> None:
        """Run COMMIT or ROLLBACK on the server if it has begun the transaction."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        session = self.session
        if session is not None and self.transaction.is_open:
            schema, session.schema = session.schema, None
            try:
                session.run(*self.transaction.ending(how))
            except BaseException as exc:
                # After an error of the server, COMMIT leaves the transaction to a rollback. Any other
                # error makes the session unusable.
                if is_lost(exc) or how == b"ROLLBACK":
                    self._lose(exc)
                raise
            session.schema = schema
        self.transaction.forget()
        self.settle()

    def _lose(self, exc: BaseException) -> BaseException:
        session, self.session = self.session, None
        if session is not None:
            self.pool.discard(session)
        is_pinned = self.mode is SessionMode.PINNED
        had_state = self._has_state or is_pinned
        if self.is_held or is_pinned:
            # A rollback does not restore this state: it is gone until close().
            self.transaction.is_open = self.checks_off = False
        if had_state:
            self.mode = SessionMode.LOST
            logger.warning(
                "Alias %r lost its connection to node %r, and what it held with it: %s",
                self.alias, self.pool.name, exc,
            )  # fmt: skip
        return exc

    def _lost_error(self) -> MySQLError:
        if self.mode is SessionMode.CLOSED:
            return InterfaceError(0, f"the connection of alias {self.alias!r} is closed")
        return OperationalError(
            _LOST,
            f"the connection that alias {self.alias!r} held was lost with its transaction or"
            " session state; roll back or close it",
        )


_RESTING = (SessionMode.FREE, SessionMode.CLOSED)
