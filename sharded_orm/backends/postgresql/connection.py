"""The virtual connection of a Django alias: it leases a physical session of its node while there is
work.

In autocommit, it holds a session for one statement. In a transaction, it holds one from the first
statement to the end of the transaction.

A session finds the tables of a shard by its search path. The first packet of a transaction also
sets the path, for this transaction only, so this costs no round trip. At the end of the
transaction, the server restores the old path. This works even behind a pooler, which may give each
transaction another session.

In autocommit, the packet ``SELECT set_config('search_path', …, true), …; statement`` is one
transaction by itself. A transaction begins with ``BEGIN; SELECT set_config(…), …; statement``. The
``SELECT`` fails if the schema does not exist or may not be used. Otherwise the statement could find
or create a table in another schema of the path.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.pq.abc import PGconn

from sharded_orm.backends import savepoints
from sharded_orm.backends.postgresql import branches
from sharded_orm.backends.postgresql.search_path import guard_of, packet_of, search_path_of
from sharded_orm.backends.postgresql.session_lease import SessionLease
from sharded_orm.backends.postgresql.sql_quotes import literal
from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind
from sharded_orm.backends.postgresql.two_phase import BranchPreparation
from sharded_orm.backends.savepoints import SavepointAction, parse_savepoint
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.exceptions import SessionStateRefused

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.node import PostgreSQLPool
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession

BEGIN = b"BEGIN"


class BoundCursor(Protocol):
    """A cursor whose unread rows are still on the server, in a session that the connection holds."""

    @property
    def outlives_transactions(self) -> bool:
        """Whether the cursor keeps its rows when the connection's transaction ends (``WITH HOLD``)."""

    def expire(self) -> None:
        """Close this cursor; its unread rows are lost. Called before its session goes back to the
        pool.
        """


class PostgreSQLConnection(BranchPreparation, SessionLease):
    """The object that Django gets in place of the driver's connection: one alias's connection to
    one schema.

    It holds no server connection of its own. It leases physical sessions from the node's pool,
    which all aliases of the node share. Not thread-safe, like Django's connections.

    :param schema: name of the schema; None for an alias that uses the server's search path.
    :param alias: the Django alias, for logs and errors.
    :param isolation_level: the isolation level of transactions; None for the server's default.
    :param cursor_class: the class of cursors.
    :param named_cursor_class: the class of cursors with a name.
    """

    #: The driver's cursors read this attribute of their connection. None means that the driver's
    #: pipeline mode is not active. It never is, because a cursor sends its statement in the leased
    #: session, not by this object.
    _pipeline = None

    #: The driver's cursors lock their connection with this. No real lock is needed, because a
    #: session has only one user at a time.
    lock = nullcontext()

    #: The driver's function that makes a Python object from each row. As with the driver's own
    #: connection, the project may replace it.
    row_factory: Any = staticmethod(psycopg.rows.tuple_row)

    def __init__(
        self,
        pool: PostgreSQLPool,
        schema: str | None,
        alias: str,
        isolation_level: psycopg.IsolationLevel | None,
        cursor_class: Any,
        named_cursor_class: Any,
    ) -> None:
        super().__init__(pool, schema, alias)
        self._isolation_level = isolation_level
        #: The statement that begins a transaction.
        self.begin = BEGIN
        if isolation_level is not None:
            self.begin += b" ISOLATION LEVEL " + isolation_level.name.replace("_", " ").encode()
        self.cursor_class = cursor_class
        self.named_cursor_class = named_cursor_class
        self.set_path: bytes | None = None
        self.set_path_bare = b""
        if schema is not None:
            path = literal(search_path_of(schema))
            self.set_path = (
                f"SELECT pg_catalog.set_config('search_path', {path}, true), {guard_of(schema)}"
            ).encode()
            self.set_path_bare = f"SET LOCAL search_path TO {search_path_of(schema)}".encode()
        #: In autocommit, these statements are sent in front of each statement, to set the search
        #: path. autocommit_packet has the same statements, joined to the bytes of a packet.
        self.autocommit_prefix: list[bytes] = [] if self.set_path is None else [self.set_path]
        self.autocommit_packet = packet_of(self.autocommit_prefix)
        #: A statement that limits the time of a write. It is sent before each write, in the same
        #: packet.
        self.limit: bytes | None = None
        #: Deferred savepoint statements, which are sent together with the next statement.
        self.pending: list[bytes] = []
        #: The names of Django's savepoints in the transaction, also of those in ``pending``.
        self.existing_savepoints: list[str] = []
        #: Whether all statements of the transaction so far were plain reads, which change and lock
        #: nothing.
        self.only_reads = True
        #: True from the beginning of a transaction until one of its statements, usually the first,
        #: has checked that the schema exists.
        self.is_unguarded = False
        #: Weak references to the cursors that still have unread rows on the server.
        self.bound_cursors: list[weakref.ref[BoundCursor]] = []

    def __repr__(self) -> str:
        return f"<PostgreSQLConnection {self.alias!r} schema={self.schema!r} {self.mode.name}>"

    # --- Methods that DatabaseWrapper and the driver's cursors call --------------------

    def cursor(self, name: str = "", *, binary: bool = False, **options: Any) -> Any:
        """Return a cursor. The rows of a cursor with a name stay on the server until they are
        fetched.
        """
        if name:
            cursor = self.named_cursor_class(self, name=name, **options)
        else:
            cursor = self.cursor_class(self, **options)
        if binary:
            cursor.format = psycopg.pq.Format.BINARY
        return cursor

    def wait(self, generator: Any) -> Any:
        """Refuse to wait for the server: this object has no session to wait for.

        A cursor of the driver calls this method only if it is closed or was not executed.

        :raises psycopg.InterfaceError: always.
        """
        generator.close()
        raise psycopg.InterfaceError("the cursor is closed, or it was not executed")

    @property
    def adapters(self) -> AdaptersMap:
        return self.pool.adapters

    @property
    def connection(self) -> PostgreSQLConnection:
        return self

    @property
    def pgconn(self) -> PGconn:
        """The libpq connection of any session of the pool, with which the driver quotes values.
        Nothing may be sent on it.
        """
        return (self.session or self.pool.any_session()).pgconn

    @property
    def info(self) -> psycopg.ConnectionInfo:
        """The driver's facts about the held session or, if none is held, about any session of the
        pool.
        """
        return psycopg.ConnectionInfo(self.pgconn)

    @property
    def autocommit(self) -> bool:
        return self.autocommitted

    @autocommit.setter
    def autocommit(self, on: bool) -> None:
        on = bool(on)
        if self.mode is SessionMode.CLOSED or (self.mode is SessionMode.LOST and on):
            raise self._lost_error()
        if on == self.autocommitted:
            return
        if self.is_open:
            # Refuse to change autocommit in an open transaction, as the driver does.
            raise psycopg.ProgrammingError(
                "can't change 'autocommit' now: connection in transaction status INTRANS"
            )
        self._forget_transaction()
        self.autocommitted = on
        self.settle()

    def commit(self) -> None:
        self._end("commit")

    def rollback(self) -> None:
        """Roll back the transaction. If its session was lost, send nothing, because the transaction
        ends with the session.
        """
        if self.mode is SessionMode.LOST and not self.has_lost_state:
            self._forget_transaction()
            self.mode = SessionMode.TRANSACTION
            self.settle()
            return
        self._end("rollback")

    def close(self) -> None:
        """Close this connection. Its session goes back to the pool, or is closed if it has state,
        such as an open transaction or a changed setting.

        Further calls do nothing.
        """
        self._expire_cursors(at_close=True)
        session, self.session = self.session, None
        is_clean = self.mode <= SessionMode.HELD and not self.is_held
        self.is_held = self.held_after_commit = False
        self._forget_transaction()
        self.mode = SessionMode.CLOSED
        if session is not None:
            if is_clean and session.is_idle:
                self.pool.release(session)
            else:
                self.pool.discard(session)

    def check(self) -> None:
        """Check that this connection can run a statement now.

        Pings the held session or, if none is held, a session that is leased for this check.

        :raises psycopg.Error: the session is dead, its transaction has failed and must be rolled
            back, or no session can be leased.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.session is None:
            session = self.pool.lease()
            is_alive = session.ping()
            (self.pool.release if is_alive else self.pool.discard)(session)
            if not is_alive:
                self.pool.release(self.pool.lease_new())
        elif self.session.has_failed:
            if self.session.poll(0):
                raise self._lose(psycopg.OperationalError("the connection is lost"))
            raise psycopg.errors.InFailedSqlTransaction(
                "the transaction has failed, so roll it back"
            )
        elif not self.session.ping():
            raise self._lose(psycopg.OperationalError("the connection is lost"))

    @property
    def is_idle(self) -> bool:
        """Whether no session is leased, no cursor has unread results, and no transaction has begun."""
        is_resting = self.mode in (SessionMode.FREE, SessionMode.CLOSED)
        return self.session is None and not self.bound_cursors and is_resting

    @property
    def broken(self) -> bool:
        return self.mode is SessionMode.LOST

    def __enter__(self) -> PostgreSQLConnection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(psycopg.Connection, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # The program may change the session's state by this attribute of the driver's connection.
        # So pin the session: keep it until close(), and set its search path to the shard's schema
        # for good.
        return getattr(self.pin(f"connection.{name}", own_path=True).raw, name)

    # --- Methods that cursors call for a statement --------------------------------------

    def begin_statement(self, kind: PostgreSQLKind) -> tuple[PostgreSQLNodeSession, list[bytes]]:
        """Return the session for the next statement, and a list of statements to send before it,
        such as ``BEGIN``.

        If the connection holds no session, this method leases one.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        self.statements += 1
        session = self.session
        if session is None:
            session = self.session = self.lease_session()
        if self.autocommitted:
            bare = (
                kind in (PostgreSQLKind.BARE, PostgreSQLKind.SET_TRANSACTION) or self.has_own_path
            )
            prefix = [] if bare else self.autocommit_prefix
            if self.limit is not None and kind in (PostgreSQLKind.WRITE, PostgreSQLKind.INSERT):
                prefix = [*prefix, self.limit]
            return session, prefix
        sets_transaction = kind is PostgreSQLKind.SET_TRANSACTION
        # Limit the waits for locks if the transaction is part of a two-phase commit. Two such
        # transactions may wait for each other on two servers, and no server sees such a deadlock.
        # Or the process of a prepared branch has died, so that the branch keeps its locks.
        limits = [branches.WAIT_LIMIT] if self.is_shared and not sets_transaction else []
        if session.in_transaction:
            if self.is_unguarded and not sets_transaction and self.set_path is not None:
                return session, [self.set_path, *limits, *self.pending]
            return session, self.pending[:]
        prefix = [self.begin]
        if not self.has_own_path and self.set_path is not None:
            # The server accepts no query before SET TRANSACTION. So in this case, only set the path
            # now, and check with the next statement that the schema exists. record_prefix() notes
            # when this was done.
            self.is_unguarded = True
            prefix.append(self.set_path_bare if sets_transaction else self.set_path)
        return session, [*prefix, *limits, *self.pending]

    def record_prefix(self, prefix: list[bytes], done: int) -> None:
        """Record what the first statements of ``prefix`` have done: checked the schema, or set
        savepoints.

        :param prefix: the statements that :meth:`begin_statement` returned.
        :param done: how many of them the server has executed.
        """
        pending = self.pending
        for statement in prefix[:done]:
            if statement == self.set_path:
                self.is_unguarded = False
            elif pending and statement == pending[0]:
                del pending[0]

    def limit_writes(self, seconds: float | None) -> None:
        # The limit is sent before a write in autocommit, in the same packet. The packet is one
        # transaction, and the setting ends with it. If the session has a shorter limit already,
        # keep that one (0 stands for no limit).
        self.limit = (
            None
            if seconds is None
            else b"SELECT pg_catalog.set_config('statement_timeout', CASE WHEN"
            b" pg_catalog.current_setting('statement_timeout')::interval BETWEEN '1us' AND '%(limit)dms'"
            b" THEN pg_catalog.current_setting('statement_timeout') ELSE '%(limit)dms' END, true)"
            % {b"limit": max(1, round(seconds * 1000))}
        )

    # --- Internal helpers -------------------------------------------------------------

    def _end(self, how: str) -> None:
        """End the transaction. If it has begun on the server, send ``how``: "commit" or "rollback"."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        session = self.session
        self._expire_cursors(at_close=False)
        if self.is_prepared:
            self._end_prepared(how)
            return
        if session is not None and not session.is_usable:
            # The session was lost earlier, but the loss was not recorded. For example, it was lost
            # while a cursor fetched rows.
            exc = self._lose(psycopg.OperationalError("the connection was lost"))
            if how == "commit" or self.has_lost_state:
                raise exc
            self.rollback()
            return
        if session is not None and session.in_transaction:
            try:
                session.end_transaction(how)
            except BaseException as exc:
                # If the server has only refused COMMIT, for example because of a deferred
                # constraint, the transaction has ended and the session is idle. Keep the session in
                # this case.
                if not session.is_idle:
                    self._lose(exc)
                raise
            finally:
                if session.is_idle:
                    self._forget_transaction()
                    self.settle()
            return
        self._forget_transaction()
        self.settle()

    def _forget_transaction(self) -> None:
        self.pending.clear()
        self.existing_savepoints.clear()
        self.only_reads = True
        self.is_unguarded = False
        self.may_have_number = self.may_have_number and self.mode is SessionMode.PINNED
        self._forget_branch()

    def _expire_cursors(self, *, at_close: bool) -> None:
        references, self.bound_cursors = self.bound_cursors, []
        for reference in references:
            cursor = reference()
            if cursor is None:
                continue
            if cursor.outlives_transactions and not at_close:
                self.bound_cursors.append(reference)
            else:
                cursor.expire()

    def defer(self, sql: str) -> bool:
        """If a savepoint statement of Django's can wait, keep it until the next statement is sent.

        Return True if it is kept, and False if it must be sent now.

        :param sql: a statement that :func:`~sharded_orm.backends.savepoints.parse_savepoint` knows.
        """
        session, statement = self.session, parse_savepoint(sql.strip())
        assert statement is not None
        if session is not None and session.has_failed:
            # The transaction has failed, and must be rolled back. So the deferred RELEASE
            # statements are not needed any more.
            self.pending.clear()
            if statement.action is SavepointAction.ROLLBACK_TO:
                savepoints.record(statement, self.existing_savepoints)
            return False
        if self.is_open and statement.action is SavepointAction.SAVEPOINT:
            # Send SAVEPOINT now, in a packet of its own. The server parses a whole packet before it
            # executes any statement of it. If SAVEPOINT were sent with the next statement, and the
            # server could not parse that, the savepoint would not be set, and the whole transaction
            # would be lost.
            savepoints.record(statement, self.existing_savepoints)
            return False
        return savepoints.defer(
            statement, self.pending, self.existing_savepoints, may_release=self.is_open
        )

    def fail_transaction(self, prefix: list[bytes]) -> None:
        """Begin the transaction on the server, and make it fail.

        Called if the server could not parse a packet, and so has not executed the BEGIN in it
        either. With Django's own backend, the transaction would have begun before such an error,
        and the error would make it fail, so that the server refuses further statements until the
        rollback. This method brings about the same.

        :param prefix: the statements that were sent in the packet before the failed statement.
        """
        session = self.session
        if session is None or self.autocommitted or not session.is_idle or not prefix:
            return
        with suppress(psycopg.Error):
            session.run(packet_of(prefix))
            self.record_prefix(prefix, len(prefix))
            session.run(b"SELECT 1 / 0")


def _driver_setting(name: str) -> property:
    """Return a property for the attribute ``name`` of the driver's connections. It cannot be set."""

    def read(connection: PostgreSQLConnection) -> Any:
        return connection._isolation_level if name == "isolation_level" else None

    def refuse(connection: PostgreSQLConnection, value: Any) -> None:
        raise SessionStateRefused(
            f"Alias {connection.alias!r}: {name!r} of the driver's connection cannot be set, because"
            " aliases share sessions. Use OPTIONS['isolation_level'], or run SET TRANSACTION first"
            " in the transaction."
        )

    return property(read, refuse)


for _name in ("isolation_level", "read_only", "deferrable", "prepare_threshold"):
    setattr(PostgreSQLConnection, _name, _driver_setting(_name))
