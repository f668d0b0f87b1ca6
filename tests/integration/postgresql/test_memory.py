"""A server's process keeps what it has read about each table, so sessions are closed in time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections

from sharded_orm.backends.postgresql.base import DatabaseWrapper
from sharded_orm.backends.postgresql.node import TABLES_OF_A_SCHEMA, PostgreSQLPool
from sharded_orm.scatter.plan import BATCH
from tests.integration.postgresql.conftest import COUNT, Node
from tests.services.postgresql import Address, PostgreSQLServer

#: Schemas of the long test, and the tables of each.
SCHEMAS = int(os.environ.get("MEMORY_SCHEMAS", "4096"))
TABLES = int(os.environ.get("MEMORY_TABLES", "10"))
#: The limit for the memory that a process has for itself, in kB.
LIMIT = 64 * 1024


def test_a_session_is_closed_after_so_many_schemas(node: Node) -> None:
    for alias in node.aliases:
        connections[alias].close()
        connections.settings[alias]["POOL"] = {"MAX_SCHEMAS": COUNT - 1}
        del connections[alias]
    sessions = [node.session_of(number) for number in range(COUNT - 1)]
    # The same schemas again cost nothing.
    sessions += [node.session_of(number) for number in range(COUNT - 1)]
    assert len(set(sessions)) == 1
    assert node.session_of(COUNT - 1) == sessions[0]
    assert node.pool.size == 0
    assert node.session_of(0) != sessions[0]


def test_queries_over_many_schemas_count_their_tables(node: Node) -> None:
    node.pool.max_schemas = 2
    most = node.pool.max_schemas * TABLES_OF_A_SCHEMA

    def read(tables: int) -> int:
        """Name so many tables, and return the process id of the session."""
        with node[0].node_cursor() as cursor:
            names = ", ".join(f'\'"s{n}"."item"\'' for n in range(tables))
            cursor.execute(f"SELECT pg_backend_pid(), {names}")
            return int(cursor.fetchone()[0])

    try:
        first = read(most)
        assert node.pool.size == 1
        assert read(most) == first  # The same tables again cost nothing.
        # Another session is opened before it would be too many, and closed after a query with too many.
        assert read(most + TABLES_OF_A_SCHEMA) != first
        assert node.pool.size == 0
    finally:
        node.pool.max_schemas = 200


def test_sizes_of_tables_count_their_schemas(node: Node) -> None:
    """The server opens a table to tell its size."""

    def opened_for(number: int) -> int:
        """Return how many sessions were opened for the sizes of the tables of a schema."""
        before = node.pool.stats.opened
        shard: Any = SimpleNamespace(schema=f"t_{number}")
        assert [table.name for table in node[0].table_sizes(shard)] == ["item"]
        return node.pool.stats.opened - before

    opened_for(0)
    node.pool.max_schemas = 2
    try:
        assert [opened_for(number) for number in (0, 1, 1, 2, 2, 3)] == [0, 0, 0, 1, 0, 0]
    finally:
        node.pool.max_schemas = 200


def memory_of(pid: int) -> int:
    """Return the memory that a process shares with no other, in kB. Shared buffers are left out."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no memory of its own")


class Fleet:
    """Thousands of schemas on a server of their own, and the memory of its processes.

    A process is measured when its session goes back to the pool, or is closed.
    """

    def __init__(self, address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = Node(address)
        self.largest: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        self.phase = ""
        for name in ("release", "discard"):
            monkeypatch.setattr(PostgreSQLPool, name, self._measured(getattr(PostgreSQLPool, name)))

    def _measured(self, method: Callable[..., None]) -> Callable[..., None]:
        def measure(pool: PostgreSQLPool, session: Any) -> None:
            used = memory_of(session.pgconn.backend_pid)
            self.largest[self.phase] = max(self.largest[self.phase], used)
            method(pool, session)

        return measure

    def close(self) -> None:
        with self.shard(0) as shard:
            shard.node_pool.dispose()
        self.node.admin.close()

    def create(self) -> None:
        for number in range(SCHEMAS):
            self.node.ask(
                f"CREATE SCHEMA m_{number};"
                + "".join(
                    f"CREATE TABLE m_{number}.t{n} (id bigserial PRIMARY KEY, a int, b text);"
                    f"CREATE INDEX ON m_{number}.t{n} (a);"
                    for n in range(TABLES)
                )
                + f"CREATE TABLE m_{number}.django_migrations (app text, name text)"
            )

    @contextmanager
    def shard(self, number: int) -> Iterator[DatabaseWrapper]:
        alias = f"m_{number}"
        connections.settings[alias] = {**self.node.settings, "SCHEMA": alias}
        wrapper = connections[alias]
        assert isinstance(wrapper, DatabaseWrapper)
        try:
            yield wrapper
        finally:
            wrapper.close()
            del connections[alias], connections.settings[alias]

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        with self.shard(0) as shard:
            pool = shard.node_pool
        pool.dispose()
        self.phase, before, start = phase, pool.stats.opened, time.monotonic()
        yield
        self.opened[phase] = pool.stats.opened - before
        print(
            f"{phase}: at most {self.largest[phase] / 1024:.0f} MB,"
            f" {self.opened[phase]} sessions, {time.monotonic() - start:.0f} s",
            flush=True,
        )

    def alternate(self) -> None:
        for number in range(SCHEMAS):
            with self.shard(number) as shard, shard.cursor() as cursor:
                for n in range(TABLES):
                    cursor.execute(f"INSERT INTO t{n} (a) VALUES (1) RETURNING id")
                    cursor.execute(f"SELECT * FROM t{n} WHERE a = 1")
                    cursor.execute(f"UPDATE t{n} SET b = 'x' WHERE a = 1")

    def scatter(self) -> None:
        """All tables are read, by statements with as many schemas as a scattered query has."""
        with self.shard(0) as shard:
            for n in range(TABLES):
                for stream, batch in ((False, BATCH), (True, shard.features.max_scattered_tables)):
                    for first in range(0, SCHEMAS, batch):
                        with shard.node_cursor(stream=stream) as cursor:
                            cursor.execute(
                                " UNION ALL ".join(
                                    f'(SELECT {number}, "t{n}"."id", "t{n}"."b" FROM "m_{number}"."t{n}"'
                                    f' WHERE "t{n}"."a" = 1 ORDER BY "t{n}"."id" LIMIT 20)'
                                    for number in range(first, min(first + batch, SCHEMAS))
                                )
                            )
                            while cursor.fetchmany(1000):
                                pass

    def survey(self) -> None:
        """What ``shards status`` and the admin ask."""
        shards: Any = [SimpleNamespace(alias=f"m_{n}", schema=f"m_{n}") for n in range(SCHEMAS)]
        with self.shard(0) as shard:
            assert len(shard.applied_digests(shards)) == SCHEMAS
            assert shard.schemas_present() >= {one.schema for one in shards}
            assert len(shard.shard_sizes(shards)) == SCHEMAS
            assert len(shard.column_types(shards, ["t0"], ["b"])) == SCHEMAS
            for one in shards:
                assert len(shard.table_sizes(one)) == TABLES + 1

    def migrate(self) -> None:
        for number in range(SCHEMAS):
            with self.shard(number) as shard:
                assert shard.lock_schema(1)
                assert "t0" in shard.schema_snapshot().definitions
                with shard.schema_editor() as editor:
                    for n in range(TABLES):
                        editor.execute(f"ALTER TABLE t{n} ADD COLUMN c int DEFAULT 0 NOT NULL")
                        editor.execute(f"CREATE INDEX ON t{n} (c)")
                shard.unlock_schema()


@pytest.mark.long
def test_the_memory_of_processes_with_thousands_of_schemas(
    own_postgresql: PostgreSQLServer, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any
) -> None:
    """``MEMORY_SCHEMAS`` and ``MEMORY_TABLES`` in the environment change the size."""
    with django_db_blocker.unblock(), closing(Fleet(own_postgresql.address, monkeypatch)) as fleet:
        fleet.create()
        for work in (fleet.alternate, fleet.scatter, fleet.survey, fleet.migrate):
            with fleet.measuring(work.__name__):
                work()
    # A session was used for many schemas, so the limit is a statement about memory.
    assert all(opened < SCHEMAS / 5 for opened in fleet.opened.values())
    assert min(fleet.largest.values()) > 0
    assert max(fleet.largest.values()) < LIMIT
