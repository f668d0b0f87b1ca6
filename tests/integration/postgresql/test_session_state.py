"""Session state that a statement sets is kept for its alias and never seen by another."""

from __future__ import annotations

import logging
import threading
from typing import Any

import psycopg
import pytest
from django.db import Error, ProgrammingError, connections, transaction
from django.db.backends.signals import connection_created

from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind, classify
from sharded_orm.backends.signals import session_opened
from sharded_orm.exceptions import SessionStateRefused
from tests.integration.postgresql.conftest import COUNT, Node
from tests.patience import PATIENCE

OWN_LOCK = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711"
    " AND pid = pg_backend_pid()"
)
# A statement that sets state; one that reads it; the values that the owner and another alias see.
STATE: dict[str, tuple[str, str, Any, Any]] = {
    "set": ("SET work_mem = '2MB'", "SHOW work_mem", "2MB", "4MB"),
    "set_config": ("SELECT set_config('work_mem', '2MB', false)", "SHOW work_mem", "2MB", "4MB"),
    "hidden set": ("SELECT 1; SET work_mem = '2MB'", "SHOW work_mem", "2MB", "4MB"),
    "set in a block": (
        "DO $$ BEGIN PERFORM set_config('work_mem', '2MB', false); END $$",
        "SHOW work_mem", "2MB", "4MB",
    ),
    "time zone": ("SET TIME ZONE 'Asia/Tokyo'", "SHOW TimeZone", "Asia/Tokyo", "UTC"),
    "temporary table": (
        "CREATE TEMPORARY TABLE item (shard int DEFAULT 99)", "SELECT count(*) FROM item", 0, 2,
    ),
    "quoted temporary table": (
        'CREATE TABLE "pg_temp"."item" (shard int)', "SELECT count(*) FROM item", 0, 2,
    ),
    "lock": ("SELECT pg_advisory_lock(4711)", OWN_LOCK, 1, 0),
    "prepare": (
        "PREPARE mine AS SELECT 5", "SELECT count(*) FROM pg_prepared_statements", 1, 0,
    ),
    "listen": ("LISTEN mine", "SELECT count(*) FROM pg_listening_channels()", 1, 0),
    "held cursor": (
        "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
        "SELECT count(*) FROM pg_cursors WHERE is_holdable", 1, 0,
    ),
}  # fmt: skip
SHARD = "SELECT DISTINCT shard FROM item"


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("in_transaction", [False, True])
def test_state_is_kept_and_does_not_leak(node: Node, name: str, in_transaction: bool) -> None:
    sets, reads, mine, others = STATE[name]
    pins = node.pool.stats.pins
    if in_transaction:
        with transaction.atomic(using="t_0"):
            node.run(0, sets)
            assert name == "listen" or node.run(0, reads) == [(mine,)]
    else:
        node.run(0, sets)
    assert node.pool.stats.pins == pins + 1
    assert not node[0].is_idle()
    for _ in range(2):
        assert node.run(0, reads) == [(mine,)]
        for number in range(1, COUNT):
            assert node.run(number, reads) == [(others,)]
            assert node.run(number, SHARD) == [(number,)]
    session = node.session_of(0)
    node[0].close()
    while session in node.sessions():  # It is closed, not shared.
        pass
    for number in range(COUNT):
        assert node.run(number, reads) == [(others,)]
        assert node.run(number, SHARD) == [(number,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SET search_path TO t_3",
        'SET "search_path" TO t_3',
        "SELECT set_config('search_path', 't_3', false)",
        "SELECT set_config('search' || '_path', 't_3', false) -- search_path",
        "UPDATE pg_settings SET setting = 't_3' WHERE name = 'search_path'",
        "SELECT 1; SET search_path TO t_3",
        "DO $$ BEGIN SET search_path TO t_3; END $$",
    ],
)
def test_a_search_path_of_the_project(node: Node, sql: str) -> None:
    assert classify(sql) is PostgreSQLKind.PATH
    with pytest.raises(SessionStateRefused, match="SET LOCAL"), transaction.atomic(using="t_0"):
        node.run(0, sql)
    assert node.run(0, SHARD) == [(0,)]
    node.run(0, sql)
    for _ in range(2):
        assert node.run(0, SHARD) == [(3,)]
        with transaction.atomic(using="t_0"):
            assert node.run(0, SHARD) == [(3,)]
        for number in range(1, COUNT):
            assert node.run(number, SHARD) == [(number,)]
    node[0].close()
    assert [node.run(number, SHARD) for number in range(COUNT)] == [[(n,)] for n in range(COUNT)]


@pytest.mark.parametrize(
    "sql", ["DISCARD ALL", "RESET ALL", "RESET search_path", "SET search_path TO DEFAULT"]
)
def test_the_default_path_is_that_of_the_schema(node: Node, sql: str) -> None:
    node.run(0, "SET search_path TO t_3")
    node.run(0, sql)
    assert node.run(0, SHARD) == [(0,)]
    node[0].close()
    node.run(0, sql)
    assert node.run(0, SHARD) == [(0,)]


def test_a_path_for_one_transaction(node: Node) -> None:
    pins = node.pool.stats.pins
    with transaction.atomic(using="t_0"):
        node.run(0, "SET LOCAL search_path TO t_3")
        assert node.run(0, SHARD) == [(3,)]
        node.run(0, "SELECT set_config('search_path', 't_2', true)")
        assert node.run(0, SHARD) == [(2,)]
    assert node.run(0, SHARD) == [(0,)]
    assert node.pool.stats.pins == pins


def test_a_pin_is_logged_without_values(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sharded_orm.backends"):
        node.run(0, "SET app.secret = 'xyzzy'")
        node.run(0, "SET app.secret = 'xyzzy'")
    (record,) = (r for r in caplog.records if r.name == "sharded_orm.backends")
    assert "'t_0'" in record.getMessage()
    assert "xyzzy" not in record.getMessage()
    assert node.pool.stats.pin_reasons["SET"] >= 1


def test_plain_statements_pin_nothing(node: Node) -> None:
    pins = node.pool.stats.pins
    node.run(0, "SELECT current_setting('search_path'), 'SET x = 1; COMMIT'")
    node.run(0, "SELECT %s", ["; SET x = 1"])
    node.run(0, "SET LOCAL work_mem = '2MB'")
    node.run(0, "SET CONSTRAINTS ALL IMMEDIATE")
    node.run(0, "DO $$ BEGIN UPDATE item SET value = 'x'; END $$")
    with pytest.raises(ProgrammingError):
        node.run(0, "SELECT * FROM missing")
    assert node.pool.stats.pins == pins
    assert node[0].is_idle()
    assert node.value(0) == "x"


def test_sequences_of_the_session(node: Node) -> None:
    node.run(1, "INSERT INTO item DEFAULT VALUES")
    for sql in ("SELECT lastval()", "SELECT currval('item_id_seq')"):
        with pytest.raises(SessionStateRefused, match=r"'t_0'.*RETURNING"):
            node.run(0, sql)
        # Nothing in this transaction has used a sequence; another alias's value must not come.
        with pytest.raises(SessionStateRefused), transaction.atomic(using="t_0"):
            node.run(0, sql)
        # Nor has this one, although it has written.
        with pytest.raises(SessionStateRefused), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'x'")
            node.run(0, sql)
        with transaction.atomic(using="t_0"):
            node.run(0, "INSERT INTO item DEFAULT VALUES")
            ((last,),) = node.ask("SELECT last_value FROM t_0.item_id_seq")
            assert node.run(0, sql) == [(last,)]
    # A session that the alias keeps has served others, too.
    node.run(1, "INSERT INTO item DEFAULT VALUES")
    node.run(0, "SET work_mem = '2MB'")
    with pytest.raises(SessionStateRefused):
        node.run(0, "SELECT lastval()")
    node.run(0, "INSERT INTO item DEFAULT VALUES")
    ((last,),) = node.ask("SELECT last_value FROM t_0.item_id_seq")
    for _ in range(2):
        assert node.run(0, "SELECT lastval()") == [(last,)]
        with transaction.atomic(using="t_0"):
            assert node.run(0, "SELECT lastval()") == [(last,)]


@pytest.mark.parametrize(
    ("sql", "check"),
    [
        ("VACUUM item", "SELECT count(*) FROM t_1.item"),
        ("VACUUM (ANALYZE) item;", "SELECT count(*) FROM t_1.item"),
        ("CREATE INDEX CONCURRENTLY odd ON item (value)", "SELECT 't_1.odd'::regclass::text"),
        ("REINDEX TABLE CONCURRENTLY item", "SELECT count(*) FROM t_1.item"),
        ("DROP INDEX CONCURRENTLY by_value", "SELECT 1 + count(*) FROM pg_class WHERE oid = to_regclass('t_2.by_value')"),
        ("CLUSTER item USING by_value", "SELECT count(*) FROM t_1.item"),
        ("REINDEX SCHEMA t_1", "SELECT count(*) FROM t_1.item"),
        ("CALL twice()", "SELECT count(*) FROM t_1.item WHERE value = 'twice'"),
        (
            "DO $$ BEGIN UPDATE item SET value = 'a'; COMMIT; UPDATE item SET value = 'b'; END $$",
            "SELECT count(*) FROM t_1.item WHERE value = 'b'",
        ),
        (
            "UPDATE item SET value = 'a'; COMMIT; UPDATE item SET value = 'b'",
            "SELECT count(*) FROM t_1.item WHERE value = 'b'",
        ),
    ],
)  # fmt: skip
def test_statements_outside_of_transactions(node: Node, sql: str, check: str) -> None:
    for number in range(COUNT):
        node.run(
            number,
            "CREATE PROCEDURE twice() LANGUAGE plpgsql AS $$ BEGIN UPDATE item SET value = 'once';"
            " COMMIT; UPDATE item SET value = 'twice'; END $$",
        )
        node.run(number, "CREATE INDEX by_value ON item (value)")
    node.run(1, sql)
    found = node.ask(check)
    assert found in ([(2,)], [("t_1.odd",)])
    if "; COMMIT; UPDATE" not in sql or sql.startswith("DO"):
        # Nothing is left in the session.
        assert node[1].is_idle()
    connections.settings["plain"] = node.settings
    try:
        with connections["plain"].cursor() as cursor:
            cursor.execute("SHOW search_path")
            assert cursor.fetchone() == ('"$user", public',)
    finally:
        connections["plain"].close()
        del connections["plain"], connections.settings["plain"]
    for number in range(COUNT):
        assert node.run(number, SHARD) == [(number,)]
        if number != 1:
            assert node.ask(f"SELECT DISTINCT value FROM t_{number}.item") == [(None,)]


def test_statements_about_the_whole_server(node: Node) -> None:
    databases = "SELECT count(*) FROM pg_database WHERE datname = 't_odd'"
    node.run(1, "CREATE DATABASE t_odd")
    assert node.run(2, databases) == [(1,)]
    node.run(1, "DROP DATABASE t_odd")
    assert node.run(2, databases) == [(0,)]
    node.run(1, "ALTER SYSTEM RESET work_mem")
    for end, value in (("ROLLBACK", None), ("COMMIT", "prepared")):
        with node.connect() as other:
            other.execute(
                "BEGIN; UPDATE t_1.item SET value = 'prepared'; PREPARE TRANSACTION 't_odd'"
            )
        node.run(1, f"{end} PREPARED 't_odd'")
        assert node.value(1) == value
    assert node[1].is_idle()
    for number in range(COUNT):
        assert node.run(number, SHARD) == [(number,)]


def test_an_error_of_such_a_statement_leaves_nothing(node: Node) -> None:
    for sql in ("VACUUM missing", "CREATE UNIQUE INDEX CONCURRENTLY u ON item (shard)"):
        with pytest.raises(Error):
            node.run(1, sql)
        assert node[1].is_idle()
    for session in node.pool._idle:
        assert session.run(b"SHOW search_path") == [('"$user", public',)]


def test_a_text_that_ends_the_transaction_is_refused_in_one(node: Node) -> None:
    for sql in ("SELECT 1; COMMIT; SELECT 2", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN"):
        with pytest.raises(SessionStateRefused), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'x'")
            node.run(0, sql)
        assert node.value(0) is None


def test_transactions_by_hand(node: Node) -> None:
    node.run(0, "BEGIN")
    node.run(0, "UPDATE item SET value = 'x'")
    assert node.run(1, SHARD) == [(1,)]
    node.run(0, "ROLLBACK")
    assert node.value(0) is None
    node.run(0, "START TRANSACTION; UPDATE item SET value = 'y'; COMMIT AND CHAIN")
    assert node.run(0, SHARD) == [(0,)]
    assert node.value(0) == "y"
    node[0].close()
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'z'")
        node.run(0, "COMMIT")
        # As on a connection of Django's own backend, the next statement begins another transaction.
        assert node.run(0, SHARD) == [(0,)]
    assert node.value(0) == "z"


def test_bare_statements_are_refused_by_the_server(node: Node) -> None:
    for sql in ("LOCK TABLE item", "DECLARE c CURSOR FOR SELECT 1"):
        with pytest.raises(Error, match="transaction block"):
            node.run(0, sql)
        assert node[0].is_idle()
    for sql in ("SET TRANSACTION READ ONLY", "PREPARE TRANSACTION 'x'"):
        node.run(0, sql)  # A warning, as with Django's own backend.
        assert node[0].is_idle()
    with transaction.atomic(using="t_0"):
        node.run(0, "LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
        node.run(0, "DECLARE c CURSOR FOR SELECT shard FROM item")
        assert node.run(0, "FETCH ALL FROM c") == [(0,), (0,)]


def test_an_extension_is_created_once_for_the_database(node: Node) -> None:
    node.ask("DROP SCHEMA IF EXISTS extensions CASCADE")
    node.ask("DROP EXTENSION IF EXISTS hstore CASCADE")
    errors: list[BaseException] = []
    ready = threading.Barrier(COUNT)

    def create(number: int) -> None:
        try:
            ready.wait(PATIENCE)
            with transaction.atomic(using=f"t_{number}"):
                node.run(number, "/* x */ CREATE EXTENSION IF NOT EXISTS hstore; -- tags")
                node.run(number, "CREATE TABLE tagged (tags hstore)")
        except BaseException as exc:
            errors.append(exc)
        finally:
            connections[f"t_{number}"].close()

    threads = [threading.Thread(target=create, args=(number,)) for number in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert errors == []
        assert node.ask(
            "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
            " WHERE extname = 'hstore'"
        ) == [("extensions",)]
        with pytest.raises(SessionStateRefused, match="of its own"):
            node.run(0, "CREATE EXTENSION citext; CREATE EXTENSION pg_trgm")
        with pytest.raises(Error, match="already exists"):
            node.run(0, "CREATE EXTENSION hstore")
        assert node[0].is_idle()
    finally:
        node.ask("DROP EXTENSION IF EXISTS hstore CASCADE")


def test_attributes_of_the_drivers_connection(node: Node) -> None:
    node.run(0, "SELECT 1")
    connection: Any = node[0].connection
    pins = node.pool.stats.pins
    assert connection.info.server_version == node[0].pg_version
    assert connection.autocommit is True
    assert connection.isolation_level is None
    assert not connection.closed
    assert not connection.broken
    assert isinstance(connection.adapters, psycopg.adapt.AdaptersMap)
    for name in ("isolation_level", "read_only", "prepare_threshold"):
        with pytest.raises(SessionStateRefused, match=name):
            setattr(connection, name, 1)
    assert node.pool.stats.pins == pins
    assert node[0].is_idle()
    connection.row_factory = psycopg.rows.dict_row
    with connection.cursor() as cursor:
        assert cursor.execute("SELECT 1 AS one").fetchall() == [{"one": 1}]
    del connection.row_factory
    # Any other attribute keeps a session, which stands in the schema.
    with connection.transaction():
        connection.execute("UPDATE item SET value = 'x'")
        assert node.run(0, SHARD) == [(0,)]
    assert node.pool.stats.pins == pins + 1
    assert node.value(0) == "x"
    node.run(0, "LISTEN mine")
    node.ask("NOTIFY mine, 'hello'")
    (message,) = connection.notifies(timeout=PATIENCE, stop_after=1)
    assert message.payload == "hello"
    assert node.run(1, SHARD) == [(1,)]
    assert not hasattr(connection, "no_such_method")
    with pytest.raises(SessionStateRefused), transaction.atomic(using="t_1"):
        node.run(1, SHARD)
        node[1].connection.execute("SELECT 1")


def test_session_opened_reaches_every_session(node: Node) -> None:
    def receiver(session: Any, **kwargs: Any) -> None:
        session.execute("SET work_mem = '3MB'")

    session_opened.connect(receiver)
    try:
        node.pool.dispose()
        assert node.run(1, "SHOW work_mem") == [("3MB",)]
    finally:
        session_opened.disconnect(receiver)
        node.pool.dispose()


def test_connection_created_fires_for_each_alias(node: Node) -> None:
    created: list[str] = []

    def receiver(connection: Any, **kwargs: Any) -> None:
        created.append(connection.alias)

    connection_created.connect(receiver)
    try:
        for number in range(COUNT):
            node.run(number, "SELECT 1")
    finally:
        connection_created.disconnect(receiver)
    assert created == node.aliases
    assert node.pool.size == 1
