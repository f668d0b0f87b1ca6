"""The pool of one node's sessions (server connections). All sessions of the pool are opened with
the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from psycopg import sql
from psycopg.adapt import AdaptersMap

from sharded_orm.backends.pool import (
    DEFAULT_TIMEOUT,
    BoundedPool,
    SessionPool,
    frozen,
    get_pool,
    pools,
)
from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession, connect
from sharded_orm.backends.signals import session_opened

#: A session is closed after it has used this many schemas (``POOL["MAX_SCHEMAS"]``). Until it ends,
#: the server's process for the session keeps memory for each table: about 13 kB for a table that it
#: has read, and 25 kB for a table that it has written. See docs/decisions/0037-postgresql.md.
MAX_SCHEMAS = 200
#: One query can name tables of many schemas. While it runs, the server's process needs about 90 kB
#: for each of these tables. So this many tables in such queries count like one schema in the
#: comparison with MAX_SCHEMAS.
TABLES_OF_A_SCHEMA = 4


class PostgreSQLPool(SessionPool[PostgreSQLNodeSession]):
    """A pool of sessions with one database of a server, all opened with the same parameters.

    :param name: name of the node, for errors and logs.
    :param params: arguments of ``psycopg.connect``.
    :param adapters: psycopg's map of how values are converted. All sessions share it: if one alias
        registers a type, such as hstore, all sessions convert it.
    :param timezone: time zone of each session.
    :param role: role that each session takes (``SET ROLE``); None for the account's own role.
    :param sender: the backend's ``DatabaseWrapper`` class, as sender of :data:`session_opened`.
    :param max_age: seconds until a session expires; None for never.
    :param max_schemas: a session is closed after it has used this many schemas.
    :param bounds: further arguments of the pool, such as ``maximum`` of :class:`BoundedPool`.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        adapters: AdaptersMap,
        timezone: str,
        role: str | None,
        sender: type | None,
        max_age: float | None = None,
        max_schemas: int = MAX_SCHEMAS,
        **bounds: Any,
    ) -> None:
        super().__init__(name, self._connect, max_age, **bounds)
        self.params = dict(params)
        self.adapters = AdaptersMap(adapters)
        # Keep this object alive, because the key of the pool contains its id(). If it were freed,
        # another object could get the same id().
        self._template = adapters
        self.max_schemas = max_schemas
        #: Version of the server as a number, such as 150018; 0 until the first session is opened.
        self.server_version = 0
        #: Whether clients reach the server through a connection pooler such as PgBouncer, which may
        #: give each transaction another session of the server. None until the first session is
        #: opened.
        self.has_pooler: bool | None = None
        #: How many prepared transactions the server can keep at the same time (for two-phase
        #: commits); None until it was queried.
        self.max_prepared: int | None = None
        #: The session that was opened last. The driver needs a session to quote values for SQL.
        self.last_session: PostgreSQLNodeSession | None = None
        #: What the last answer about existing sessions has shown, as a tuple (identity of the
        #: server, identity of this pool's account, whether this account sees the sessions of all
        #: accounts). None before the first answer.
        self.last_answer: tuple[str, str, bool] | None = None
        #: Maps the name of an extension type, such as hstore, to its numbers (oids), as
        #: ``django.contrib.postgres`` has queried them.
        self.type_oids: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._timezone = timezone
        self._role = role
        self._sender = sender

    def release(self, session: PostgreSQLNodeSession) -> None:
        if self._has_used_too_many(session):
            self.discard(session)
        else:
            super().release(session)

    def lease_for(self, schemas: Set[str], tables: Set[tuple[str, str]]) -> PostgreSQLNodeSession:
        """Lease a session for a query over many schemas.

        If the idle session that the pool would lease would exceed ``max_schemas`` by this query, it
        is closed, and a new session is leased.

        :param schemas: schemas whose tables the query uses, although its text does not name the
            tables.
        :param tables: the tables that the query names, as pairs (schema, table).
        """
        session = self.lease()
        is_fresh = not session.schemas and not session.tables
        session.schemas |= schemas
        session.tables |= tables
        if self._has_used_too_many(session) and not is_fresh:
            self.discard(session)
            session = self.lease_new()
            session.schemas |= schemas
            session.tables |= tables
        return session

    def _has_used_too_many(self, session: PostgreSQLNodeSession) -> bool:
        # A session that has used too many schemas shall be closed, because its process on the
        # server keeps memory for each schema. Behind a pooler, closing it would not end the
        # process, so keep the session there.
        used = len(session.schemas) + len(session.tables) // TABLES_OF_A_SCHEMA
        return used > self.max_schemas and not self.has_pooler

    def any_session(self) -> PostgreSQLNodeSession:
        """Return a session for work without the server, such as quoting a value. Opens one if
        needed.

        Another thread may be using the session, so nothing may be sent on it.
        """
        session = self.last_session
        if session is None or session.is_dead:
            session = self.lease()
            self.release(session)
        return session

    def _connect(self) -> PostgreSQLNodeSession:
        session = connect(self.params)
        try:
            self._prepare(session)
            session_opened.send(sender=self._sender, session=session.raw, pool=self)
        except BaseException:
            session.close()
            raise
        self.last_session = session
        return session

    def _prepare(self, session: PostgreSQLNodeSession) -> None:
        """Set the time zone and the role of a new session, as Django's backend does.

        Costs at most one round trip, and one more for the first session of the pool.
        """
        info = session.raw.info
        if self.has_pooler is None:
            rows = session.run(b"SELECT pg_catalog.pg_backend_pid()")
            # Find out if there is a pooler. At the login, the client gets a process id, with which
            # it can cancel statements. A server sends the id of the session's process, but a pooler
            # sends an id of its own.
            self.has_pooler = rows[0][0] != session.pgconn.backend_pid
        if self.has_pooler and self._role is not None:
            # Refuse this before SET ROLE is sent: the role would stay in the pooler's session,
            # which other clients get later.
            raise ImproperlyConfigured(
                f"Node {self.name!r}: OPTIONS['assume_role'] cannot work behind a connection pooler,"
                " because a role belongs to a session of the server. Connect as that role, or set it"
                " for the account: ALTER ROLE … SET role = …."
            )
        if info.parameter_status("standard_conforming_strings") != "on":
            raise ImproperlyConfigured(
                f"Node {self.name!r}: standard_conforming_strings must be 'on'; otherwise nobody can"
                " tell where a text in a statement ends. Set it for the account: ALTER ROLE … SET"
                " standard_conforming_strings = on."
            )
        self.server_version = info.server_version
        statements: list[sql.Composable] = []
        if info.parameter_status("TimeZone") != self._timezone:
            statements.append(sql.SQL("SET TIME ZONE {}").format(sql.Literal(self._timezone)))
        if self._role is not None:
            statements.append(sql.SQL("SET ROLE {}").format(sql.Identifier(self._role)))
        if statements:
            session.run(sql.SQL("; ").join(statements).as_bytes(session.raw))


class BoundedPostgreSQLPool(PostgreSQLPool, BoundedPool[PostgreSQLNodeSession]):
    """A :class:`PostgreSQLPool` with at most ``maximum`` sessions in use at the same time."""


def node_pool(
    params: Mapping[str, Any],
    settings: Mapping[str, Any],
    timezone: str,
    sender: type | None,
) -> PostgreSQLPool:
    """Return this process's pool for these arguments. Aliases with equal arguments, such as all
    shards of a node, share a pool.

    :param params: arguments of ``psycopg.connect``, as Django's backend makes them.
    :param settings: an alias's entry in ``DATABASES``, with ``POOL``, ``CONN_MAX_AGE`` and the
        option ``assume_role``.
    :param timezone: time zone of each session.
    :param sender: the backend's ``DatabaseWrapper`` class.
    """
    bounds: Mapping[str, Any] = settings.get("POOL") or {}
    max_age = settings.get("CONN_MAX_AGE", 0)
    role = settings["OPTIONS"].get("assume_role")
    ours = ("context", "cursor_factory", "prepare_threshold")
    connecting = {key: value for key, value in params.items() if key not in ours}
    adapters = params["context"]
    key = (
        frozen(connecting), id(adapters), timezone, role, max_age, frozen(bounds),
    )  # fmt: skip
    name = f"{params.get('host', '')}:{params.get('port', 5432)}/{params.get('dbname', '')}"

    def make() -> PostgreSQLPool:
        kinds: dict[str, Any] = {"max_schemas": bounds.get("MAX_SCHEMAS", MAX_SCHEMAS)}
        kind: type[PostgreSQLPool] = PostgreSQLPool
        if bounds.get("MAX") is not None:
            kind = BoundedPostgreSQLPool
            kinds |= {
                "maximum": bounds["MAX"], "timeout": bounds.get("TIMEOUT", DEFAULT_TIMEOUT)
            }  # fmt: skip
        return kind(name, connecting, adapters, timezone, role, sender, max_age, **kinds)

    pool = get_pool(key, make)
    assert isinstance(pool, PostgreSQLPool)
    return pool


def close_sessions(params: Mapping[str, Any]) -> None:
    """Close this process's sessions with the database in ``params``, in all pools, whatever account
    and time zone they have.

    Leased sessions are closed when they are released.

    :param params: arguments of ``psycopg.connect``. Only host, port, dbname and service are
        compared.
    """
    where = ("host", "port", "dbname", "service")
    for pool in pools():
        if isinstance(pool, PostgreSQLPool) and all(
            pool.params.get(key) == params.get(key) for key in where
        ):
            pool.dispose()
