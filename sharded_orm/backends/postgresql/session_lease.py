"""How long the virtual connection of an alias keeps a physical session of its node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

from sharded_orm.backends.missing_parts import creation_remedy
from sharded_orm.backends.postgresql.identity import session_id
from sharded_orm.backends.postgresql.search_path import guard_of, search_path_of
from sharded_orm.backends.session_hold import SessionHold
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.exceptions import SessionStateRefused, ShardDatabaseMissing

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.node import PostgreSQLPool
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession


class SessionLease(SessionHold["PostgreSQLNodeSession"]):
    """Base class of an alias's virtual connection: leases a session, keeps it as long as needed,
    and returns it.

    For example, a transaction needs the same session until its end. Not thread-safe, like Django's
    connections.

    :param schema: name of the schema; None for an alias that uses the server's search path.
    :param alias: the Django alias, for logs and errors.
    """

    pool: PostgreSQLPool

    def __init__(self, pool: PostgreSQLPool, schema: str | None, alias: str) -> None:
        super().__init__(pool, alias)
        self.schema = schema
        #: The tables that the next statement names, as pairs (schema, table). Used only by cursors
        #: of a node, which read many shards.
        self.tables: frozenset[tuple[str, str]] = frozenset()
        #: Schemas whose tables the next statements use, although their text does not name the
        #: tables. Used only by cursors of a node.
        self.schemas: frozenset[str] = frozenset()
        #: Whether the search path was set in the pinned session (kept until close()) for good, so
        #: that it is not sent with each statement.
        self.has_own_path = False
        #: How many statements cursors have sent by this connection. A caller reads this number
        #: twice, to see whether a statement was sent in between.
        self.statements = 0
        #: Whether this connection may have taken a number of a sequence on this session. If not,
        #: ``lastval()`` and ``currval()`` are refused, because they might return a number that
        #: another alias has taken on this session.
        self.may_have_number = False
        #: Whether the session was lost together with state that a rollback cannot bring back.
        self.has_lost_state = False

    @property
    def is_open(self) -> bool:
        """Whether the server has begun a transaction for this connection."""
        return self.session is not None and self.session.in_transaction

    @property
    def has_state(self) -> bool:
        """Whether closing this connection would lose an open transaction, or state of the session
        such as a changed setting.
        """
        return self.is_open or self.is_held or self.mode in (SessionMode.PINNED, SessionMode.LOST)

    def lease_session(self) -> PostgreSQLNodeSession:
        """Lease a session. Record which schemas it will use, because the pool closes a session that
        has used many.
        """
        if self.tables or self.schemas:
            return self.pool.lease_for(self.schemas, self.tables)
        session = self.pool.lease()
        if self.schema is not None:
            session.schemas.add(self.schema)
        return session

    def record_error(self, exc: BaseException) -> None:
        """Record that a statement has failed in the session of this connection.

        If the session cannot be used any more, it is closed.
        """
        session = self.session
        if session is None or session.is_usable:
            self.settle()
        else:
            self._lose(exc)

    def refuse_if_busy(self) -> None:
        """Raise an error if a COPY or stream() in this connection's session was not read to its
        end.

        The driver would raise the same error. Nothing is sent, so the transaction stays open.

        :raises psycopg.OperationalError: the session is busy.
        """
        session = self.session
        if session is not None and session.is_busy:
            raise psycopg.OperationalError(
                f"another command is already in progress on the connection of alias {self.alias!r}:"
                " read the COPY or stream() to its end first, or close it"
            )

    def prefix_error(self, exc: psycopg.Error) -> Exception:
        """Return the error to raise if the statement that sets the search path has failed with
        ``exc``. For example, return ``ShardDatabaseMissing`` if the schema does not exist.
        """
        if isinstance(exc, psycopg.errors.InvalidSchemaName):
            return ShardDatabaseMissing(
                f"Shard {self.alias!r} has no schema {self.schema!r} on {self.pool.name!r}."
                f" {creation_remedy(self.alias)}, or correct the topology."
            )
        if isinstance(exc, psycopg.errors.DivisionByZero):
            return psycopg.errors.InsufficientPrivilege(
                f"permission denied for schema {self.schema!r} of alias {self.alias!r}: the account has"
                " no USAGE. Grant it with GRANT USAGE ON SCHEMA …."
            )
        return exc

    def schema_error(self, session: PostgreSQLNodeSession) -> Exception | None:
        """Find out whether the schema can be used in ``session``. Return None if so; otherwise the
        error to raise.
        """
        if self.schema is not None:
            try:
                session.run(f"SELECT {guard_of(self.schema)}".encode())
            except psycopg.Error as exc:
                return self.prefix_error(exc)
        return None

    def pin(self, reason: str, *, own_path: bool = False) -> PostgreSQLNodeSession:
        """Keep one session until close(), as Django's own backend does. Return the session.

        :param reason: the operation that leaves state in the session. Logs and errors name it.
        :param own_path: if True, the schema's search path is set once for the session, instead of
            with each statement. From then on, the project may change the search path.
        :raises SessionStateRefused: a connection pooler would pass the state to other clients, or
            the search path would be lost with the open transaction.
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
            self.record_pin(reason)
        return session

    def restore_path(self) -> None:
        """Set the search path of the pinned session to the schema again, for example after ``RESET
        ALL``.
        """
        session = self.session
        if self.schema is not None and session is not None:
            try:
                self._stand(session)
            except Exception as exc:
                self.record_error(exc)
                raise
            except BaseException as exc:
                # After an interruption, nobody knows if the server has set the path. So close the
                # session.
                self._lose(exc)
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
        """Whether clients reach the server through a connection pooler.

        Opens a session if the pool has had none.
        """
        if self.pool.has_pooler is None:
            self.pool.any_session()
        return bool(self.pool.has_pooler)

    @contextmanager
    def standing_session(self) -> Iterator[PostgreSQLNodeSession]:
        """Context manager that yields a session for one statement that the server refuses in a
        transaction, such as ``VACUUM``.

        Usually, the search path is set for one transaction. Here, it is set for the session, and is
        reset after the statement. So this costs three packets instead of one.

        :raises SessionStateRefused: clients reach the server through a connection pooler.
        """
        if self.mode >= SessionMode.LOST:
            raise self._lost_error()
        self.statements += 1
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
        """Set the search path of ``session`` to the schema, for all later statements of the session."""
        assert self.schema is not None
        path = f"SET search_path TO {search_path_of(self.schema)}; SELECT ".encode()
        try:
            # The second statement of the packet, the guard, fails if the schema does not exist. The
            # server then also undoes the SET.
            session.run(path + guard_of(self.schema).encode())
        except psycopg.Error as exc:
            raise self.prefix_error(exc) from exc

    @contextmanager
    def held_cursor(self) -> Iterator[psycopg.ClientCursor[Any]]:
        """Context manager that yields a plain cursor of the driver, on the session that
        :meth:`hold` keeps.

        The search path is the server's default, not that of the schema. Must not be called in a
        transaction.
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
        """Keep one session for this connection, as the base class does; but raise an error behind a
        pooler.

        :raises SessionStateRefused: a pooler would pass the session, with its state, to other
            clients.
        """
        if self.has_pooler:
            raise self.pooler_refusal("a lock of the session")
        super().hold()

    def session_id(self) -> SessionID:
        """Return which session of which server this connection holds; an empty identity if it holds
        none.
        """
        if self.session is None:
            return SessionID()
        try:
            return session_id(self.session, self.pool)
        except psycopg.Error as exc:
            self.record_error(exc)
            raise

    def settle(self) -> None:
        if self.mode > SessionMode.HELD:
            return
        if not self.autocommitted:
            self.mode = SessionMode.TRANSACTION
        elif self.is_held or self.in_batch:
            self.mode = SessionMode.HELD
        else:
            self.mode = SessionMode.FREE
        if self.is_held or self.in_batch or self.held_after_commit or self.is_open:
            return
        session, self.session = self.session, None
        if session is not None:
            self.return_session(session)

    def return_session(self, session: PostgreSQLNodeSession) -> None:
        """Return ``session`` to the pool. If the session has an open transaction or an unread
        result, close it instead, so that the next user does not get them.
        """
        (self.pool.release if session.is_idle else self.pool.discard)(session)

    def _lose(self, exc: BaseException) -> BaseException:
        session, self.session = self.session, None
        self.has_lost_state = self.is_held or self.mode is SessionMode.PINNED
        if session is not None:
            self.pool.discard(session)
        if self.has_lost_state or not self.autocommitted:
            self.record_loss(exc)
        return exc

    def _lost_error(self) -> psycopg.Error:
        if self.mode is SessionMode.CLOSED:
            return psycopg.InterfaceError(f"the connection of alias {self.alias!r} is closed")
        return psycopg.OperationalError(
            f"the connection that alias {self.alias!r} held was lost with its transaction or"
            " session state; roll back or close it"
        )
