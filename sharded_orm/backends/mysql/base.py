"""Django's MySQL backend, changed so that sessions (server connections) belong to a node (a
database server). All schemas on the node share the sessions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.mysql import base as stock
from django.utils.asyncio import async_unsafe
from django.utils.functional import cached_property

from sharded_orm.backends.key_guard import BATCH, ColumnTypes
from sharded_orm.backends.move_locks import SWITCH
from sharded_orm.backends.mysql import (
    branches,
    collations,
    identity,
    move_locks,
    schema_locks,
    sizes,
    snapshot,
)
from sharded_orm.backends.mysql.change_capture import MySQLChangeCapture
from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.creation import DatabaseCreation
from sharded_orm.backends.mysql.cursorless_statements import CursorlessStatementMixin
from sharded_orm.backends.mysql.features import DatabaseFeatures
from sharded_orm.backends.mysql.introspection import DatabaseIntrospection
from sharded_orm.backends.mysql.leased_cursor import LeasedCursor, leased
from sharded_orm.backends.mysql.node import NodePool, node_pool
from sharded_orm.backends.mysql.node_cursor import NodeCursor, NodeStream
from sharded_orm.backends.mysql.operations import DatabaseOperations
from sharded_orm.backends.mysql.replication import CONNECT_TIMEOUT
from sharded_orm.backends.mysql.row_copy import MySQLRowCopy
from sharded_orm.backends.mysql.schema import DatabaseSchemaEditor
from sharded_orm.backends.mysql.schema_move import MySQLSchemaMove
from sharded_orm.backends.mysql.session import check_parameters
from sharded_orm.backends.mysql.side_fence import MySQLSideFence
from sharded_orm.backends.mysql.statement_kind import StatementKind, classify
from sharded_orm.backends.server_connection import ServerConnectionMixin
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.backends.two_phase.branch import Fate
from sharded_orm.backends.write_hooks.commit import CommitOutcome
from sharded_orm.mysql_flavor import MySQLFlavor

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard


class DatabaseWrapper(
    CursorlessStatementMixin, ServerConnectionMixin[NodePool], stock.DatabaseWrapper
):
    """The connection object of a shard, or of an ordinary alias of ``DATABASES``.

    ``self.connection`` is a :class:`VirtualConnection`: it has no session of its own, but leases
    one while there is work. All aliases of the process with equal connection parameters lease from
    the same pool.
    """

    creation_class = DatabaseCreation
    features_class = DatabaseFeatures
    introspection_class = DatabaseIntrospection
    ops_class = DatabaseOperations
    SchemaEditorClass = DatabaseSchemaEditor
    snapshot_module = snapshot
    sizes_module = sizes
    identity_module = identity
    branches_module = branches
    node_cursor_class = NodeCursor
    node_stream_class = NodeStream
    sessions_sql = "SHOW GLOBAL STATUS LIKE 'Threads_connected'"

    connection: VirtualConnection | None
    creation: DatabaseCreation

    def _pool_for(self, conn_params: dict[str, Any]) -> NodePool:
        params = {k: v for k, v in conn_params.items() if k not in ("database", "db")}
        return node_pool(params, self.isolation_level, self.settings_dict, type(self))

    def check_parameters(self, params: dict[str, Any]) -> None:
        check_parameters(params)

    @async_unsafe
    def get_new_connection(self, conn_params: dict[str, Any]) -> VirtualConnection:
        """Check that the node answers, and return a virtual connection.

        The virtual connection leases a session from the node's pool only when a statement must run.
        The check does not show whether the schema exists.
        """
        pool = self._node_pool = self._pool_for(conn_params)
        schema = conn_params.get("database") or conn_params.get("db") or None
        with self.wrap_database_errors:
            if schema is not None:
                pool.prepare()
            connection = VirtualConnection(pool, schema, self.alias, leased)
        # Use a weak reference, because a strong one would make a reference cycle. A dropped
        # connection object would then give its session back to the pool only at the next garbage
        # collection.
        connection.before_commit = weakref.WeakMethod(self._announce_writes)
        return connection

    def _announce_writes(self) -> None:
        for watcher in self.commit_watchers:
            watcher.may_commit()
        if self.transaction_writes is not None:
            # The next statement may commit the transaction, as DDL statements do, and the server
            # does not report that. So announce the writes to the cache before it. The announcements
            # stay until this transaction or the next one ends.
            self.transaction_writes.announce()

    def init_connection_state(self) -> None:
        # Call the method of Django's base class, and pass over that of its MySQL backend. That
        # method sends SET statements, but the pool has already sent them when it opened the
        # session.
        BaseDatabaseWrapper.init_connection_state(self)
        if self.queries_logged and "SHARD" not in self.settings_dict:
            # Django's backend logs the SET statements of a new connection. Do the same for an
            # ordinary alias.
            statements = self.node_pool.initial_statements(self.mysql_server_data)
            if statements:
                self.queries_log.append({"sql": "; ".join(statements), "time": "0.000"})

    def create_cursor(self, name: str | None = None) -> LeasedCursor:
        # Overrides Django's method, but without its decorator async_unsafe, which costs time for
        # every statement. The caller, cursor(), has this decorator already.
        connection = self.connection
        assert connection is not None
        cursor: LeasedCursor = connection.default_cursor(connection)
        return cursor

    def holds_session(self) -> bool:
        connection = self.connection
        if connection is None or connection.mode in (SessionMode.FREE, SessionMode.CLOSED):
            return False
        return connection.transaction.is_open or connection.mode is not SessionMode.TRANSACTION

    @cached_property
    def mysql_server_data(self) -> dict[str, Any]:
        """Facts about the server that Django's features need. One query per node and process."""
        with self.wrap_database_errors:
            return self.node_pool.server_data()

    def create_shard_database(self) -> None:
        """Create this alias's schema. Does nothing if the schema exists."""
        self.creation.create_schema(self.settings_dict["NAME"], if_not_exists=True)

    def drop_shard_database(self) -> None:
        """Drop this alias's schema with all its rows. Does nothing if the schema does not exist."""
        self.creation.drop_schema(self.settings_dict["NAME"])

    # ##### Schemas #####

    def schema_snapshot(self) -> SchemaSnapshot:
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.any_session() as session:
            return snapshot.read(session, self.settings_dict["NAME"])

    def schema_glance(self, known: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.any_session() as session:
            return snapshot.glance(session, self.settings_dict["NAME"], known, tables)

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.any_session() as session:
            snapshot.build(session, self.settings_dict["NAME"], definitions)

    def column_types(
        self, shards: Sequence[Shard], tables: Sequence[str], columns: Sequence[str]
    ) -> ColumnTypes:
        types: ColumnTypes = {}
        for start in range(0, len(shards), BATCH):
            batch = shards[start : start + BATCH]
            sql, params = collations.statement([s.schema for s in batch], tables, columns)
            schemas = collations.by_schema(self._unlogged_rows(batch, sql, params))
            types |= {shard.alias: schemas.get(shard.schema.lower(), {}) for shard in batch}
        return types

    def effect_of(self, sql: str) -> Effect:
        kind = classify(sql)
        if kind is StatementKind.WRITE:
            return Effect.ROWS
        return (
            Effect.SCHEMA
            if kind in (StatementKind.IMPLICIT, StatementKind.STATE)
            else Effect.NOTHING
        )

    def statements_sent(self) -> int | None:
        if self.connection is None:
            return 0
        # While the session is pinned, the project can send statements directly by the driver's
        # connection. These are not counted, so the number is unknown.
        is_pinned = self.connection.mode is SessionMode.PINNED
        return None if is_pinned else self.connection.announcements

    def lock_schema(self, seconds: float) -> bool:
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors:
            self.connection.hold()
            with self.connection.any_session() as session:
                return schema_locks.take(session, self.settings_dict["NAME"], seconds)

    def unlock_schema(self) -> None:
        if self.connection is None or not self.connection.is_held:
            return
        # Ignore an error here: close() ends the session, and the server then releases the lock.
        with suppress(self.Database.Error):
            with self.connection.any_session() as session:
                schema_locks.release(session, self.settings_dict["NAME"])
            self.connection.release()

    @contextmanager
    def structural_copy(self, definitions: SchemaSnapshot, schema: str) -> Iterator[Self]:
        settings = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)({**deepcopy(settings), "NAME": schema}, self.alias)
        with self.wrap_database_errors:
            snapshot.create_schema(self.node_pool, schema, definitions.defaults)
        try:
            copy.ensure_connection()
            assert copy.connection is not None
            # Hold the session of the temporary schema, so that close() ends it. If it went back to
            # the pool, the next copy might lease it. That copy's schema has the same name, and
            # would get tables with the character set of the dropped schema.
            copy.connection.hold()
            copy.build_schema(definitions)
            yield copy
        finally:
            copy.close()
            with self.wrap_database_errors:
                snapshot.drop_schema(self.node_pool, schema)

    def change_capture(self, account: Mapping[str, Any] | None = None) -> MySQLChangeCapture:
        return MySQLChangeCapture(self._stock_wrapper(account or {}))

    def row_copy(self, account: Mapping[str, Any] | None = None) -> MySQLRowCopy:
        # binary_prefix makes the driver mark bytes as binary, so that the server does not convert
        # them to another character set.
        options = {**self.settings_dict["OPTIONS"], "binary_prefix": True}
        return MySQLRowCopy(self._stock_wrapper({**(account or {}), "OPTIONS": options}))

    def schema_move(
        self, confirm: Callable[[], None], account: Mapping[str, Any] | None = None
    ) -> MySQLSchemaMove:
        return MySQLSchemaMove(self._stock_wrapper(account or {}), confirm)

    def side_fence(
        self,
        confirm: Callable[[], None],
        account: Mapping[str, Any] | None = None,
        answer_within: int | None = None,
    ) -> MySQLSideFence:
        settings = {**self.settings_dict, **(account or {})}
        options = {**(settings.get("OPTIONS") or {}), "connect_timeout": CONNECT_TIMEOUT}
        if answer_within is not None:
            options |= {"read_timeout": answer_within, "write_timeout": answer_within}
        return MySQLSideFence(self._stock_wrapper({**settings, "OPTIONS": options}), confirm)

    def wait_for_side_switch(self, seconds: float) -> None:
        # The query must run on the server that has refused the statement. If the connection to this
        # server is closed, do nothing, because a new connection may lead to the other server of the
        # pair.
        if self.connection is None:
            return
        query = move_locks.query_until_free(SWITCH, seconds)
        with self.wrap_database_errors, self.connection.any_session() as session:
            session.rows_in(self.settings_dict["NAME"], query)

    def _stock_wrapper(self, changes: Mapping[str, Any]) -> stock.DatabaseWrapper:
        """Return a connection object of Django's own MySQL backend, which has a session of its own.
        It is for statements that leave session state, which sessions of the pool must not have.
        """
        settings = {**deepcopy(self.settings_dict), **changes}
        settings = {k: v for k, v in settings.items() if k not in ("SHARD", "GENERATION")}
        return stock.DatabaseWrapper(settings, self.alias)

    # ##### Two-phase commit #####

    def fate_of(self, transaction: str, seconds: float) -> Fate:
        with self.wrap_database_errors:
            name = self.settings_dict["NAME"]
            whole = max(MySQLFlavor.of(self).least_lock_wait, round(seconds))
            return branches.fate(self.node_pool, name, transaction, whole)

    # ##### The end of a transaction #####

    @property
    def may_lack_statements(self) -> bool:
        return self.connection is not None and self.connection.transaction.unsure

    @property
    def has_failed(self) -> bool:
        return self.connection is not None and self.connection.transaction.is_undone

    @property
    def has_lost_session(self) -> bool:
        return self.connection is not None and self.connection.mode is SessionMode.LOST

    @property
    def seems_lost(self) -> bool:
        # An idle session has something to read only if the server has closed it.
        session = None if self.connection is None else self.connection.session
        return session is not None and not session.busy and bool(session.poll(0))

    @property
    def sends_with_commit(self) -> bool:
        return self.connection is not None and self.connection.may_wait

    @contextmanager
    def sent_with_commit(self) -> Iterator[None]:
        if (
            self.connection is None
            # A statement can be sent together with the COMMIT only if the end of this atomic block
            # commits. Inside a savepoint it does not, nor if autocommit was switched off by hand.
            or len(self._atomic_blocks) > 1
            or not self.commit_on_exit
            # If several shards commit one after the other, a statement that a server refuses must
            # fail before the first of them commits. So do not delay it until the COMMIT.
            or self.commits_with_others
        ):
            yield
            return
        with self.connection.collecting():
            yield

    # ##### Sessions #####

    @cached_property
    def limits_statements(self) -> bool:  # type: ignore[override]  # a server of this kind may lack it
        return bool(MySQLFlavor.of(self).statement_limit)

    def is_statement_limit(self, error: BaseException) -> bool:
        code = error.args[0] if isinstance(error, DatabaseError) and error.args else None
        return code == MySQLFlavor.of(self).statement_timeout

    def known_session(self) -> AbstractContextManager[None] | None:
        self.ensure_connection()
        assert self.connection is not None
        # The session has state. It may be in a transaction that the project has begun by its own
        # SQL, so do not use it.
        if self.connection.mode is not SessionMode.FREE:
            return None
        with self._one_session():
            # If clients reach the server through a proxy, nobody knows which session a statement
            # gets. Then the session has no identity, so return None.
            is_known = bool(self.session_id().connection)
        return self._one_session() if is_known else None

    @contextmanager
    def _one_session(self) -> Iterator[None]:
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.one_session():
            yield

    def reads_as_autocommit(self) -> bool:
        return (
            self.connection is not None
            and self.connection.mode is SessionMode.TRANSACTION
            and self.connection.transaction.is_as_autocommit
        )

    def commit_outcome(self) -> CommitOutcome:
        if self.connection is None or self.connection.mode >= SessionMode.LOST:
            # The session is lost, and so is the server's answer. COMMIT may have been executed, may
            # still be running on the server, or may never have arrived there.
            return CommitOutcome.UNKNOWN
        return CommitOutcome.OPEN
