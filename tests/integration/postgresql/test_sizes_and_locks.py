"""Sizes, column types and locks of schemas on PostgreSQL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sharded_orm.backends.postgresql import collations, locks, sizes
from sharded_orm.backends.sizes import ShardSize
from tests.integration.postgresql.schemas import Schemas, schemas_on
from tests.patience import PATIENCE
from tests.services.postgresql import Address


@pytest.fixture(scope="module")
def server(postgresql: Address, django_db_blocker: Any) -> Iterator[Schemas]:
    with django_db_blocker.unblock(), schemas_on(postgresql, f"sizes_{os.getpid()}") as schemas:
        yield schemas


# ##### Sizes #####


def fill(server: Schemas, schema: str, table: str = "t", rows: int = 5000) -> None:
    server.execute(schema, f'CREATE TABLE "{table}" (id integer PRIMARY KEY, word text)')
    server.execute(
        schema,
        f"INSERT INTO \"{table}\" SELECT n, repeat('x', 100) FROM generate_series(1, {rows}) n",
    )


def test_sizes_of_schemas(server: Schemas) -> None:
    full, empty, nasty = server.create(), server.create(), server.create('Si "ze" 10%s')
    fill(server, full)
    fill(server, nasty, rows=10)
    server.execute(full, "ANALYZE t")
    server.execute(nasty, "ANALYZE t")
    with server.server.cursor() as cursor:
        found = sizes.read(cursor, [full, empty, nasty, "nowhere"])
        assert sizes.read(cursor, []) == {}
    assert found[full].bytes > 500_000
    assert (found[full].rows, found[nasty].rows) == (5000, 10)
    assert found[full].bytes > found[nasty].bytes > 0
    assert found[empty] == found["nowhere"] == ShardSize(0, 0)


def test_sizes_of_tables(server: Schemas) -> None:
    schema = server.create()
    fill(server, schema, "b")
    fill(server, schema, "A %", rows=10)
    server.execute(schema, "CREATE VIEW v AS SELECT 1")
    server.execute(schema, "ANALYZE")
    with server.server.cursor() as cursor:
        first, second = sizes.tables(cursor, schema)
        assert sizes.tables(cursor, "nowhere") == []
    assert (first.name, first.rows, first.rows_are) == ("A %", 10, "estimated")
    assert (second.name, second.rows) == ("b", 5000)
    assert first.bytes is not None and second.bytes is not None
    assert second.bytes > 500_000 > first.bytes > 0


@pytest.mark.parametrize("rows", [70, 5000])
def test_a_table_that_was_never_analyzed(server: Schemas, rows: int) -> None:
    schema = server.create()
    server.execute(schema, "CREATE TABLE t (id integer) WITH (autovacuum_enabled = false)")
    server.execute(schema, f"INSERT INTO t SELECT generate_series(1, {rows})")
    # The server counts rows when the session hands its counts over.
    server.execute(schema, "SELECT pg_stat_force_next_flush()")
    server.execute(schema, "SELECT 1")
    with server.server.cursor() as cursor:
        (size,) = sizes.read(cursor, [schema]).values()
        (table,) = sizes.tables(cursor, schema)
    assert size.rows == table.rows == rows
    assert 8192 <= size.bytes <= 8192 + (table.bytes or 0)


# ##### Types of columns #####


def test_types_of_columns(server: Schemas) -> None:
    schemas = [server.create(), server.create("Types %s")]
    for schema in schemas:
        server.execute(
            schema,
            "CREATE COLLATION IF NOT EXISTS extensions.ci"
            " (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false)",
        )
        server.execute(schema, "CREATE DOMAIN name20 AS varchar(20)")
        server.execute(
            schema,
            'CREATE TABLE "Keys" (plain varchar(30) NOT NULL, c varchar COLLATE "C", folded text COLLATE'
            ' extensions.ci, fixed char(5), mail citext, "Domain" name20, number bigint, other text)',
        )
    columns = ["plain", "c", "folded", "fixed", "mail", "Domain", "number"]
    sql, params = collations.statement([*schemas, "nowhere"], ["Keys", "missing"], columns)
    with server.server.cursor() as cursor:
        cursor.execute(sql, params)
        types = collations.by_schema(cursor.fetchall())
    assert set(types) == set(schemas)
    for schema in schemas:
        found = types[schema]["keys"]
        assert set(found) == {column.lower() for column in columns}
        assert {name for name, column in found.items() if not column.is_exact} == {
            "folded", "fixed", "mail",
        }  # fmt: skip
        assert (found["plain"].data_type, found["plain"].length) == ("varchar", 30)
        assert found["plain"].definition == "character varying(30) NOT NULL"
        assert (found["c"].collation, found["c"].length) == ("C", None)
        assert (found["domain"].data_type, found["domain"].length) == ("varchar", 20)
        assert found["number"].collation is None
        assert found["plain"].holds("x" * 30) and not found["plain"].holds("x" * 31)


# ##### Locks #####


class Session:
    """A session of its own."""

    def __init__(self, server: Schemas) -> None:
        self.connection: Any = server.new_connection()
        self.connection.inc_thread_sharing()

    def take(self, schema: str, seconds: float = 0) -> bool:
        with self.connection.cursor() as cursor:
            return locks.take(cursor, schema, seconds)

    def release(self, schema: str) -> None:
        with self.connection.cursor() as cursor:
            locks.release(cursor, schema)

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def one(server: Schemas) -> Iterator[Session]:
    with closing(Session(server)) as session:
        yield session


@pytest.fixture
def other(server: Schemas) -> Iterator[Session]:
    with closing(Session(server)) as session:
        yield session


def test_one_session_has_the_lock(one: Session, other: Session) -> None:
    assert one.take("a")
    assert not other.take("a")
    assert other.take("A") and other.take('b "%s')
    one.release("a")
    assert other.take("a")


def test_a_session_that_ends_gives_its_locks_back(one: Session, other: Session) -> None:
    assert one.take("a")
    one.close()
    assert other.take("a", PATIENCE)


def test_it_waits_as_long_as_it_is_told(one: Session, other: Session) -> None:
    assert one.take("a")
    started = time.monotonic()
    assert not other.take("a", 0.3)
    assert time.monotonic() - started >= 0.3
    # The session is in order, and its later statements have no time limit.
    with other.connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchall() == [("0",)]
    assert not other.take("a")


def test_a_lock_that_becomes_free_is_taken_at_once(one: Session, other: Session) -> None:
    assert one.take("a")
    results = []
    thread = threading.Thread(target=lambda: results.append(other.take("a", PATIENCE)))
    thread.start()
    with one.connection.cursor() as cursor:
        waiting = False
        while not waiting and thread.is_alive():
            cursor.execute(
                "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            ((waiting,),) = cursor.fetchall()
    one.release("a")
    thread.join(PATIENCE)
    assert results == [True]


def test_the_lock_outlives_transactions(one: Session, other: Session) -> None:
    assert one.take("a", 1)
    one.connection.set_autocommit(False)
    one.connection.rollback()
    one.connection.set_autocommit(True)
    assert not other.take("a")
