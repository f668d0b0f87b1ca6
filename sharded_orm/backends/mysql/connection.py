"""The virtual connection of a Django alias: it leases a physical session of its node while there is
work.

In autocommit, the virtual connection holds a session for one statement, or until a cursor has read
all results. In a transaction, it holds a session from the first statement to the end of the
transaction.

A transaction starts with ``BEGIN``, which is cheaper than the two ``SET autocommit`` of Django's
own backend. But an implicit commit or an error such as a deadlock may end that transaction inside
an atomic block. Later statements of the block would then commit one by one. So the session is put
into ``autocommit=0`` before a statement that commits implicitly, and after any error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from MySQLdb import InterfaceError, MySQLError, OperationalError

from sharded_orm.backends.mysql.commit_packet import CommitPacket
from sharded_orm.backends.mysql.driver import DriverFace
from sharded_orm.backends.mysql.identity import session_id
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession, is_lost
from sharded_orm.backends.mysql.transaction import COMMIT, ServerTransaction
from sharded_orm.backends.mysql.two_phase import BranchLease
from sharded_orm.backends.session_hold import SessionHold
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.session_id import SessionID

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool

logger = logging.getLogger("sharded_orm.backends")

_LOST = 2006
CursorFactory = Callable[[type], Callable[["VirtualConnection"], Any]]


class OpenCursor(Protocol):
    """A cursor with results that the program has not read yet."""

    def abandon(self) -> None:
        """Give up the unread results, by closing the cursor's session. Called when the alias's
        connection is closed.
        """


class VirtualConnection(BranchLease, CommitPacket, DriverFace, SessionHold[NodeSession]):
    """The object that Django gets in place of the driver's connection: one alias's connection to
    one schema.

    It holds no server connection of its own. It leases physical sessions from the node's pool,
    which all aliases of the node share. Not thread-safe, like Django's connections.

    :param schema: name of the schema. If None, the connection uses no schema and no shared session:
        it opens one session and keeps it from the start.
    :param alias: the Django alias, for logs.
    :param cursor_factory: maps a cursor class of the driver to a function that makes cursors of
        this package.
    """

    __slots__ = (
        "announcements", "before_commit", "checks_off", "collects", "cursor_factory", "default_cursor",
        "insert_session", "last_session", "limit", "open_cursors", "schema", "transaction", "use", "waiting",
    )  # fmt: skip

    pool: NodePool

    def __init__(
        self, pool: NodePool, schema: str | None, alias: str, cursor_factory: CursorFactory
    ) -> None:
        super().__init__(pool, alias)
        self.cursor_factory = cursor_factory
        #: Function that makes a cursor of the default class, for statements of Django.
        self.default_cursor = cursor_factory(pool.cursorclass)
        self.schema = schema
        self.use = b"" if schema is None else b"USE `%s`" % schema.replace("`", "``").encode()
        #: The session that ran the last statement of this connection; None before the first.
        self.last_session: NodeSession | None = None
        #: The session on which this connection last inserted a row with an AUTO_INCREMENT id; None
        #: before the first such row.
        self.insert_session: NodeSession | None = None
        #: Whether this connection has switched foreign key checks off in the session that it holds.
        self.checks_off = False
        #: The number of calls of announce_implicit_commit(): how many times this connection has run
        #: something that may have committed implicitly.
        self.announcements = 0
        #: Called before a statement that may commit the transaction implicitly, such as ``CREATE
        #: TABLE``. None: nothing is called.
        self.before_commit: weakref.WeakMethod[Callable[[], None]] | None = None
        self.transaction = ServerTransaction()
        #: The start of each write, which limits its time (``SET STATEMENT … FOR``); empty for no
        #: limit.
        self.limit = b""
        self.collects = False
        self.waiting = []
        #: Weak references to cursors that still have results to read in autocommit. Each such
        #: cursor holds a session of its own.
        self.open_cursors: list[weakref.ref[OpenCursor]] = []
        if schema is None:
            self.session = pool.lease_new()
            self.mode = SessionMode.PINNED

    def __repr__(self) -> str:
        return f"<VirtualConnection {self.alias!r} schema={self.schema!r} {self.mode.name}>"

    # --- Methods that DatabaseWrapper calls -------------------------------------------

    def cursor(self, cursorclass: type | None = None) -> Any:
        make = self.cursor_factory(cursorclass) if cursorclass else self.default_cursor
        return make(self)

    def get_autocommit(self) -> bool:
        if self.mode is SessionMode.PINNED:
            return bool(self._require_session().autocommits())
        return self.autocommitted

    def autocommit(self, on: bool) -> None:
        """Switch autocommit on or off. As in the driver, switching it on commits an open
        transaction.

        An open transaction of a two-phase commit is not committed: its session is closed instead.
        """
        on = bool(on)
        mode = self.mode
        if mode is SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.autocommit(on)
            self.autocommitted = on
            self.transaction.is_undone = False
            return
        if mode is SessionMode.CLOSED or (mode is SessionMode.LOST and on):
            raise self._lost_error()
        if on == self.autocommitted:
            return
        if on and (self.transaction.is_open or self.waiting):
            if self.transaction.plain_only:
                # The transaction is a part of a two-phase commit (plain_only), whose block was
                # interrupted. Do not commit it here: only the coordinator may decide that, for all
                # shards.
                self.leave_branch()
            else:
                self._end(COMMIT)
        self.autocommitted = on
        self.settle()

    def commit(self) -> None:
        if self.mode >= SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.commit()
            self.transaction.is_undone = False
        else:
            self._end(COMMIT)

    def rollback(self) -> None:
        """Roll back the transaction. If its session was lost, send nothing, because the transaction
        ends with the session.
        """
        self.waiting.clear()
        if self.mode is SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.rollback()
            self.transaction.is_undone = False
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
        """Close this connection. Its session goes back to the pool, or is closed if it has state,
        such as an open transaction or a changed setting.

        Further calls do nothing.
        """
        for reference in self.open_cursors[:]:
            if (cursor := reference()) is not None:
                cursor.abandon()
        session, self.session = self.session, None
        self.waiting.clear()
        is_clean = self.mode <= SessionMode.HELD and not self.has_state
        self.in_batch = self.is_held = False
        self.transaction.forget()
        self.mode = SessionMode.CLOSED
        if session is not None:
            if is_clean:
                self.pool.release(session)
            else:
                self.pool.discard(session)

    def check(self) -> None:
        """Raise an error if the connection is unusable: if the held session is dead, or if no
        session is held and the pool cannot lease one.

        To save a round trip for each alias, the server is not pinged: the pool only polls the
        socket of a session when it leases the session. With ``CONN_HEALTH_CHECKS``, the pool pings
        a session that has been idle since an earlier request.

        :raises MySQLdb.Error: the session is dead, or no session can be leased.
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
        """Whether no session is leased, no cursor has unread results, and no transaction has begun."""
        is_resting = self.mode in (SessionMode.FREE, SessionMode.CLOSED)
        return self.session is None and not self.open_cursors and is_resting

    # --- Methods that LeasedCursor calls for a statement ------------------------------

    def announce_implicit_commit(self) -> None:
        """Call ``before_commit``, the function that announces the writes of the transaction (to the
        cache, for example) before they are committed.

        Cursors call this method before a statement that may commit implicitly. It is also called
        when the program uses the driver's connection directly, because that may commit, too.
        """
        self.announcements += 1
        announce = self.before_commit() if self.before_commit is not None else None
        if announce is not None:
            announce()

    def begin_statement(self, *, plain: bool = True) -> tuple[NodeSession, list[bytes]]:
        """Return the session for the next statement, and its prefix: a list of statements to send
        first, such as ``USE``, ``BEGIN`` and ``SAVEPOINT``.

        If the connection holds no session, this method leases one.

        :param plain: False if the next statement commits implicitly or leaves state in the session.
            In a transaction, the prefix then sets ``autocommit=0``.
        """
        if self.waiting:
            self.send_waiting()
        mode = self.mode
        if mode >= SessionMode.PINNED:
            session = self._require_session()
            # The next statement may be USE, because a pinned session may run any statement. So
            # forget which schema is the session's current one.
            session.schema = None
            return session, []
        session = self.session or self.lease_session()
        prefix = [] if session.schema == self.schema else [self.use]
        if mode is SessionMode.TRANSACTION:
            prefix += self.transaction.prefix(plain=plain)
        session.schema = None
        return session, prefix

    def record_prefix(self, prefix: list[bytes], done: int) -> None:
        """Record what the first statements of ``prefix``, such as ``BEGIN``, have done to the
        transaction.

        :param prefix: the statements that :meth:`begin_statement` returned.
        :param done: how many of them the server has executed.
        """
        if done:
            others = (self.use, FORGET_INSERT_ID)
            self.transaction.record([part for part in prefix[:done] if part not in others])

    def record_error(self, exc: BaseException, prefix: list[bytes], sent: bool) -> None:
        """Record that a statement on the held session failed. If the session cannot be used any
        more, close it.

        :param prefix: the statements that were sent before the failed statement.
        :param sent: whether the failed statement itself was sent.
        """
        session, transaction = self.session, self.transaction
        if not sent or session is None:
            self.settle()
            return
        self.record_prefix(prefix, getattr(exc, "prefix_done", len(prefix)))
        transaction.record_error(exc, () if self.autocommitted else self.pool.undoing)
        # If a BEGIN was sent but not confirmed, the session may have an open transaction. So it is
        # closed below.
        unclear = not transaction.is_open and transaction.begins_in(prefix)
        if session.is_in_order(exc) and not unclear:
            self.settle()
        else:
            self._lose(exc)

    def record_checks(self, off: bool) -> None:
        """Record that a statement has switched foreign key checks off or on in the held session.

        :param off: whether the checks are off now.
        """
        self.checks_off = off
        if self.mode is SessionMode.LOST:
            self.mode = SessionMode.HELD
        self.settle()

    # --- How long the connection keeps a session ------------------------------------------

    def pin(self, reason: str) -> NodeSession:
        """Keep one session until close(), as Django's own backend does. Return the session.

        :param reason: the operation that leaves state in the session. It is only logged.
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
        self.record_pin(reason)
        return session

    def unpin(self, reason: str) -> None:
        """Undo :meth:`pin`: let the connection return its session to the pool again.

        Called if the statement that was to leave state in the session has failed, and so has left
        none.

        :param reason: the reason that was passed to :meth:`pin`.
        """
        if self.mode is SessionMode.PINNED:
            stats = self.pool.stats
            stats.pins -= 1
            stats.pin_reasons[reason] -= 1
            self.mode = SessionMode.HELD
            self.settle()

    def limit_writes(self, seconds: float | None) -> None:
        # Use SET STATEMENT, because it applies to a single statement and leaves no state in the
        # session. If the session already has a shorter limit, keep that one (0 means no limit).
        self.limit = (
            b""
            if seconds is None
            else b"SET STATEMENT max_statement_time=IF(@@max_statement_time BETWEEN 0.000001 AND %.3f,"
            b" @@max_statement_time, %.3f) FOR " % ((max(0.001, seconds),) * 2)
        )

    @contextmanager
    def any_session(self) -> Iterator[NodeSession]:
        """Context manager that yields any session of the node, for work that does not depend on the
        session.

        If the connection holds a session, it yields that one. Otherwise it leases one for the
        block. The block must not change the state of the session.
        """
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
        """Return the identity of the session that this connection holds: its server, its account
        and its id. If the connection holds no session, return an empty identity.
        """
        session = self.session
        if session is None:
            return SessionID()
        if session.identity is not None and self.mode < SessionMode.LOST:
            return session.identity
        with self._watched_session() as session:
            return session_id(session, self.pool)

    def settle(self) -> None:
        if self.mode > SessionMode.HELD:
            return
        if not self.autocommitted:
            self.mode = SessionMode.TRANSACTION
        elif self.checks_off or self.in_batch or self.is_held:
            self.mode = SessionMode.HELD
        else:
            self.mode = SessionMode.FREE
        if self.has_state or self.in_batch or self.held_after_commit:
            return
        session, self.session = self.session, None
        if session is not None:
            self.return_session(session)

    def return_session(self, session: NodeSession) -> None:
        """Return ``session`` to the pool. If the session has an open transaction or unread results,
        close it instead, so that the next user does not get them.
        """
        give_back = self.pool.discard
        try:
            if session.autocommits() and not session.more_results():
                give_back = self.pool.release
        except MySQLError as exc:
            # Log the error rather than raise it: the caller's statement or commit has already
            # succeeded.
            logger.info("A session of node %r is closed: %s", self.pool.name, exc)
        finally:
            give_back(session)

    # --- Internal helpers -------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return self.transaction.is_open or self.checks_off or self.is_held or bool(self.waiting)

    def lease_session(self) -> NodeSession:
        session = self.session = self.last_session = self.pool.lease()
        session.last_user = self
        return session

    def _require_session(self) -> NodeSession:
        if self.session is None or self.mode >= SessionMode.LOST:
            raise self._lost_error()
        return self.session

    @contextmanager
    def _watched_session(self) -> Iterator[NodeSession]:
        """Context manager that yields the held session. If the block raises an error because the
        session was lost, it records the loss and closes the session.
        """
        session = self._require_session()
        try:
            yield session
        except MySQLError as exc:
            if is_lost(exc):
                self._lose(exc)
            raise

    def _end(self, how: bytes) -> None:
        """End the transaction. If it has begun on the server, send ``how``: COMMIT or ROLLBACK."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.waiting and how == COMMIT:
            self.commit_waiting()
            return
        session = self.session
        if session is not None and self.transaction.is_open:
            schema, session.schema = session.schema, None
            try:
                self.transaction.end(session.run, how)
            except BaseException as exc:
                # If the connection to the server broke, or ROLLBACK failed, the state of the
                # session is unknown, so give it up. If the server has only refused COMMIT, keep the
                # session: the transaction is still open, and Django rolls it back.
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
        had_state = self.has_state or is_pinned
        if self.is_held or is_pinned:
            # A new session would lack the state that the program left in the lost one (settings,
            # for example). A rollback cannot restore it. So rollback() must raise an error from now
            # on: the mode stays LOST until close().
            self.transaction.is_open = self.checks_off = False
        if had_state:
            self.record_loss(exc)
        return exc

    def _lost_error(self) -> MySQLError:
        if self.mode is SessionMode.CLOSED:
            return InterfaceError(0, f"the connection of alias {self.alias!r} is closed")
        return OperationalError(
            _LOST,
            f"the connection that alias {self.alias!r} held was lost with its transaction or"
            " session state; roll back or close it",
        )
