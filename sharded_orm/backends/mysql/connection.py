"""The connection of one alias: leases a session of the node when there is work.

A session is held for one statement in autocommit, from the first statement of a
transaction to its end, and while results are pending.

A transaction is a ``BEGIN``, which is cheaper than the pair of ``SET autocommit`` of
Django's own backend. Where the difference could be seen, the session is put into
``autocommit=0`` first: before statements that commit implicitly, and after any error (a
deadlock, say), because what follows in the block must be in a transaction still.
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
from sharded_orm.backends.write_hooks.session_id import SessionID

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool

logger = logging.getLogger("sharded_orm.backends")

_BEGIN = b"BEGIN"
_STRICT = b"SET autocommit=0"
_END_STRICT = b"SET autocommit=1"
_LOST = 2006


class SessionMode(IntEnum):
    FREE = 0
    """Autocommit; nothing is held between statements."""
    TRANSACTION = 1
    """Autocommit is off; a session is held from the first statement on."""
    HELD = 2
    """Autocommit, on a session that is held: foreign key checks are off, or executemany."""
    PINNED = 3
    """A statement left session state: the session is this alias's own until close()."""
    LOST = 4
    """What the held session carried is gone with it."""
    CLOSED = 5


CursorFactory = Callable[[type], Callable[["VirtualConnection"], Any]]


class OpenCursor(Protocol):
    """A cursor with results that are still to be read."""

    def abandon(self) -> None:
        """Give up the results: the connection is about to be closed."""


class VirtualConnection(DriverFace):
    """Stands for a connection to one schema of a node. Not thread-safe, as Django's.

    :param schema: None for no schema at all; then the session is never shared.
    :param alias: for logs.
    :param cursor_factory: gives the class of our cursors for one of the driver's.
    """

    __slots__ = (
        "alias", "autocommitted", "before_commit", "checks_off", "cursor_factory", "default_cursor",
        "held_after_commit", "in_batch", "in_transaction", "insert_session", "is_held",
        "last_session", "mode", "open_cursors", "pending_savepoints", "pool",
        "savepoints_unsure", "schema", "session", "strict", "use",
    )  # fmt: skip

    def __init__(
        self, pool: NodePool, schema: str | None, alias: str, cursor_factory: CursorFactory
    ) -> None:
        self.pool = pool
        self.cursor_factory = cursor_factory
        #: Makes the cursor that statements of Django run on.
        self.default_cursor = cursor_factory(pool.cursorclass)
        self.schema = schema
        self.alias = alias
        self.use = b"" if schema is None else b"USE `%s`" % schema.replace("`", "``").encode()
        self.session: NodeSession | None = None
        self.last_session: NodeSession | None = None
        #: Where our last insert that had an id was.
        self.insert_session: NodeSession | None = None
        self.mode = SessionMode.FREE
        self.autocommitted = True
        self.checks_off = False
        #: Several statements are to run on one session.
        self.in_batch = False
        #: The session carries something that is lost with it, see hold().
        self.is_held = False
        #: Called before a statement that may commit the transaction by itself.
        self.before_commit: weakref.WeakMethod[Callable[[], None]] | None = None
        #: A transaction is under way on the held session.
        self.in_transaction = False
        #: The session stays ours after the transaction, see hold_after_commit().
        self.held_after_commit = False
        #: It stands in autocommit=0 on our behalf: there is always a transaction.
        self.strict = False
        #: Savepoint statements that wait for the next statement to take them along.
        self.pending_savepoints: list[bytes] = []
        #: Something in this transaction may have removed savepoints behind our back.
        self.savepoints_unsure = False
        #: Cursors with results that are still to be read.
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

    # --- what DatabaseWrapper asks of a connection -----------------------------------

    def cursor(self, cursorclass: type | None = None) -> Any:
        make = self.cursor_factory(cursorclass) if cursorclass else self.default_cursor
        return make(self)

    def get_autocommit(self) -> bool:
        if self.mode is SessionMode.PINNED:
            return bool(self._require_session().autocommits())
        return self.autocommitted

    def autocommit(self, on: bool) -> None:
        """Switch autocommit; switching it on commits what is open, as on the server."""
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
        if on and self.in_transaction:
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
        """Roll back. If the session was lost, the server has done so already."""
        if self.mode is SessionMode.PINNED:
            with self._watched_session() as session:
                session.raw.rollback()
        elif self.mode is SessionMode.LOST and self.in_transaction:
            self._forget_transaction()
            self.checks_off = False
            self.mode = SessionMode.TRANSACTION
            self.settle()
        elif self.mode >= SessionMode.LOST:
            raise self._lost_error()
        else:
            self._end(b"ROLLBACK")

    def close(self) -> None:
        """Give the session back if it is clean, else close it. Repeatable."""
        for reference in self.open_cursors[:]:
            if (cursor := reference()) is not None:
                cursor.abandon()
        session, self.session = self.session, None
        clean = self.mode <= SessionMode.HELD and not self._has_state
        self.in_batch = self.is_held = False
        self._forget_transaction()
        self.mode = SessionMode.CLOSED
        if session is not None:
            if clean:
                self.pool.release(session)
            else:
                self.pool.discard(session)

    def check(self) -> None:
        """Raise if the held session is gone or, with none held, if none can be had.

        :raises MySQLdb.Error: then.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.session is None:
            self.pool.release(self.pool.lease())
        elif self.session.poll(0):
            raise self._lose(_gone_away())
        else:
            with self._watched_session() as session:
                session.raw.ping()

    @property
    def is_idle(self) -> bool:
        """Nothing is leased, pinned or remembered for the server."""
        return self.session is None and not self.open_cursors and self.mode in _RESTING

    @property
    def closed(self) -> bool:
        return self.mode is SessionMode.CLOSED

    # --- what LeasedCursor asks for ---------------------------------------------------

    def announce_implicit_commit(self) -> None:
        """The next statement may commit (``ALTER TABLE``, ``LOCK TABLES``, ``COMMIT``, ``CALL``)."""
        tell = self.before_commit() if self.before_commit is not None else None
        if tell is not None:
            tell()

    def begin_statement(self, *, plain: bool = True) -> tuple[NodeSession, list[bytes]]:
        """The held session and what must go before the next statement on it.

        :param plain: the statement neither commits implicitly nor leaves session state.
        """
        mode = self.mode
        if mode >= SessionMode.PINNED:
            held = self._require_session()
            held.schema = None  # The statement may be USE.
            return held, []
        session = self.session
        if session is None:
            session = self.session = self.pool.lease()
            session.last_user = self
            self.last_session = session
        prefix = [] if session.schema == self.schema else [self.use]
        if mode is SessionMode.TRANSACTION:
            if not self.strict and (self.savepoints_unsure or not plain):
                prefix.append(_STRICT)
            elif not self.in_transaction:
                prefix.append(_BEGIN)
            prefix += self.pending_savepoints
        session.schema = None
        return session, prefix

    def record_prefix(self, prefix: list[bytes], done: int) -> None:
        """``done`` statements of the prefix that :meth:`begin_statement` gave were executed."""
        executed = prefix[:done]
        if not self.strict and _STRICT in executed:
            self.in_transaction = self.strict = True
        elif not self.in_transaction and _BEGIN in executed:
            self.in_transaction = True
        if self.pending_savepoints and self.in_transaction:
            del self.pending_savepoints[: sum(not self._is_ours(part) for part in executed)]

    def _is_ours(self, part: bytes) -> bool:
        return part is self.use or part in (_BEGIN, _STRICT, FORGET_INSERT_ID)

    def record_error(self, exc: BaseException, prefix: list[bytes], sent: bool) -> None:
        """A statement on the held session failed."""
        session = self.session
        if not sent or session is None:
            self.settle()
            return
        done = getattr(exc, "prefix_done", len(prefix))
        self.record_prefix(prefix, done)
        self.savepoints_unsure = True
        # A transaction that did not begin, as far as we know: better to be sure of it.
        unsure = not self.in_transaction and (_BEGIN in prefix or _STRICT in prefix)
        if session.is_in_order(exc) and not unsure:
            self.settle()
        else:
            self._lose(exc)

    def pin(self, reason: str) -> NodeSession:
        """Tie a session to this connection until close(); it then behaves as a stock one."""
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
        """The statement that :meth:`pin` was for did nothing: share the session again."""
        if self.mode is SessionMode.PINNED:
            stats = self.pool.stats
            stats.pins -= 1
            stats.pin_reasons[reason] -= 1
            self.mode = SessionMode.HELD
            self.settle()

    @contextmanager
    def one_session(self) -> Iterator[None]:
        """Run the block's statements on one session, in autocommit as well."""
        before = self.in_batch
        self._lease_session()
        self.in_batch = True
        self.settle()
        try:
            yield
        finally:
            self.in_batch = before
            self.settle()

    def hold(self) -> None:
        """Keep the session, and what the caller leaves on it, until release(). Repeatable.

        If the session is lost, or closed before release(), its state is lost too.
        """
        self._lease_session()
        self.is_held = True
        self.settle()

    def release(self) -> None:
        """Share the session again, unless a statement has pinned it; the caller's state is gone."""
        self.is_held = False
        self.settle()

    def _lease_session(self) -> None:
        if self.mode <= SessionMode.HELD and self.session is None:
            self.session = self.pool.lease()
            self.session.last_user = self
            self.last_session = self.session

    def record_checks(self, off: bool) -> None:
        """Foreign key checks were switched on the held session."""
        self.checks_off = off
        if self.mode is SessionMode.LOST:
            self.mode = SessionMode.HELD
        self.settle()

    # --- what the cache needs of a transaction -----------------------------------------

    def session_id(self) -> SessionID:
        """Who the held session is on its server; nobody if none is held."""
        if self.session is None:
            return SessionID()
        with self._watched_session() as session:
            return session_id(session, self.pool)

    def hold_after_commit(self) -> None:
        """Do not share the session of this transaction when that ends, until release_after_commit()."""
        self.held_after_commit = self.session is not None

    def release_after_commit(self) -> None:
        self.held_after_commit = False
        self.settle()

    def discard_after_commit(self) -> None:
        """Close the session that is kept: its id must not exist on the server any more.

        One that is tied to this connection stays, as what it carries would be lost.
        """
        if self.held_after_commit and self.mode <= SessionMode.HELD and not self._has_state:
            session, self.session = self.session, None
            if session is not None:
                self.pool.discard(session)

    # --- inside -------------------------------------------------------------------------

    @property
    def _has_state(self) -> bool:
        """Whether the session has something that would be lost with it."""
        return self.in_transaction or self.checks_off or self.is_held

    @contextmanager
    def any_session(self) -> Iterator[NodeSession]:
        """The held session, or one for the length of the block; its state must not change."""
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

    @contextmanager
    def _watched_session(self) -> Iterator[NodeSession]:
        """Use the held session; if it breaks, what it carried is lost."""
        session = self._require_session()
        try:
            yield session
        except MySQLError as exc:
            if is_lost(exc):
                self._lose(exc)
            raise

    def _require_session(self) -> NodeSession:
        if self.session is None or self.mode >= SessionMode.LOST:
            raise self._lost_error()
        return self.session

    def _end(self, how: bytes) -> None:
        """COMMIT or ROLLBACK on the server if anything reached it."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        session = self.session
        if session is not None and self.in_transaction:
            schema, session.schema = session.schema, None
            try:
                if self.strict:
                    session.run(how, _END_STRICT)
                else:
                    session.run(how)
            except BaseException as exc:
                # A failed COMMIT leaves the transaction to a rollback; anything less
                # clear than a server's error makes the session unusable.
                if is_lost(exc) or how == b"ROLLBACK":
                    self._lose(exc)
                raise
            session.schema = schema
        self._forget_transaction()
        self.settle()

    def _forget_transaction(self) -> None:
        self.in_transaction = False
        self.strict = False
        self.savepoints_unsure = False
        self.pending_savepoints.clear()

    def settle(self) -> None:
        """Back to the mode that the flags ask for; a session nobody needs is released."""
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
        if session.autocommits() and not session.more_results():
            self.pool.release(session)
        else:
            self.pool.discard(session)

    def _lose(self, exc: BaseException) -> BaseException:
        session, self.session = self.session, None
        if session is not None:
            self.pool.discard(session)
        carried = self._has_state or self.mode is SessionMode.PINNED
        if self.is_held or self.mode is SessionMode.PINNED:
            # Not to be healed by a rollback: the state is gone until close().
            self.in_transaction = self.checks_off = False
        if carried:
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


def _gone_away() -> MySQLError:
    return OperationalError(_LOST, "Server has gone away")
