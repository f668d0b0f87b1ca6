"""The pool of one node's sessions (server connections). All sessions of the pool are opened with
the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from MySQLdb.cursors import Cursor

from sharded_orm.backends.mysql.lock_waits import LOCK_WAIT
from sharded_orm.backends.mysql.session import NodeSession, connect
from sharded_orm.backends.mysql.transaction import UNDOING
from sharded_orm.backends.pool import DEFAULT_TIMEOUT, BoundedPool, SessionPool, frozen, get_pool
from sharded_orm.backends.signals import session_opened

# The query for facts about the server that Django needs, copied from
# django.db.backends.mysql.base.DatabaseWrapper. It runs once per node and process.
_SERVER_QUERY = b"""
    SELECT VERSION(), @@sql_mode, @@default_storage_engine, @@sql_auto_is_null,
           @@lower_case_table_names,
           CONVERT_TZ('2001-01-01 01:00:00', 'UTC', 'UTC') IS NOT NULL
"""
# Settings that each new session is asked for, because a project or an operator may have changed
# them: the most rows that the server sends of a query without LIMIT, by how many bytes it sorts a
# text, what a session does after a COMMIT, and whether a lock that is not granted in time rolls back
# the whole transaction.
_SETTINGS_QUERY = (
    b"SELECT @@sql_select_limit, @@max_sort_length, @@completion_type, @@innodb_rollback_on_timeout"
)
_NO_LIMIT = 2**64 - 1
_SORT_LENGTH = 1024
# With any other completion_type, a COMMIT would begin the next transaction of the session, or end
# the session. As sessions are shared, other aliases would then write into that transaction.
_NO_CHAIN = b"SET SESSION completion_type = NO_CHAIN"


class NodePool(SessionPool[NodeSession]):
    """A pool of sessions with one server, all opened with the same parameters.

    :param name: name of the node, for errors and logs.
    :param params: arguments of ``MySQLdb.connect``, without a schema.
    :param isolation_level: isolation level of each session; None for the server's default.
    :param sender: the backend's ``DatabaseWrapper`` class, as sender of :data:`session_opened`.
    :param max_age: seconds until a session expires; None for never.
    :param bounds: further arguments of the pool, such as ``maximum`` of :class:`BoundedPool`.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        isolation_level: str | None,
        sender: type | None,
        max_age: float | None = None,
        **bounds: Any,
    ) -> None:
        super().__init__(name, self._connect, max_age, **bounds)
        self.params = dict(params)
        self.params["autocommit"] = True
        self.cursorclass: type = self.params.pop("cursorclass", Cursor)
        #: Whether the project's ``init_command`` switches foreign key checks on or off itself.
        self.sets_checks = "foreign_key_checks" in str(self.params.get("init_command")).lower()
        self._isolation_level = isolation_level
        self._sender = sender
        self._server_data: dict[str, Any] | None = None
        #: The errors after which the server has rolled back the whole transaction.
        self.undoing: frozenset[tuple[int, ...]] = UNDOING
        #: SQL expression for the identity of the server; None until the first query for an
        #: identity.
        self.identity_sql: bytes | None = None
        #: What the last answer about existing sessions has shown, as a tuple (identity of the
        #: server, identity of this pool's account, whether this account sees the sessions of all
        #: accounts). None before the first answer.
        self.last_answer: tuple[str, str, bool] | None = None

    def server_data(self) -> dict[str, Any]:
        """Return facts about the server that Django needs, such as its version.

        The pool's first session queries them. If the pool has had no session yet, this method opens
        one.
        """
        if self._server_data is None:
            self.release(self.lease())
        assert self._server_data is not None
        return self._server_data

    def initial_statements(self, data: Mapping[str, Any]) -> list[str]:
        """Return the ``SET`` statements that Django's backend runs on each new connection.

        :param data: facts about the server, from :meth:`server_data`.
        """
        statements = []
        if data["sql_auto_is_null"]:
            statements.append("SET SQL_AUTO_IS_NULL = 0")
        if self._isolation_level:
            statements.append(
                f"SET SESSION TRANSACTION ISOLATION LEVEL {self._isolation_level.upper()}"
            )
        return statements

    def _connect(self) -> NodeSession:
        session = connect(self.params)
        try:
            data = self._server_data
            if data is None:
                data = self._server_data = self._ask_server(session)
            initial = [statement.encode() for statement in self.initial_statements(data)]
            settings = session.fetch_last(initial, _SETTINGS_QUERY)
            if session_opened.has_listeners(self._sender):
                session_opened.send(sender=self._sender, session=session.raw, pool=self)
                settings = session.fetch_one(_SETTINGS_QUERY)
            limit, sort_length, completion, undoes = settings
            self.most_rows = None if limit == _NO_LIMIT else limit
            self.sorts_short = sort_length < _SORT_LENGTH
            self.undoing = UNDOING | {(LOCK_WAIT,)} if undoes else UNDOING
            if completion != "NO_CHAIN":
                session.run(_NO_CHAIN)
        except BaseException:
            session.close()
            raise
        return session

    @staticmethod
    def _ask_server(session: NodeSession) -> dict[str, Any]:
        row = session.fetch_one(_SERVER_QUERY)
        return {
            "version": row[0],
            "sql_mode": row[1],
            "default_storage_engine": row[2],
            "sql_auto_is_null": bool(row[3]),
            "lower_case_table_names": bool(row[4]),
            "has_zoneinfo_database": bool(row[5]),
        }


class BoundedNodePool(NodePool, BoundedPool[NodeSession]):
    """A :class:`NodePool` with at most ``maximum`` sessions in use at the same time."""


def node_pool(
    params: Mapping[str, Any],
    isolation_level: str | None,
    settings: Mapping[str, Any],
    sender: type | None,
) -> NodePool:
    """Return this process's pool for these arguments. Aliases with equal arguments, such as all
    shards of a node, share a pool.

    :param params: arguments of ``MySQLdb.connect``, without a schema.
    :param isolation_level: isolation level of each session; None for the server's default.
    :param settings: an alias's entry in ``DATABASES``, with ``POOL`` and ``CONN_MAX_AGE``.
    :param sender: the backend's ``DatabaseWrapper`` class.
    """
    bounds: Mapping[str, Any] = settings.get("POOL") or {}
    max_age = settings.get("CONN_MAX_AGE", 0)
    key = (frozen(params), isolation_level, max_age, frozen(bounds))
    name = str(params.get("unix_socket") or f"{params.get('host', '')}:{params.get('port', 3306)}")

    def make() -> NodePool:
        if bounds.get("MAX") is None:
            return NodePool(name, params, isolation_level, sender, max_age)
        return BoundedNodePool(
            name, params, isolation_level, sender, max_age,
            maximum=bounds["MAX"], timeout=bounds.get("TIMEOUT", DEFAULT_TIMEOUT),
        )  # fmt: skip

    pool = get_pool(key, make)
    assert isinstance(pool, NodePool)
    return pool
