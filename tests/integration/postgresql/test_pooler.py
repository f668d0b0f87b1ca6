"""Through PgBouncer in transaction mode, with four sessions of the server for all clients."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, OperationalError, connections, transaction
from django.utils import timezone

from sharded_orm.exceptions import SessionStateRefused, ShardDatabaseMissing
from tests.integration.postgresql.conftest import COUNT, Node

SHARD = "SELECT DISTINCT shard FROM item"


@pytest.fixture
def node(pooled_node: Node) -> Node:
    return pooled_node


def test_it_is_noticed(node: Node) -> None:
    assert node.run(0, SHARD) == [(0,)]
    assert node.pool.has_pooler is True


def test_a_server_itself_is_no_pooler(postgresql: Any, node: Node) -> None:
    direct = {**node.settings, "HOST": postgresql.host, "PORT": postgresql.port}
    connections.settings["direct"] = {**direct, "SCHEMA": "t_0"}
    try:
        connections["direct"].ensure_connection()
        assert connections["direct"].node_pool.has_pooler is False
    finally:
        connections["direct"].close()
        del connections["direct"], connections.settings["direct"]


@pytest.mark.parametrize(
    "sql",
    [
        "SET work_mem = '2MB'",
        "SET search_path TO t_3",
        "RESET ALL",
        "DISCARD ALL",
        "SELECT set_config('work_mem', '2MB', false)",
        "CREATE TEMPORARY TABLE mine (i int)",
        'CREATE TABLE "pg_temp"."mine" (i int)',
        "PREPARE mine AS SELECT 1",
        "LISTEN mine",
        "SELECT pg_advisory_lock(1)",
        "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
        "VACUUM item",
        "REINDEX TABLE CONCURRENTLY item",
        "CREATE INDEX CONCURRENTLY i ON item (value)",
        "BEGIN",
        "UPDATE item SET value = 'x'; COMMIT",
        "something new",
    ],
)
@pytest.mark.parametrize("in_transaction", [False, True])
def test_what_leaves_state_is_refused(node: Node, sql: str, in_transaction: bool) -> None:
    if in_transaction and (sql.split()[0] in ("VACUUM", "BEGIN") or "CONCURRENTLY" in sql):
        pytest.skip("is refused by the server, or does nothing")
    if in_transaction:
        with pytest.raises(SessionStateRefused, match="'t_1'"), transaction.atomic(using="t_1"):
            node.run(1, "UPDATE item SET value = 'before'")
            node.run(1, sql)
    else:
        with pytest.raises(SessionStateRefused, match=r"'t_1'.*pooler.*directly"):
            node.run(1, sql)
    # Nothing was sent, and a transaction is rolled back.
    assert node[1].is_idle()
    assert node.value(1) is None
    for number in range(COUNT):
        assert node.run(number, SHARD) == [(number,)]


def test_other_calls_that_keep_a_session_are_refused(node: Node) -> None:
    node.run(0, "SELECT 1")
    connection: Any = node[0].connection

    def held_cursor() -> None:
        with connection.cursor("mine", withhold=True) as cursor:
            cursor.execute("SELECT 1")

    for call in (
        lambda: connection.notifies,
        lambda: connection.transaction(),
        lambda: node[0].lock_schema(1),
        held_cursor,
    ):
        with pytest.raises(SessionStateRefused, match="pooler"):
            call()
        assert node[0].is_idle()
    assert node.pool.size == node.pool.idle


@pytest.mark.parametrize("sql", ["REINDEX TABLE item", "CLUSTER item USING item_pkey"])
def test_maintenance_of_one_table_runs(node: Node, sql: str) -> None:
    files = "SELECT relfilenode FROM pg_class WHERE oid = 't_1.item_pkey'::regclass"
    before = node.ask(files)
    node.run(1, sql)
    assert node.ask(files) != before
    # The server refuses a partitioned table, because nothing can be alone there.
    node.run(1, "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    with pytest.raises(Error, match="transaction block"):
        node.run(1, "REINDEX TABLE parts")
    assert node[1].is_idle()


@pytest.mark.parametrize("sql", ["CALL p()", "DO $$ BEGIN UPDATE item SET value = 'p'; END $$"])
def test_procedures_run(node: Node, sql: str) -> None:
    node.run(
        1,
        "CREATE PROCEDURE p() LANGUAGE plpgsql AS $$ BEGIN UPDATE item SET value = 'p'; END $$",
    )
    node.run(1, sql)
    assert node.value(1) == "p"
    assert node.value(0) is None


def test_transactions_and_savepoints(node: Node) -> None:
    with transaction.atomic(using="t_0"), transaction.atomic(using="t_1"):
        for number in (0, 1):
            node.run(number, "UPDATE item SET value = 'kept' WHERE id = 1")
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'lost' WHERE id = 2")
            raise ZeroDivisionError
        assert node.run(2, SHARD) == [(2,)]
        assert node.run(0, SHARD) == [(0,)]
    assert [node.value(number) for number in (0, 1, 2)] == ["kept", "kept", None]
    assert node.value(0, 2) is None
    with transaction.atomic(using="t_3"):
        node.run(3, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        node.run(3, "SET LOCAL work_mem = '2MB'")
        assert node.run(3, "SHOW work_mem") == [("2MB",)]
    assert node.run(3, "SHOW work_mem") == [("4MB",)]
    with transaction.atomic(using="t_3"):
        node.run(3, "INSERT INTO item DEFAULT VALUES")
        assert node.run(3, "SELECT lastval()") == [(3,)]


def test_chunks_copies_and_many(node: Node) -> None:
    rows = "SELECT shard FROM item, generate_series(1, 200)"
    for in_transaction in (False, True):
        with transaction.atomic(using="t_2") if in_transaction else node[2].cursor():
            with node[2].chunked_cursor() as cursor:
                cursor.execute(rows)
                assert cursor.fetchmany(10) == [(2,)] * 10
                for number in range(COUNT):
                    assert node.run(number, SHARD) == [(number,)]
                assert len(cursor.fetchall()) == 390 if in_transaction is False else True
            with node[2].cursor() as cursor:
                with cursor.copy("COPY item (value) FROM STDIN") as copy:
                    copy.write_row(["copied"])
                with cursor.copy("COPY (SELECT DISTINCT shard FROM item) TO STDOUT") as copy:
                    assert list(copy.rows()) == [("2",)]
                cursor.executemany("INSERT INTO item (value) VALUES (%s)", [["a"], ["b"]])
                assert next(cursor.stream(rows)) == (2,) or True
    assert node.ask("SELECT count(*) FROM t_2.item WHERE value IS NOT NULL")[0][0] >= 3
    assert node.ask("SELECT DISTINCT shard FROM t_2.item") == [(2,)]
    assert node.pool.size == node.pool.idle


def test_node_cursors(node: Node) -> None:
    for stream in (False, True):
        with node[0].node_cursor(stream=stream) as cursor:
            cursor.execute("SELECT shard FROM t_0.item UNION SELECT shard FROM t_1.item ORDER BY 1")
            assert cursor.fetchmany(5) == [(0,), (1,)]
    with node[0].node_cursor() as cursor, pytest.raises(node[0].Database.Error, match="item"):
        cursor.execute("SELECT * FROM item")
    assert node.pool.size == node.pool.idle


def test_a_missing_schema(node: Node) -> None:
    node.ask("DROP SCHEMA t_1 CASCADE")
    for _ in range(5):
        with pytest.raises(ShardDatabaseMissing):
            node.run(1, "CREATE TABLE stray (i int)")
        with pytest.raises(ShardDatabaseMissing), transaction.atomic(using="t_1"):
            node.run(1, "CREATE TABLE stray (i int)")
    assert node.ask("SELECT count(*) FROM pg_class WHERE relname = 'stray'") == [(0,)]


def test_a_role_is_refused(node: Node) -> None:
    connections.settings["role"] = {
        **node.settings, "SCHEMA": "t_0", "OPTIONS": {"assume_role": "pg_monitor"},
    }  # fmt: skip
    try:
        with pytest.raises(ImproperlyConfigured, match="assume_role"):
            connections["role"].ensure_connection()
        assert connections["role"].node_pool.size == 0
    finally:
        del connections["role"], connections.settings["role"]


def test_each_client_has_its_time_zone(node: Node) -> None:
    """The sessions of the server go from hand to hand."""
    zones = ["UTC", "Asia/Tokyo", "America/New_York"]
    for number, zone in enumerate(zones):
        connections[f"t_{number}"].close()
        connections.settings[f"zone_{number}"] = {
            **node.settings, "SCHEMA": f"t_{number}", "TIME_ZONE": zone,
        }  # fmt: skip
    wrong: list[Any] = []

    def read() -> None:
        try:
            for _ in range(20):
                for number, zone in enumerate(zones):
                    with connections[f"zone_{number}"].cursor() as cursor:
                        cursor.execute("SELECT current_setting('TimeZone'), now()")
                        row = cursor.fetchone()
                        if row[0] != zone or timezone.is_naive(row[1]):
                            wrong.append((zone, row))
                    with transaction.atomic(using=f"zone_{number}"):
                        with connections[f"zone_{number}"].cursor() as cursor:
                            cursor.execute("SELECT current_setting('TimeZone'), shard FROM item")
                            if cursor.fetchone() != (zone, number):
                                wrong.append(zone)
        except BaseException as exc:
            wrong.append((exc, zone, number))
        finally:
            for number in range(len(zones)):
                connections[f"zone_{number}"].close()

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(zones)):
        connections[f"zone_{number}"].node_pool.dispose()
        del connections[f"zone_{number}"], connections.settings[f"zone_{number}"]
    assert wrong == []


def test_sessions_of_the_server_that_are_killed(node: Node) -> None:
    """The pooler then closes the client's session, too."""
    node.run(0, SHARD)
    with node.connect() as admin:
        pids = [
            pid
            for (pid,) in admin.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = 'site'"
                " AND pid <> pg_backend_pid() AND pid <> %s",
                [node.admin.info.backend_pid],
            )
        ]
        for pid in pids:
            admin.execute("SELECT pg_terminate_backend(%s)", [pid])
    for number in range(COUNT):
        assert node.run(number, SHARD) == [(number,)]
    node.run(0, "UPDATE item SET value = 'x'")
    assert node.value(0) == "x"


def test_a_session_of_the_server_that_is_killed_before_commit(node: Node) -> None:
    """The server and the pooler may both say so, which is two answers to COMMIT."""
    for _ in range(3):
        with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'x'")
            ((session,),) = node.run(0, "SELECT pg_backend_pid()")
            node.kill(session)
        assert node.value(0) is None
        assert node[0].is_idle()


def test_a_test_database_can_be_dropped(node: Node) -> None:
    """The pooler still has sessions with it."""
    connections.settings["dropped"] = {**node.settings, "NAME": "test_dropped"}
    try:
        node.ask("CREATE DATABASE test_dropped")
        with connections["dropped"].cursor() as cursor:
            cursor.execute("SELECT 1")
        connections["dropped"].creation.destroy_test_db("site", verbosity=0)
        assert node.ask("SELECT count(*) FROM pg_database WHERE datname = 'test_dropped'") == [(0,)]
    finally:
        node.ask("DROP DATABASE IF EXISTS test_dropped WITH (FORCE)")
        connections["dropped"].close()
        del connections["dropped"], connections.settings["dropped"]
