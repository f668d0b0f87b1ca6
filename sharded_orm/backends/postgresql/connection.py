"""The virtual connection of a Django alias: it leases a physical session of its node while there is
work.

In autocommit, the virtual connection holds a session for one statement. In a transaction, it holds a
session from the first statement to the end of the transaction.

A session finds the tables of a shard by its search path. The path is set for one transaction at a time,
in the packet of the statement that needs it: so it costs no round trip, it is undone by the server, and
it works behind a connection pooler that gives each transaction another session. In autocommit, the
packet ``SELECT set_config('search_path', …, true), …; statement`` is one transaction by itself. A
transaction begins with ``BEGIN; SELECT set_config(…), …; statement``. The query also fails if the
schema does not exist or may not be used: without that, a statement could find or create a table in
another schema of the path.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.pq.abc import PGconn

from sharded_orm.backends import savepoints
from sharded_orm.backends.postgresql.identity import session_id
from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.exceptions import SessionStateRefused, ShardDatabaseMissing

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.node import PostgreSQLPool
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession

logger = logging.getLogger("sharded_orm.backends")

#: The schema for extensions, which all shards of a database share. It is in the search path of each.
EXTENSIONS = "extensions"
BEGIN = b"BEGIN"


class BoundCursor(Protocol):
    """A cursor that has rows on the server, in the session of a connection."""

    @property
    def outlives_transactions(self) -> bool:
        """Whether the rows stay where they are when a transaction of the connection ends."""

    def expire(self) -> None:
        """Give the rows up, because the session is about to serve others."""


def quoted(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier."""
    return '"{}"'.format(name.replace('"', '""'))


def literal(text: str) -> str:
    """Return ``text`` as an SQL literal, whatever ``standard_conforming_strings`` says."""
    if "\\" in text:
        return " E'{}'".format(text.replace("\\", "\\\\").replace("'", "''"))
    return "'{}'".format(text.replace("'", "''"))


def guard_of(schema: str) -> str:
    """Return an expression that fails if ``schema`` does not exist, or may not be used.

    The server leaves such a schema out of the search path, and says nothing.
    """
    return f"1 / pg_catalog.has_schema_privilege({literal(schema)}, 'USAGE')::int"


def packet_of(prefix: list[bytes]) -> bytes:
    """Return the text of the statements ``prefix`` in the packet of another statement.

    Each has a line of its own, so the server's messages count lines from it.
    """
    return b";\n".join([*prefix, b""])


def search_path_of(schema: str) -> str:
    """Return the search path of ``schema``: the value of the setting ``search_path``."""
    return f"{quoted(schema)}, {quoted(EXTENSIONS)}"


def search_path_option(schema: str) -> str:
    """Return the text, for the option ``options`` of libpq, that sets the search path of a session."""
    path = search_path_of(schema).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"-c search_path={path}"


class PostgreSQLConnection:
    """The connection object that Django gets in place of the driver's: one alias's connection to one
    schema.

    It leases physical sessions from the node's pool, which all aliases of the node share. Not
    thread-safe, like Django's connections.

    :param schema: name of the schema; None for an alias that uses the server's search path.
    :param alias: the Django alias, for logs and errors.
    :param begin: the statement that begins a transaction, with its isolation level.
    :param cursor_class: the class of cursors.
    :param named_cursor_class: the class of cursors with a name.
    """

    #: The driver's cursors ask their connection for its pipeline. There is none: a cursor has a session
    #: while it runs a statement, and this connection at other times.
    _pipeline = None

    #: The driver's cursors lock their connection. A session has one user at a time anyway.
    lock = nullcontext()

    #: The driver's function that makes rows. May be set, as on a connection of the driver.
    row_factory: Any = staticmethod(psycopg.rows.tuple_row)

    def __init__(
        self,
        pool: PostgreSQLPool,
        schema: str | None,
        alias: str,
        begin: bytes,
        cursor_class: Any,
        named_cursor_class: Any,
    ) -> None:
        self.pool = pool
        self.schema = schema
        self.alias = alias
        self.begin = begin
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
        #: The statements that are sent before a statement in autocommit, and their text in the packet.
        self.autocommit_prefix: list[bytes] = [] if self.set_path is None else [self.set_path]
        self.autocommit_packet = packet_of(self.autocommit_prefix)
        #: The session that is leased now; None if there is none.
        self.session: PostgreSQLNodeSession | None = None
        self.mode = SessionMode.FREE
        #: Whether Django has switched autocommit on.
        self.autocommitted = True
        #: Statements about savepoints that will be sent with the next statement.
        self.pending: list[bytes] = []
        #: Whether all statements of the transaction were plain reads.
        self.only_reads = True
        #: Whether nobody has checked yet in this transaction that the schema exists.
        self.is_unguarded = False
        #: The tables, each with its schema, that the statements name; only for cursors of a node.
        self.tables: set[tuple[str, str]] = set()
        #: Whether the pinned session has a search path that the project has set.
        self.has_own_path = False
        #: Whether the session is kept because hold() was called, and release() was not called yet.
        self.is_held = False
        #: Whether hold_after_commit() was called: the session is then kept when its transaction ends.
        self.held_after_commit = False
        #: Whether the session was lost with state that a rollback cannot restore.
        self.has_lost_state = False
        #: Weak references to the cursors that have rows on the server.
        self.bound_cursors: list[weakref.ref[BoundCursor]] = []

    def __repr__(self) -> str:
        return f"<PostgreSQLConnection {self.alias!r} schema={self.schema!r} {self.mode.name}>"

    def __del__(self) -> None:
        # Runs when the connection is dropped without close(), for example when its thread ends. Its
        # session must not stay leased.
        session = getattr(self, "session", None)
        if session is not None:
            self.pool.discard(session)

    # --- What DatabaseWrapper and the driver's cursors ask of a connection ------------

    def cursor(self, name: str = "", *, binary: bool = False, **options: Any) -> Any:
        """Return a cursor. With a name, its rows stay on the server until they are fetched."""
        if name:
            cursor = self.named_cursor_class(self, name=name, **options)
        else:
            cursor = self.cursor_class(self, **options)
        if binary:
            cursor.format = psycopg.pq.Format.BINARY
        return cursor

    def wait(self, generator: Any) -> Any:
        """Refuse what a cursor of the driver wants to do without a session.

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
        """The libpq connection of any session, to quote values. Nothing may be sent on it."""
        return (self.session or self.pool.any_session()).pgconn

    @property
    def info(self) -> psycopg.ConnectionInfo:
        """Facts about the session that is held or, if none is held, about any session of the pool."""
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
        if on and self.is_open:
            # The driver refuses this in an open transaction, and so do we.
            raise psycopg.ProgrammingError(
                "can't change 'autocommit' now: connection in transaction status INTRANS"
            )
        self.pending.clear()
        self.autocommitted = on
        self.settle()

    @property
    def is_open(self) -> bool:
        """Whether the server has begun a transaction for this connection."""
        return self.session is not None and self.session.in_transaction

    def commit(self) -> None:
        self._end("commit")

    def rollback(self) -> None:
        """Roll back. Send nothing if the session was lost: the transaction has ended with it."""
        if self.mode is SessionMode.LOST and not self.has_lost_state:
            self._forget_transaction()
            self.mode = SessionMode.TRANSACTION
            self.settle()
            return
        self._end("rollback")

    def close(self) -> None:
        """Close this connection. A clean session goes back to the pool; any other session is closed.

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
        """Check that the held session is alive or, if none is held, that a session can be leased.

        :raises psycopg.Error: the session is dead, or no session can be leased.
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
        elif not self.session.ping():
            raise self._lose(psycopg.OperationalError("the connection is lost"))

    @property
    def is_idle(self) -> bool:
        """Whether no session is leased, no cursor has unread results, and no transaction has begun."""
        is_resting = self.mode in (SessionMode.FREE, SessionMode.CLOSED)
        return self.session is None and not self.bound_cursors and is_resting

    @property
    def has_state(self) -> bool:
        """Whether closing this connection would lose a transaction or session state."""
        return self.is_open or self.is_held or self.mode in (SessionMode.PINNED, SessionMode.LOST)

    @property
    def closed(self) -> bool:
        return self.mode is SessionMode.CLOSED

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
        # The caller may run statements or change the session's state with this attribute of the
        # driver. So keep a session, and let it stand in the schema.
        return getattr(self.pin(f"connection.{name}", own_path=True).raw, name)

    # --- What cursors need for a statement --------------------------------------------

    def begin_statement(self, kind: PostgreSQLKind) -> tuple[PostgreSQLNodeSession, list[bytes]]:
        """Return the session for the next statement, and the statements to send before it.

        Leases a session if none is held.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        session = self.session
        if session is None:
            session = self.session = self.lease_session()
        if self.autocommitted:
            bare = (
                kind in (PostgreSQLKind.BARE, PostgreSQLKind.SET_TRANSACTION) or self.has_own_path
            )
            return session, [] if bare else self.autocommit_prefix
        sets_transaction = kind is PostgreSQLKind.SET_TRANSACTION
        if session.in_transaction:
            if self.is_unguarded and not sets_transaction and self.set_path is not None:
                return session, [self.set_path, *self.pending]
            return session, self.pending[:]
        prefix = [self.begin]
        if not self.has_own_path and self.set_path is not None:
            # Before SET TRANSACTION there must not be a query. The next statement has the guard.
            self.is_unguarded = sets_transaction
            prefix.append(self.set_path_bare if sets_transaction else self.set_path)
        return session, [*prefix, *self.pending]

    def lease_session(self) -> PostgreSQLNodeSession:
        """Lease a session, and note which schema it is about to use."""
        session = self.pool.lease()
        if self.schema is not None:
            session.schemas.add(self.schema)
        elif self.tables:
            session.tables |= self.tables
        return session

    def record_prefix(self, prefix: list[bytes], done: int) -> None:
        """Note that the server has executed the first ``done`` statements of ``prefix``."""
        pending = self.pending
        for statement in prefix[:done]:
            if statement == self.set_path:
                self.is_unguarded = False
            elif pending and statement == pending[0]:
                del pending[0]

    def record_error(self, exc: BaseException) -> None:
        """Note that a statement on the held session failed. If the session is unusable, give it up."""
        session = self.session
        if session is None or session.is_usable:
            self.settle()
        else:
            self._lose(exc)

    def prefix_error(self, exc: psycopg.Error) -> Exception:
        """Return the error for callers if the statement that sets the search path failed with ``exc``."""
        if isinstance(exc, psycopg.errors.InvalidSchemaName):
            return ShardDatabaseMissing(
                f"Shard {self.alias!r} has no schema {self.schema!r} on {self.pool.name!r}. Create it with"
                f" 'manage.py migrate --database {self.alias}', or correct the topology."
            )
        if isinstance(exc, psycopg.errors.DivisionByZero):
            return psycopg.errors.InsufficientPrivilege(
                f"permission denied for schema {self.schema!r} of alias {self.alias!r}: the account has"
                " no USAGE. Grant it with GRANT USAGE ON SCHEMA …."
            )
        return exc

    def schema_error(self, session: PostgreSQLNodeSession) -> Exception | None:
        """Return the error for callers if the schema cannot be used, or the session is lost."""
        if self.schema is not None:
            try:
                session.run(f"SELECT {guard_of(self.schema)}".encode())
            except psycopg.Error as exc:
                return self.prefix_error(exc)
        return None

    # --- How long a session is kept ---------------------------------------------------

    def pin(self, reason: str, *, own_path: bool = False) -> PostgreSQLNodeSession:
        """Keep one session until close(), as Django's own backend does. Return the session.

        :param reason: what leaves state in the session, for logs and errors.
        :param own_path: whether no search path is to be sent from now on. The session then gets the
            schema's search path for good, and the project may change it.
        :raises SessionStateRefused: a connection pooler would give the state to others, or the search
            path would be lost with the open transaction.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        if self.mode is not SessionMode.PINNED or own_path != self.has_own_path:
            self._refuse_state(reason, own_path=own_path)
        session = self.session
        if session is None:
            session = self.session = self.lease_session()
        if self.has_pooler:
            raise self.pooler_refusal(reason)
        if own_path and not self.has_own_path:
            self.has_own_path = True
            try:
                self.restore_path()
            except BaseException:
                self.has_own_path = False
                raise
        if self.mode is not SessionMode.PINNED:
            self.mode = SessionMode.PINNED
            stats = self.pool.stats
            stats.pins += 1
            stats.pin_reasons[reason] = stats.pin_reasons.get(reason, 0) + 1
            logger.info(
                "Alias %r keeps a connection of node %r for itself until it is closed: %s"
                " leaves state in the session.", self.alias, self.pool.name, reason,
            )  # fmt: skip
        return session

    def restore_path(self) -> None:
        """Let the pinned session stand in the schema again."""
        session = self.session
        if self.schema is not None and session is not None:
            try:
                self._stand(session)
            except BaseException as exc:
                self.record_error(exc)
                raise

    def _refuse_state(self, reason: str, *, own_path: bool) -> None:
        if self.has_pooler:
            raise self.pooler_refusal(reason)
        if own_path and self.schema is not None and not self.autocommitted:
            raise SessionStateRefused(
                f"Alias {self.alias!r}: {reason!r} in a transaction would leave the search path of the"
                f" schema {self.schema!r}. Use SET LOCAL, or do this outside of transactions."
            )

    def pooler_refusal(self, reason: str) -> SessionStateRefused:
        if self.mode < SessionMode.PINNED:
            self.settle()
        return SessionStateRefused(
            f"Alias {self.alias!r}: {reason!r} leaves state in the session, and node"
            f" {self.pool.name!r} is a connection pooler, which would give the session to others. Use an"
            " alias that connects to the server directly, or a statement for the transaction only (SET"
            " LOCAL, pg_advisory_xact_lock)."
        )

    @property
    def has_pooler(self) -> bool:
        """Whether a connection pooler stands before the server. Opens a session if there was none."""
        if self.pool.has_pooler is None:
            self.pool.any_session()
        return bool(self.pool.has_pooler)

    @contextmanager
    def standing_session(self) -> Iterator[PostgreSQLNodeSession]:
        """Give a session that stands in the schema without a transaction, for one statement.

        For statements that the server refuses in a transaction block. Three packets in all.

        :raises SessionStateRefused: a connection pooler stands before the server.
        """
        if self.has_own_path or self.schema is None:
            session, is_leased = self.session, self.session is None
            if session is None:
                session = self.lease_session()
            try:
                yield session
            finally:
                if is_leased:
                    self.return_session(session)
            return
        if self.has_pooler:
            raise self.pooler_refusal("a statement that cannot run in a transaction")
        session = self.session or self.lease_session()
        is_clean = False
        try:
            self._stand(session)
            try:
                yield session
            finally:
                if session.is_idle:
                    session.run(b"RESET search_path")
                    is_clean = True
        except (ShardDatabaseMissing, psycopg.errors.InsufficientPrivilege):
            is_clean = is_clean or session.is_idle
            raise
        finally:
            if session is not self.session:
                (self.return_session if is_clean else self.pool.discard)(session)

    def _stand(self, session: PostgreSQLNodeSession) -> None:
        """Let ``session`` stand in the schema, also between its statements."""
        assert self.schema is not None
        path = f"SET search_path TO {search_path_of(self.schema)}; SELECT ".encode()
        try:
            # If the guard fails, the server undoes both statements.
            session.run(path + guard_of(self.schema).encode())
        except psycopg.Error as exc:
            raise self.prefix_error(exc) from exc

    @contextmanager
    def held_cursor(self) -> Iterator[psycopg.ClientCursor[Any]]:
        """Give a plain cursor of the driver to a ``with`` block, in the session that hold() keeps.

        The search path of this cursor is the server's. Must not be used in a transaction.
        """
        self.hold()
        assert self.session is not None
        try:
            with psycopg.ClientCursor(self.session.raw) as cursor:
                yield cursor
        except psycopg.Error as exc:
            self.record_error(exc)
            raise

    def hold(self) -> None:
        """Keep one session until release(), so that the caller can leave state in the session.

        Repeated calls change nothing. The state is gone after close(), or if the session is lost.
        """
        if self.has_pooler:
            raise self.pooler_refusal("a lock of the session")
        if self.mode <= SessionMode.HELD and self.session is None:
            self.session = self.lease_session()
        self.is_held = True
        self.settle()

    def release(self) -> None:
        """Undo hold(). The caller must have removed its state. A pinned session is still kept."""
        self.is_held = False
        self.settle()

    def hold_after_commit(self) -> None:
        """Keep the session after commit, until release_after_commit() or discard_after_commit()."""
        self.held_after_commit = self.session is not None

    def release_after_commit(self) -> None:
        """Undo hold_after_commit(). The session goes back to the pool, unless something else keeps it.

        Further calls do nothing.
        """
        self.held_after_commit = False
        self.settle()

    def discard_after_commit(self) -> None:
        """Close the session that hold_after_commit() kept. Its id is then gone from the server.

        The session stays open if it has other state of this connection, which closing would lose.
        """
        if self.held_after_commit and self.mode <= SessionMode.HELD and not self.has_state:
            session, self.session = self.session, None
            if session is not None:
                self.pool.discard(session)

    def session_id(self) -> SessionID:
        """Return the identity of the held session on its server; empty if no session is held."""
        if self.session is None:
            return SessionID()
        try:
            return session_id(self.session, self.pool)
        except psycopg.Error as exc:
            self.record_error(exc)
            raise

    def settle(self) -> None:
        """Set ``mode`` from the other attributes. Release the session if no attribute keeps it.

        Does nothing if the session is pinned or lost, or if the connection is closed.
        """
        if self.mode > SessionMode.HELD:
            return
        if not self.autocommitted:
            self.mode = SessionMode.TRANSACTION
        else:
            self.mode = SessionMode.HELD if self.is_held else SessionMode.FREE
        if self.is_held or self.held_after_commit or self.is_open:
            return
        session, self.session = self.session, None
        if session is not None:
            self.return_session(session)

    def return_session(self, session: PostgreSQLNodeSession) -> None:
        """Return ``session`` to the pool, or close it if it has a transaction or an unread result."""
        (self.pool.release if session.is_idle else self.pool.discard)(session)

    # --- Internal helpers -------------------------------------------------------------

    def _end(self, how: str) -> None:
        """End the transaction. If the server has begun one, send ``how``: commit or rollback."""
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        session = self.session
        self._expire_cursors(at_close=False)
        if session is not None and not session.is_usable:
            # A cursor has met the end of the session when it fetched rows, for example.
            exc = self._lose(psycopg.OperationalError("the connection was lost"))
            if how == "commit" or self.has_lost_state:
                raise exc
            self.rollback()
            return
        if session is not None and session.in_transaction:
            end: Callable[[], None] = getattr(session.raw, how)
            try:
                end()
            except BaseException as exc:
                # If the server refuses COMMIT, because of a deferred constraint for example, the
                # transaction has ended.
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
        self.only_reads = True
        self.is_unguarded = False

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

    def _lose(self, exc: BaseException) -> BaseException:
        session, self.session = self.session, None
        self.has_lost_state = self.is_held or self.mode is SessionMode.PINNED
        if session is not None:
            self.pool.discard(session)
        if self.has_lost_state or not self.autocommitted:
            self.mode = SessionMode.LOST
            logger.warning(
                "Alias %r lost its connection to node %r, and what it held with it: %s",
                self.alias, self.pool.name, exc,
            )  # fmt: skip
        return exc

    def _lost_error(self) -> psycopg.Error:
        if self.mode is SessionMode.CLOSED:
            return psycopg.InterfaceError(f"the connection of alias {self.alias!r} is closed")
        return psycopg.OperationalError(
            f"the connection that alias {self.alias!r} held was lost with its transaction or"
            " session state; roll back or close it"
        )

    def defer(self, sql: str) -> bool:
        """Defer one of Django's savepoint statements. Return False if it must be sent now."""
        session = self.session
        if session is not None and session.has_failed:
            return False
        return savepoints.defer(sql, self.pending, may_release=self.is_open)


def _driver_setting(name: str) -> property:
    """Return the attribute ``name`` of the driver's connections, which can be read but not set."""

    def refuse(connection: PostgreSQLConnection, value: Any) -> None:
        raise SessionStateRefused(
            f"Alias {connection.alias!r}: {name!r} of the driver's connection cannot be set, because"
            " aliases share sessions. Use OPTIONS['isolation_level'], or run SET TRANSACTION first"
            " in the transaction."
        )

    return property(lambda connection: None, refuse)


for _name in ("isolation_level", "read_only", "deferrable", "prepare_threshold"):
    setattr(PostgreSQLConnection, _name, _driver_setting(_name))
