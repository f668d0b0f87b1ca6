"""Django's PostgreSQL backend, changed so that all schemas of a node's database share a pool of
sessions (server connections).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self, cast

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.postgresql import base as stock
from django.db.backends.postgresql.base import TIMESTAMPTZ_OID
from django.db.backends.postgresql.psycopg_any import register_tzloader
from django.utils.asyncio import async_unsafe
from django.utils.functional import cached_property
from psycopg import IsolationLevel
from psycopg.pq import Format

from sharded_orm.backends.key_guard import BATCH, ColumnTypes
from sharded_orm.backends.postgresql import branches, collations, identity, locks, sizes, snapshot
from sharded_orm.backends.postgresql.change_capture import PostgreSQLChangeCapture
from sharded_orm.backends.postgresql.client import DatabaseClient
from sharded_orm.backends.postgresql.connection import PostgreSQLConnection
from sharded_orm.backends.postgresql.creation import DatabaseCreation
from sharded_orm.backends.postgresql.cursor import PostgreSQLCursor
from sharded_orm.backends.postgresql.extension_types import share_types
from sharded_orm.backends.postgresql.features import DatabaseFeatures
from sharded_orm.backends.postgresql.node import PostgreSQLPool, close_sessions, node_pool
from sharded_orm.backends.postgresql.node_cursor import PostgreSQLNodeCursor, PostgreSQLNodeStream
from sharded_orm.backends.postgresql.operations import DatabaseOperations
from sharded_orm.backends.postgresql.row_copy import PostgreSQLRowCopy
from sharded_orm.backends.postgresql.schema import DatabaseSchemaEditor
from sharded_orm.backends.postgresql.schema_move import PostgreSQLSchemaMove
from sharded_orm.backends.postgresql.search_path import search_path_option
from sharded_orm.backends.postgresql.server_cursor import PostgreSQLServerCursor
from sharded_orm.backends.postgresql.session import unknown_parameters
from sharded_orm.backends.postgresql.sql_quotes import quoted
from sharded_orm.backends.postgresql.statement_kind import (
    PostgreSQLKind,
    classify,
    is_repeatable,
    is_several,
    makes_table,
)
from sharded_orm.backends.server_connection import ServerConnectionMixin
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.sizes import ShardSize, TableSize
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.sqlstate import QUERY_CANCELED, sqlstate_of
from sharded_orm.backends.statements import Effect
from sharded_orm.backends.two_phase.branch import Fate
from sharded_orm.backends.write_hooks.commit import CommitOutcome

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# Make all aliases of a pool share the numbers of extension types, so that they are not queried for
# each shard. This is done when this module is imported, that is, before any alias can use this
# backend.
share_types()

# Options of Django's backend that cannot work if aliases share sessions. Maps each name to the
# reason, with what to do instead.
_REFUSED_OPTIONS = {
    "pool": "this backend has a pool for each node, with the setting POOL",
    "server_side_binding": (
        "the search path of a shard is sent in the packet of each statement, which the protocol for"
        " values that the server binds does not allow"
    ),
    "cursor_factory": "this backend has cursors of its own",
    "prepare_threshold": (
        "a plan that the server has prepared for one schema is wrong for another; leave it out"
    ),
}


# The first words of statements that change rows, but never the schema.
_ROW_WORDS = frozenset(("INSERT", "UPDATE", "DELETE", "WITH", "MERGE"))


class DatabaseWrapper(ServerConnectionMixin[PostgreSQLPool], stock.DatabaseWrapper):
    """The connection object of a shard, or of an ordinary alias of ``DATABASES``.

    Its ``connection`` is a :class:`PostgreSQLConnection`, which leases a physical session only
    while there is work. All aliases of the process with equal connection parameters share a pool.
    """

    client_class = DatabaseClient
    creation_class = DatabaseCreation
    features_class = DatabaseFeatures
    ops_class = DatabaseOperations
    SchemaEditorClass = DatabaseSchemaEditor
    snapshot_module = snapshot
    sizes_module = sizes
    identity_module = identity
    branches_module = branches
    node_cursor_class = PostgreSQLNodeCursor
    node_stream_class = PostgreSQLNodeStream
    sessions_sql = (
        "SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = 'client backend'"
    )

    connection: PostgreSQLConnection | None
    creation: DatabaseCreation

    #: Django's own backend reads this attribute to see if it must use a pool. None switches that
    #: off. See also _REFUSED_OPTIONS.
    pool = None

    @property
    def schema(self) -> str | None:
        """Name of the shard's schema. None for an alias without SCHEMA, which uses the server's
        search path.
        """
        if self.alias == NO_DB_ALIAS:
            return None
        return cast("str | None", self.settings_dict.get("SCHEMA"))

    def _pool_for(self, conn_params: dict[str, Any]) -> PostgreSQLPool:
        return node_pool(conn_params, self.settings_dict, self.timezone_name, type(self))

    def get_connection_params(self) -> dict[str, Any]:
        options = self.settings_dict["OPTIONS"]
        for name, remedy in _REFUSED_OPTIONS.items():
            # Compare with None and False rather than test for a true value, because
            # prepare_threshold=0 must be refused, too. It makes the driver prepare a statement when
            # it is first executed.
            if options.get(name) is not None and options[name] is not False:
                raise ImproperlyConfigured(
                    f"Alias {self.alias!r}: OPTIONS[{name!r}] cannot be used with"
                    f" sharded_orm.backends.postgresql: {remedy}."
                )
        params: dict[str, Any] = super().get_connection_params()
        return params

    def check_parameters(self, params: dict[str, Any]) -> None:
        if unknown := unknown_parameters(params):
            raise ImproperlyConfigured(
                f"OPTIONS has {', '.join(map(repr, unknown))}, and the driver knows no such option."
            )

    @async_unsafe
    def get_new_connection(self, conn_params: dict[str, Any]) -> PostgreSQLConnection:
        """Return a virtual connection, which leases a session of the server only while there is
        work.

        First checks that the node answers, but not whether the schema exists.
        """
        self.isolation_level = IsolationLevel.READ_COMMITTED
        level = self.settings_dict["OPTIONS"].get("isolation_level")
        if level is not None:
            try:
                level = self.isolation_level = IsolationLevel(level)
            except ValueError as exc:
                raise ImproperlyConfigured(
                    f"Invalid transaction isolation level {level} specified. Use one of the"
                    " psycopg.IsolationLevel values."
                ) from exc
        pool = self._node_pool = self._pool_for(conn_params)
        pool.prepare()
        return PostgreSQLConnection(
            pool, self.schema, self.alias, level, PostgreSQLCursor, PostgreSQLServerCursor
        )

    def init_connection_state(self) -> None:
        # Skip the method of Django's PostgreSQL backend. It would set the time zone and the role,
        # which the pool has done already when it opened the session.
        BaseDatabaseWrapper.init_connection_state(self)

    def create_cursor(self, name: str | None = None) -> PostgreSQLCursor | PostgreSQLServerCursor:
        # Overrides the method of Django's PostgreSQL backend, whose decorator async_unsafe costs
        # time for every statement. The caller, cursor(), has this decorator, too.
        connection = self.connection
        assert connection is not None
        cursor: PostgreSQLCursor | PostgreSQLServerCursor
        holds = connection.autocommitted
        # A pooler may give the session to another client between two fetches. A named cursor would
        # lose its rows then, so use an ordinary cursor, which fetches all rows at once. Django's
        # setting DISABLE_SERVER_SIDE_CURSORS has the same effect.
        if name and not (holds and connection.has_pooler):
            cursor = connection.cursor(name, scrollable=False, withhold=holds)
        else:
            cursor = connection.cursor()
        loader: Any = connection.adapters.get_loader(TIMESTAMPTZ_OID, Format.TEXT)
        if self.timezone != loader.timezone:
            register_tzloader(self.timezone, cursor)
        return cursor

    def ensure_timezone(self) -> bool:
        # Django calls this method when a test changes the time zone. The sessions of the pool have
        # the old time zone, which other aliases may still use. So let this alias use another pool
        # from now on.
        pool, self._node_pool = self._node_pool, None
        connection = self.connection
        if connection is None or pool is None:
            return False
        pool = self.node_pool
        if connection.pool is pool:
            return False
        if connection.session is None and connection.mode < SessionMode.PINNED:
            connection.pool = pool
        else:
            with self.cursor() as cursor:
                cursor.execute(self.ops.set_time_zone_sql(), [self.timezone_name])
        return True

    def _close(self) -> None:
        # Call BaseDatabaseWrapper._close(), as CommitHookMixin does. Django's PostgreSQL backend
        # would first look for a pool of its own.
        super()._close()

    def close_pool(self) -> None:
        """Close this process's sessions with the alias's database. Idle sessions are closed now,
        and leased ones when they are released.

        Django calls this method before it drops or copies a test database, which the server refuses
        while a session is open.
        """
        close_sessions(self.get_connection_params())

    @contextmanager
    def node_cursor(self, *, stream: bool = False, schemas: Iterable[str] = ()) -> Iterator[Any]:
        """Return a context manager that yields a cursor of the node, as the base class does.

        :param schemas: schemas whose tables the statements use without naming them in their text.
            The pool counts these schemas, because it closes a session that has used many.
        """
        with super().node_cursor(stream=stream) as cursor:
            cursor.use_schemas(schemas)
            yield cursor

    def holds_session(self) -> bool:
        connection = self.connection
        # In a ``with`` block of one_session(), the caller relies on getting the same session for
        # each statement. So return True there, as for a session that has state.
        return connection is not None and (connection.has_state or connection.in_batch)

    def is_statement_limit(self, error: BaseException) -> bool:
        # The server raises this error at the time limit of a statement. It raises the same error if
        # an administrator cancels the statement, so this method then returns True, too. The caller
        # sends the statement a second time in both cases.
        return sqlstate_of(error) == QUERY_CANCELED

    @cached_property
    def pg_version(self) -> int:
        """Version of the server as a number, such as 150018. Free of cost if the pool has opened a
        session before.
        """
        pool = self.node_pool
        if not pool.server_version:
            with self.wrap_database_errors:
                pool.any_session()
        return pool.server_version

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in settings_dict.items() if k != "SCHEMA"}

    @classmethod
    def database_of(cls, node: Mapping[str, Any], schema: str) -> dict[str, Any]:
        return {"NAME": node.get("NAME", ""), "SCHEMA": schema}

    # ##### Schemas #####

    def create_shard_database(self) -> None:
        """Create this alias's schema; or its database, if the alias has no schema. Does nothing if
        it exists.
        """
        if self.schema is not None:
            with self.wrap_database_errors, self.node_cursor() as cursor:
                snapshot.create_missing_schema(cursor, self.schema)
            return
        name = self.settings_dict["NAME"]
        with self._nodb_cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_catalog.pg_database WHERE datname = %s", [name])
            if cursor.fetchone() is None:
                cursor.execute(f"CREATE DATABASE {quoted(name)}")

    def drop_shard_database(self) -> None:
        """Drop this alias's schema with all its rows. Does nothing if the schema does not exist."""
        self._run_on_node(f"DROP SCHEMA IF EXISTS {quoted(self._required_schema)} CASCADE")

    @property
    def _required_schema(self) -> str:
        if self.schema is None:
            raise ImproperlyConfigured(f"Alias {self.alias!r} has no schema: it is no shard.")
        return self.schema

    def _run_on_node(self, statement: str) -> None:
        with self.wrap_database_errors, self.node_cursor() as cursor:
            cursor.execute(statement)

    def prepare_database(self) -> None:
        if self.shard is not None:
            self.create_shard_database()
        super().prepare_database()

    def schema_snapshot(self) -> SchemaSnapshot:
        with self._catalog_cursor() as cursor:
            return snapshot.read(cursor, self._required_schema)

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        with self._catalog_cursor() as cursor:
            snapshot.build(cursor, definitions)

    @contextmanager
    def _catalog_cursor(self) -> Iterator[PostgreSQLCursor]:
        """Context manager that yields a cursor in the schema. Django's query log does not show its
        statements.
        """
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.cursor() as cursor:
            yield cursor

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        by_schema: dict[str, ShardSize] = {}
        for start in range(0, len(shards), snapshot.BATCH):
            schemas = [shard.schema for shard in shards[start : start + snapshot.BATCH]]
            with self.wrap_database_errors, self.node_cursor(schemas=schemas) as cursor:
                by_schema |= sizes.read(cursor, schemas)
        return {shard.alias: by_schema[shard.schema] for shard in shards}

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        with self.wrap_database_errors, self.node_cursor(schemas=[shard.schema]) as cursor:
            return sizes.tables(cursor, shard.schema)

    def column_types(
        self, shards: Sequence[Shard], tables: Sequence[str], columns: Sequence[str]
    ) -> ColumnTypes:
        types: ColumnTypes = {}
        for start in range(0, len(shards), BATCH):
            batch = shards[start : start + BATCH]
            sql, params = collations.statement([s.schema for s in batch], tables, columns)
            schemas = collations.by_schema(self._unlogged_rows(batch, sql, params))
            types |= {shard.alias: schemas.get(shard.schema, {}) for shard in batch}
        return types

    def undo_unfinished(self, sql: str) -> bool:
        with self._catalog_cursor() as cursor:
            return snapshot.drop_unfinished_indexes(cursor, sql)

    def lock_schema(self, seconds: float) -> bool:
        self.ensure_connection()
        assert self.connection is not None
        with self.wrap_database_errors, self.connection.held_cursor() as cursor:
            return locks.take(cursor, self._required_schema, seconds)

    def unlock_schema(self) -> None:
        if self.connection is None or not self.connection.is_held:
            return
        # Ignore an error, because close() ends the session in any case. The server then releases
        # the lock.
        with suppress(self.Database.Error):
            with self.connection.held_cursor() as cursor:
                locks.release(cursor, self._required_schema)
            self.connection.release()

    @contextmanager
    def structural_copy(self, definitions: SchemaSnapshot, schema: str) -> Iterator[Self]:
        settings = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)({**deepcopy(settings), "SCHEMA": schema}, self.alias)
        with self.wrap_database_errors, self.node_cursor() as cursor:
            snapshot.create_schema(cursor, schema)
        try:
            copy.build_schema(definitions)
            yield copy
        finally:
            copy.close()
            with self.wrap_database_errors, self.node_cursor() as cursor:
                snapshot.drop_schema(cursor, schema)

    def effect_of(self, sql: str) -> Effect:
        kind = classify(sql)
        if kind is PostgreSQLKind.READ or PostgreSQLKind.SAVEPOINT <= kind <= PostgreSQLKind.BARE:
            return Effect.NOTHING
        words = sql.split(None, 1)
        is_rows = bool(words) and words[0].upper() in _ROW_WORDS and not makes_table(sql)
        return Effect.ROWS if is_rows else Effect.SCHEMA

    def may_change_schema(self, sql: str) -> bool:
        # On PostgreSQL, a function may run any statement. So also return True if the text calls an
        # unknown function, or if it has several statements.
        return super().may_change_schema(sql) or is_several(sql) or not is_repeatable(sql)

    def statements_sent(self) -> int | None:
        if self.connection is None:
            return 0
        # has_own_path is True if, for example, the project has used the driver's own connection.
        # Statements that it sends directly by that connection are not counted, so the number is
        # unknown.
        return None if self.connection.has_own_path else self.connection.statements

    def change_capture(self, account: Mapping[str, Any] | None = None) -> PostgreSQLChangeCapture:
        return PostgreSQLChangeCapture(self._stock_wrapper(account or {}))

    def row_copy(self, account: Mapping[str, Any] | None = None) -> PostgreSQLRowCopy:
        return PostgreSQLRowCopy(self._stock_wrapper(account or {}))

    def schema_move(
        self, confirm: Callable[[], None], account: Mapping[str, Any] | None = None
    ) -> PostgreSQLSchemaMove:
        return PostgreSQLSchemaMove(self._stock_wrapper(account or {}), confirm)

    def _stock_wrapper(self, changes: Mapping[str, Any]) -> stock.DatabaseWrapper:
        """Return a connection object of Django's own backend, not of this one, for statements that
        leave state in their session.

        Its search path begins with the schema of this alias.
        """
        ours = ("SHARD", "GENERATION", "SCHEMA", "POOL")
        settings = {k: v for k, v in self.settings_dict.items() if k not in ours}
        settings = {**deepcopy(settings), **changes}
        if self.schema is not None:
            options = settings["OPTIONS"]
            given = options.get("options", "")
            settings["OPTIONS"] = {
                **options,
                "options": f"{given} {search_path_option(self.schema)}".strip(),
            }
        return stock.DatabaseWrapper(settings, self.alias)

    # ##### Two-phase commit #####

    def two_phase_obstacle(self) -> str:
        with self.wrap_database_errors:
            return branches.obstacle(self.node_pool)

    def fate_of(self, transaction: str, seconds: float) -> Fate:
        with self.wrap_database_errors:
            return branches.fate(self.node_pool, self._required_schema, transaction, seconds)

    # ##### Sessions #####

    def limit_lock_waits(self, seconds: float) -> None:
        with self.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {max(1, int(seconds * 1000)):d}")

    def reads_as_autocommit(self) -> bool:
        return (
            self.connection is not None
            and self.connection.mode is SessionMode.TRANSACTION
            # A transaction of a two-phase commit (is_shared) has written nothing as long as it has
            # not begun on the server.
            and (
                self.connection.only_reads
                or (self.connection.is_shared and not self.connection.is_open)
            )
            and not (self.connection.session is not None and self.connection.session.has_failed)
        )

    @property
    def has_failed(self) -> bool:
        # If is_unguarded is True, the transaction has failed only because the schema does not
        # exist. The server has executed no statement of the program, so nothing is lost.
        connection = self.connection
        return (
            connection is not None
            and connection.session is not None
            and connection.session.has_failed
            and not connection.is_unguarded
        )

    @property
    def has_lost_session(self) -> bool:
        return self.connection is not None and self.connection.mode is SessionMode.LOST

    def check_deferred_constraints(self) -> None:
        connection = self.connection
        if connection is None or not connection.is_open or connection.only_reads:
            return
        if connection.session is not None and connection.session.has_failed:
            # The transaction has failed because the schema does not exist (see has_failed), so it
            # has written nothing.
            return
        with self._catalog_cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")

    def commit_outcome(self) -> CommitOutcome:
        connection = self.connection
        if connection is None or connection.mode >= SessionMode.LOST:
            # The session was lost. The server may have received the COMMIT, and may even be
            # executing it still.
            return CommitOutcome.UNKNOWN
        # A transaction that is still open has not been committed. If the server has refused COMMIT,
        # it has rolled the transaction back, so no transaction is open and the outcome is OVER.
        return CommitOutcome.OPEN if connection.is_open else CommitOutcome.OVER
