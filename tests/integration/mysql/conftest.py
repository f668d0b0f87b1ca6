"""A node with a few schemas, seen through our backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import MySQLdb
import pytest
from django.db import connections

from sharded_orm.backends.mysql.base import DatabaseWrapper
from sharded_orm.backends.mysql.node import NodePool
from tests.services.mariadb import Address

COUNT = 4


class Node:
    """``COUNT`` schemas of one server as the aliases ``t_0``, ``t_1``, …

    Each has a table ``item (id, shard, value)`` with the rows 1 and 2, in which ``shard``
    is the schema's own number.
    """

    def __init__(self, address: Address, **settings: Any) -> None:
        self.address = address
        self.settings = {
            "ENGINE": "sharded_orm.backends.mysql", **address.django(),
            "ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "CONN_MAX_AGE": None,
            "CONN_HEALTH_CHECKS": False, "OPTIONS": {}, "TIME_ZONE": None,
            "TEST": {"CHARSET": None, "COLLATION": None, "MIGRATE": True, "MIRROR": None,
                     "NAME": None},
            **settings,
        }  # fmt: skip
        self.aliases = [f"t_{number}" for number in range(COUNT)]
        self.admin = MySQLdb.connect(**address.mysqldb(), autocommit=True)
        # Idle sessions in pools, left by tests of other parts that share the server.
        self._foreign: set[int] = set()
        self._foreign = self.sessions()

    def __getitem__(self, number: int) -> DatabaseWrapper:
        wrapper = connections[self.aliases[number]]
        assert isinstance(wrapper, DatabaseWrapper)
        return wrapper

    @property
    def pool(self) -> NodePool:
        return self[0].node_pool

    def set_up(self) -> None:
        # Another process of the same run (pytest-xdist) may be using these names.
        assert self.ask("SELECT GET_LOCK('sharded_orm_tests_mysql', 600)") == [(1,)]
        for number, alias in enumerate(self.aliases):
            connections.settings[alias] = {**self.settings, "NAME": alias}
            self.ask(f"DROP DATABASE IF EXISTS {alias}")
            self.ask(f"CREATE DATABASE {alias} CHARACTER SET utf8mb4")
            self.ask(
                f"CREATE TABLE {alias}.item (id INT PRIMARY KEY AUTO_INCREMENT,"
                f" shard INT NOT NULL DEFAULT {number}, value VARCHAR(50)) ENGINE=InnoDB"
            )
            self.ask(f"INSERT INTO {alias}.item (id) VALUES (1), (2)")

    def tear_down(self) -> None:
        for alias in self.aliases:
            connections[alias].close()
            del connections[alias]
            del connections.settings[alias]
            self.ask(f"DROP DATABASE IF EXISTS {alias}")
        self.admin.close()

    def ask(self, sql: str, *params: Any) -> list[Any]:
        """Run a statement on a connection of our own, not of the backend."""
        cursor = self.admin.cursor()
        cursor.execute(sql, params or None)
        return list(cursor.fetchall())

    def run(self, number: int, sql: str, params: Any = None) -> list[Any]:
        """Run a statement on an alias."""
        with self[number].cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def value(self, number: int, pk: int = 1) -> Any:
        """Return the committed value."""
        return self.ask(f"SELECT value FROM {self.aliases[number]}.item WHERE id = {pk}")[0][0]

    def session_of(self, number: int) -> int:
        """Return the server's id of the session that the alias's next statement runs on."""
        session: int = self.run(number, "SELECT CONNECTION_ID()")[0][0]
        return session

    def sessions(self) -> set[int]:
        """Return the server's ids of all sessions but our own and those of earlier tests."""
        rows = self.ask(
            "SELECT id FROM information_schema.processlist WHERE user = %s", self.address.user
        )
        return {row[0] for row in rows} - self._foreign

    def kill(self, session: int) -> None:
        """KILL a session and return when the server has closed it."""
        self.ask(f"KILL {session}")
        while session in self.sessions():
            pass


@pytest.fixture
def node(mariadb: Address, django_db_blocker: Any) -> Iterator[Node]:
    with django_db_blocker.unblock():
        node = Node(mariadb)
        node.set_up()
        node.pool.dispose()
        yield node
        node.tear_down()
