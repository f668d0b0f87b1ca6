"""A node with a few schemas, seen through our backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connections

from sharded_orm.backends.postgresql.base import DatabaseWrapper
from sharded_orm.backends.postgresql.node import PostgreSQLPool
from tests.integration.postgresql.recorder import PacketRecorder
from tests.services.postgresql import DATABASE, Address

COUNT = 4
#: Of the lock that keeps other processes of the run (pytest-xdist) from the names of the schemas.
_LOCK = 7_310_001


class Node:
    """``COUNT`` schemas of one server as the aliases ``t_0``, ``t_1``, …

    Each has a table ``item (id, shard, value)`` with the rows 1 and 2, in which ``shard`` is the
    schema's own number.

    :param address: where the backend connects: the server, or something in front of it.
    :param server: the server; None if it is ``address``.
    """

    def __init__(self, address: Address, server: Address | None = None, **settings: Any) -> None:
        self.address = address
        self.settings = {
            "ENGINE": "sharded_orm.backends.postgresql", **address.django(), "NAME": DATABASE,
            "ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "CONN_MAX_AGE": None,
            "CONN_HEALTH_CHECKS": False, "OPTIONS": {}, "TIME_ZONE": None,
            "TEST": {"CHARSET": None, "COLLATION": None, "MIGRATE": True, "MIRROR": None,
                     "NAME": None},
            **settings,
        }  # fmt: skip
        self.aliases = [f"t_{number}" for number in range(COUNT)]
        self.server = server or address
        self.admin = self.connect()
        # Idle sessions in pools, left by tests of other parts that share the server.
        self._foreign: set[int] = set()
        self._foreign = self.sessions()

    def connect(self) -> psycopg.Connection[Any]:
        """Open a session of our own, which the backend knows nothing of."""
        return psycopg.connect(**self.server.psycopg(DATABASE), autocommit=True)

    def __getitem__(self, number: int) -> DatabaseWrapper:
        wrapper = connections[self.aliases[number]]
        assert isinstance(wrapper, DatabaseWrapper)
        return wrapper

    @property
    def pool(self) -> PostgreSQLPool:
        return self[0].node_pool

    def set_up(self) -> None:
        self.ask(f"SELECT pg_advisory_lock({_LOCK})")
        for number, alias in enumerate(self.aliases):
            connections.settings[alias] = {**self.settings, "SCHEMA": alias}
            self.create(number)

    def create(self, number: int) -> None:
        alias = self.aliases[number]
        self.ask(f"DROP SCHEMA IF EXISTS {alias} CASCADE")
        self.ask(f"CREATE SCHEMA {alias}")
        self.ask(
            f"CREATE TABLE {alias}.item (id bigserial PRIMARY KEY,"
            f" shard int NOT NULL DEFAULT {number}, value varchar(50))"
        )
        self.ask(f"INSERT INTO {alias}.item (value) VALUES (NULL), (NULL)")

    def tear_down(self) -> None:
        if self.admin.closed:
            self.admin = self.connect()
        pool = self.pool
        for alias in self.aliases:
            connections[alias].close()
            del connections[alias]
            del connections.settings[alias]
        pool.dispose()
        for alias in self.aliases:
            self.ask(f"DROP SCHEMA IF EXISTS {alias} CASCADE")
        self.admin.close()

    def ask(self, sql: str, *params: Any) -> list[Any]:
        """Run a statement on a connection of our own, not of the backend."""
        cursor = self.admin.execute(sql, params or None)
        return cursor.fetchall() if cursor.description else []

    def run(self, number: int, sql: str, params: Any = None) -> list[Any]:
        """Run a statement on an alias."""
        with self[number].cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def value(self, number: int, pk: int = 1) -> Any:
        """Return the committed value."""
        return self.ask(f"SELECT value FROM {self.aliases[number]}.item WHERE id = {pk}")[0][0]

    def session_of(self, number: int) -> int:
        """Return the process id of the session that the alias's next statement runs on."""
        session: int = self.run(number, "SELECT pg_backend_pid()")[0][0]
        return session

    def sessions(self) -> set[int]:
        """Return the process ids of all sessions but our own and those of earlier tests."""
        rows = self.ask(
            "SELECT pid FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
            DATABASE,
        )
        return {row[0] for row in rows} - self._foreign

    def kill(self, session: int) -> None:
        """Terminate a session and return when the server has closed it."""
        self.ask("SELECT pg_terminate_backend(%s)", session)
        while self.ask("SELECT 1 FROM pg_stat_activity WHERE pid = %s", session):
            pass


def running(node: Node) -> Iterator[Node]:
    """Yield ``node`` with its schemas, and without idle sessions."""
    node.set_up()
    node.pool.dispose()
    yield node
    node.tear_down()


@pytest.fixture
def node(postgresql: Address, django_db_blocker: Any) -> Iterator[Node]:
    with django_db_blocker.unblock():
        yield from running(Node(postgresql))


@pytest.fixture
def pooled_node(postgresql: Address, pgbouncer: Address, django_db_blocker: Any) -> Iterator[Node]:
    """The same through PgBouncer in transaction mode."""
    with django_db_blocker.unblock():
        yield from running(Node(pgbouncer, postgresql))


@pytest.fixture
def recorder(postgresql: Address) -> Iterator[PacketRecorder]:
    """Something in front of the server that records what the backend sends."""
    with PacketRecorder(postgresql.host, postgresql.port) as recorder:
        yield recorder


@pytest.fixture
def recorded_node(
    postgresql: Address, recorder: PacketRecorder, django_db_blocker: Any
) -> Iterator[Node]:
    address = Address(recorder.host, recorder.port, postgresql.user, postgresql.password)
    with django_db_blocker.unblock():
        yield from running(Node(address, postgresql))
