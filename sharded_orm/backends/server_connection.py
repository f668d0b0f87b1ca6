"""The connection object of a shard whose database is on a server. All aliases with equal connection
parameters share a pool of sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.pool import SessionPool
from sharded_orm.backends.session_hold import SessionHold
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.sizes import ShardSize, TableSize
from sharded_orm.backends.two_phase.branch import BranchName, Completion
from sharded_orm.backends.write_hooks.session_id import OpenSessions, SessionID, SessionIdentity
from sharded_orm.exceptions import SessionStateRefused

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# The most characters of a statement that an error shows.
_SHOWN = 200

W = TypeVar("W", bound=SessionIdentity)
P = TypeVar("P", bound=SessionPool[Any])


def session_state_refusal(text: str) -> SessionStateRefused:
    """Return the error for the statement ``text``, which a cursor of a node does not run."""
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return SessionStateRefused(
        "A query of several shards runs on sessions that many shards share, so a node's cursor takes"
        " plain statements only: none that reads or sets state of a session, such as the id of the"
        f" last insert, a variable or a lock. Remedy: ask one shard. The statement: {shown!r}"
    )


class ServerConnectionMixin(ShardConnectionMixin, Generic[P]):
    """First base class of the ``DatabaseWrapper`` of each backend with a server.

    ``self.connection`` is a :class:`SessionHold`: it leases a session (server connection) from a
    pool while statements need one. All aliases of the process with equal connection parameters use
    the same pool. As with any connection object of Django, only the thread that owns the object may
    use it.
    """

    two_phase_refusal = ""

    #: Three modules of the backend. They read the definitions of a server's tables, the sizes of
    #: the tables, and the identities of the server's sessions.
    snapshot_module: ModuleType
    sizes_module: ModuleType
    identity_module: ModuleType
    #: The module of the backend that runs the statements of a two-phase commit.
    branches_module: ModuleType
    #: The classes of the cursors that :meth:`node_cursor` returns: the first fetches all rows at
    #: once, the second leaves them on the server until they are fetched.
    node_cursor_class: type[Any]
    node_stream_class: type[Any]
    #: A query whose last column is the number of sessions that the server has.
    sessions_sql: str
    limits_statements = True

    connection: SessionHold[Any] | None
    settings_dict: dict[str, Any]
    Database: Any
    _node_pool: P | None = None

    def _pool_for(self, conn_params: dict[str, Any]) -> P:
        raise NotImplementedError

    @property
    def node_pool(self) -> P:
        """The pool of sessions (server connections) of this alias's node.

        The pool is created at first use. Reading this attribute does not connect.
        """
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        if self._node_pool is None:
            self._node_pool = self._pool_for(self.get_connection_params())
        return self._node_pool

    @contextmanager
    def node_cursor(self, *, stream: bool = False) -> Iterator[Any]:
        """Return a context manager that yields a cursor on the node of this alias, in autocommit.

        The cursor belongs to no shard, so its statements must name the schema of each table. They
        are not part of a transaction of this alias. Usable from any thread.

        :param stream: whether rows stay on the server until they are fetched; otherwise
            ``execute()`` fetches all rows.
        """
        with self.wrap_database_errors:
            node = self.shard.node if self.shard is not None else None
            kind = self.node_stream_class if stream else self.node_cursor_class
            cursor = kind(self.node_pool, node)
            try:
                yield cursor
            finally:
                cursor.close()

    def forget_server(self) -> None:
        if self._node_pool is not None:
            self._node_pool.leave(relocation.generation)
            self._node_pool = None
        super().forget_server()

    def is_idle(self) -> bool:
        if self.in_atomic_block or self.run_on_commit:
            return False
        return self.connection is None or self.connection.is_idle

    def is_usable(self) -> bool:
        """Whether the session that this connection holds can run a statement. If it holds none,
        whether it can lease one from the pool.
        """
        if self.connection is None:
            return False
        try:
            self.connection.check()
        except self.Database.Error:
            return False
        return True

    def close_if_unusable_or_obsolete(self) -> None:
        super().close_if_unusable_or_obsolete()
        if self._node_pool is not None:
            self._node_pool.close_expired(revalidate=self.settings_dict["CONN_HEALTH_CHECKS"])

    # ##### Schemas #####

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        with self.wrap_database_errors, self.node_cursor() as cursor:
            digests = self.snapshot_module.digests(cursor, [shard.schema for shard in shards])
        return {shard.alias: digests[shard.schema] for shard in shards}

    def schemas_present(self) -> set[str]:
        with self.wrap_database_errors, self.node_cursor() as cursor:
            names: set[str] = self.snapshot_module.names(cursor)
        return names

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        with self.wrap_database_errors, self.node_cursor() as cursor:
            schemas = self.sizes_module.read(cursor, [shard.schema for shard in shards])
        return {shard.alias: schemas[shard.schema] for shard in shards}

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        with self.wrap_database_errors, self.node_cursor() as cursor:
            tables: list[TableSize] = self.sizes_module.tables(cursor, shard.schema)
        return tables

    def _unlogged_rows(self, shards: Sequence[Shard], sql: str, params: Sequence[Any]) -> Any:
        """Run a query and return its rows, but do not add the query to the query log, because
        ``assertNumQueries()`` would count it.
        """
        # A cursor makes a shard join the open transaction of its group. The query alone must not.
        would_join = self._is_behind and not self._in_atomic_block
        if len(shards) == 1 and shards[0].alias == self.alias and not would_join:
            with self.cursor() as cursor:
                # Unlike execute(), _execute() does not log the query. But like execute(), it
                # follows the shard to another node.
                cursor._execute(sql, params, False)
                return cursor.fetchall()
        with self.wrap_database_errors, self.node_cursor() as node_cursor:
            node_cursor.execute(sql, params)
            return node_cursor.fetchall()

    # ##### Two-phase commit #####

    def begin_decider(self) -> None:
        assert self.connection is not None
        self.connection.begin_branch()

    def begin_branch(self, branch: BranchName) -> None:
        assert self.connection is not None
        self.connection.begin_branch(self.branches_module.name_of(branch))

    def prepare_branch(self) -> None:
        assert self.connection is not None
        with self.wrap_database_errors:
            self.connection.prepare_branch()

    def leave_branch(self) -> None:
        if self.connection is not None:
            # leave_branch() closes the session. If the session has other state, which is then lost,
            # it raises an error. Ignore this error, because the caller wants to get rid of the
            # session.
            with suppress(self.Database.Error):
                self.connection.leave_branch()

    def prepared_branches(self) -> list[BranchName]:
        with self.wrap_database_errors:
            branches: list[BranchName] = self.branches_module.prepared(self.node_pool)
        return branches

    def end_branch(self, branch: BranchName, *, commit: bool) -> Completion:
        with self.wrap_database_errors:
            ended: Completion = self.branches_module.end(self.node_pool, branch, commit=commit)
        return ended

    # ##### Sessions #####

    def node_failure(self) -> Exception | None:
        return self.node_pool.failure()

    def open_sessions(self) -> OpenSessions:
        pool = self.node_pool
        with self.wrap_database_errors, self.node_cursor() as cursor:
            cursor.execute(self.sessions_sql)
            (row,) = cursor.fetchall()
        return OpenSessions(pool.size, pool.idle, int(row[-1]))

    def session_id(self) -> SessionID:
        if self.connection is None:
            return SessionID()
        with self.wrap_database_errors:
            return self.connection.session_id()

    @contextmanager
    def limited_session(self, seconds: float) -> Iterator[bool]:
        self.ensure_connection()
        connection = self.connection
        assert connection is not None
        # Yield False if the server cannot limit the time of statements. Also yield False if the
        # session has state, because it may be in a transaction that the project's own SQL has
        # begun.
        if connection.mode is not SessionMode.FREE or not self.limits_statements:
            yield False
            return
        with self.wrap_database_errors, connection.one_session():
            # If clients reach the server through a proxy or pooler, nobody knows which session a
            # statement gets. Then the session has no identity, so yield False.
            if not connection.session_id().connection:
                yield False
                return
            try:
                connection.limit_writes(seconds)
                yield True
            finally:
                connection.limit_writes(None)

    def judges(self, writer: SessionIdentity) -> bool:
        answer: bool = self.identity_module.judges(self.node_pool, writer)
        return answer

    def sessions_gone(self, writers: Sequence[W]) -> set[W]:
        gone: set[W] = self.identity_module.gone(self.node_pool, writers)
        return gone

    def hold_session(self) -> None:
        if self.connection is not None:
            self.connection.hold_after_commit()

    def release_session(self) -> None:
        if self.connection is not None:
            self.connection.release_after_commit()

    def discard_session(self) -> None:
        if self.connection is not None:
            self.connection.discard_after_commit()
