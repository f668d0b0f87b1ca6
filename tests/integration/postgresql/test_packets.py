"""Statements reach the right schema, in as few packets as possible."""

from __future__ import annotations

import pytest
from django.contrib.postgres import signals
from django.db import IntegrityError, connections, transaction
from django.db.backends.signals import connection_created

from tests.integration.postgresql.conftest import COUNT, Node
from tests.integration.postgresql.recorder import PacketRecorder

INSERT = "INSERT INTO item (value) VALUES (%s)"


def path(number: int) -> str:
    """Return what is sent before a statement, so that it finds the tables of a schema."""
    return (
        f"SELECT pg_catalog.set_config('search_path', '\"t_{number}\", \"extensions\"', true),"
        f" 1 / pg_catalog.has_schema_privilege('t_{number}', 'USAGE')::int;\n"
    )


@pytest.fixture
def packets(recorder: PacketRecorder, recorded_node: Node) -> list[str]:
    """What is sent from now on, an entry for each wait. There is a session already."""
    for number in range(COUNT):
        recorded_node.run(number, "SELECT 1")
    recorder.packets.clear()
    return recorder.packets


def test_opening_a_session_asks_once(recorder: PacketRecorder, recorded_node: Node) -> None:
    opened = recorder.opened
    recorder.packets.clear()
    recorded_node.run(0, "SELECT 1")
    assert len([packet for packet in recorder.packets if "pg_backend_pid" in packet]) <= 1
    assert len(recorder.packets) <= 3
    assert recorder.packets[-1] == f"{path(0)}SELECT 1"
    # For the sessions after the first, only the time zone is left to be set.
    recorder.packets.clear()
    session = recorded_node.pool.lease_new()
    recorded_node.pool.discard(session)
    assert len(recorder.packets) <= 1
    assert not any("pg_backend_pid" in packet for packet in recorder.packets)
    assert recorder.opened == opened + 2


def test_each_alias_reads_its_own_schema_on_one_session(
    packets: list[str], recorded_node: Node
) -> None:
    for _ in range(3):
        for number in range(COUNT):
            assert recorded_node.run(number, "SELECT DISTINCT shard FROM item") == [(number,)]
    assert (
        packets == [f"{path(number)}SELECT DISTINCT shard FROM item" for number in range(COUNT)] * 3
    )
    assert recorded_node.pool.size == 1


def test_a_transaction_with_one_update_is_two_packets(
    packets: list[str], recorded_node: Node
) -> None:
    with transaction.atomic(using="t_1"), transaction.atomic(using="t_1"):
        recorded_node.run(1, "UPDATE item SET value = 'x' WHERE id = 1")
    begin, commit = packets
    assert begin.startswith(f'BEGIN;\n{path(1)}SAVEPOINT "s')
    assert begin.endswith(";\nUPDATE item SET value = 'x' WHERE id = 1")
    assert commit == "COMMIT"
    assert recorded_node.value(1) == "x"


def test_later_statements_of_a_transaction_have_no_prefix(
    packets: list[str], recorded_node: Node
) -> None:
    with transaction.atomic(using="t_2"):
        for _ in range(2):
            assert recorded_node.run(2, "SELECT DISTINCT shard FROM item") == [(2,)]
        # Aliases in between have sessions of their own.
        assert recorded_node.run(3, "SELECT DISTINCT shard FROM item") == [(3,)]
        assert recorded_node.run(2, "SELECT 5") == [(5,)]
    sql = "SELECT DISTINCT shard FROM item"
    assert [packet for packet in packets if "TIME ZONE" not in packet] == [
        f"BEGIN;\n{path(2)}{sql}", sql, f"{path(3)}{sql}", "SELECT 5", "COMMIT",
    ]  # fmt: skip


def test_a_transaction_that_does_nothing_costs_nothing(
    packets: list[str], recorded_node: Node
) -> None:
    with transaction.atomic(using="t_0"), transaction.atomic(using="t_0"):
        pass
    inner = transaction.atomic(using="t_0")
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"), inner:
        raise ZeroDivisionError
    assert packets == []
    assert recorded_node[0].is_idle()


def test_nested_blocks_add_two_packets_each(packets: list[str], recorded_node: Node) -> None:
    """The savepoint of the first one goes with BEGIN. RELEASE goes with the next statement."""
    with transaction.atomic(using="t_0"):
        for number in range(3):
            with transaction.atomic(using="t_0"):
                recorded_node.run(0, INSERT, [number])
    assert len(packets) == 1 + 2 * 2 + 1
    assert recorded_node.ask("SELECT count(*) FROM t_0.item") == [(5,)]


def test_a_rollback_to_a_savepoint_is_sent_if_the_server_has_the_savepoint(
    packets: list[str], recorded_node: Node
) -> None:
    with transaction.atomic(using="t_0"):
        recorded_node.run(0, INSERT, ["kept"])
        with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
            recorded_node.run(0, "INSERT INTO item (id) VALUES (1)")
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
            raise ZeroDivisionError
        recorded_node.run(0, INSERT, ["also"])
    words = [packet.split(";\n")[-1].split('"')[0].strip() for packet in packets]
    assert words == [
        "INSERT INTO item (value) VALUES ('kept')", "SAVEPOINT",
        "INSERT INTO item (id) VALUES (1)", "ROLLBACK TO SAVEPOINT", "SAVEPOINT",
        "ROLLBACK TO SAVEPOINT", "INSERT INTO item (value) VALUES ('also')", "COMMIT",
    ]  # fmt: skip
    rows = recorded_node.ask("SELECT value FROM t_0.item WHERE value IS NOT NULL ORDER BY 1")
    assert rows == [("also",), ("kept",)]


def test_an_error_in_the_first_statement_of_a_block(
    packets: list[str], recorded_node: Node
) -> None:
    """BEGIN and SAVEPOINT have been executed then, and the block alone is rolled back."""
    with transaction.atomic(using="t_0"):
        with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
            recorded_node.run(0, "INSERT INTO item (id) VALUES (1)")
        recorded_node.run(0, INSERT, ["kept"])
    assert len(packets) == 4
    assert recorded_node.ask("SELECT count(*) FROM t_0.item WHERE value = 'kept'") == [(1,)]


def test_set_transaction_comes_before_any_query(packets: list[str], recorded_node: Node) -> None:
    with transaction.atomic(using="t_0"):
        recorded_node.run(0, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        recorded_node.run(0, "SET TRANSACTION READ WRITE")
        assert recorded_node.run(0, "SHOW transaction_isolation") == [("serializable",)]
        assert recorded_node.run(0, "SELECT DISTINCT shard FROM item") == [(0,)]
    assert packets == [
        'BEGIN;\nSET LOCAL search_path TO "t_0", "extensions";\n'
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SET TRANSACTION READ WRITE",
        f"{path(0)}SHOW transaction_isolation",
        "SELECT DISTINCT shard FROM item",
        "COMMIT",
    ]


def test_isolation_level_of_the_settings(recorder: PacketRecorder, recorded_node: Node) -> None:
    from psycopg import IsolationLevel

    connections["t_0"].settings_dict["OPTIONS"] = {
        "isolation_level": IsolationLevel.REPEATABLE_READ
    }
    with transaction.atomic(using="t_0"):
        assert recorded_node.run(0, "SHOW transaction_isolation") == [("repeatable read",)]
    assert recorder.packets[-2].startswith("BEGIN ISOLATION LEVEL REPEATABLE READ;\n")


def test_executemany_copy_and_chunks(packets: list[str], recorded_node: Node) -> None:
    with recorded_node[0].cursor() as cursor:
        cursor.executemany(INSERT, [["a"], ["b"]])
    assert packets[0] == f"BEGIN;\n{path(0).removesuffix(';' + chr(10))}"
    assert packets[-1] == "COMMIT"
    assert len(packets) == 3
    packets.clear()
    with recorded_node[0].cursor() as cursor, cursor.copy("COPY item (value) FROM STDIN") as copy:
        copy.write_row(["c"])
    assert [packet.split()[0] for packet in packets] == ["BEGIN;", "COPY", "copy", "COMMIT"]
    packets.clear()
    with recorded_node[0].chunked_cursor() as cursor:
        cursor.execute("SELECT value FROM item ORDER BY id")
        assert cursor.fetchmany(2) == [(None,), (None,)]
        assert [row for (row,) in cursor.fetchall()] == ["a", "b", "c"]
    assert packets[0].startswith(f"{path(0)}DECLARE")
    assert packets[-1].startswith("CLOSE")
    assert len(packets) == 5  # With a description and two fetches.
    assert recorded_node[0].is_idle()


def test_an_ordinary_alias_has_no_prefix(packets: list[str], recorded_node: Node) -> None:
    connections.settings["plain"] = recorded_node.settings
    try:
        with connections["plain"].cursor() as cursor:
            cursor.execute("SHOW search_path")
            assert cursor.fetchone() == ('"$user", public',)
        assert packets == ["SHOW search_path"]
        with transaction.atomic(using="plain"), connections["plain"].cursor() as cursor:
            cursor.execute("SELECT 1")
        assert packets[1:] == ["BEGIN;\nSELECT 1", "COMMIT"]
    finally:
        connections["plain"].close()
        del connections["plain"], connections.settings["plain"]


def test_types_of_extensions_are_looked_up_once_for_a_database(
    recorder: PacketRecorder, recorded_node: Node
) -> None:
    """As the app django.contrib.postgres does it for each alias that connects."""
    lookups = (signals.get_hstore_oids, signals.get_citext_oids)

    def connect() -> int:
        for lookup in lookups:
            lookup.cache_clear()
        recorder.packets.clear()
        for number in range(COUNT):
            recorded_node[number].close()
            recorded_node.run(number, "SELECT 1")
        return sum("pg_type" in packet for packet in recorder.packets)

    recorded_node.ask("DROP EXTENSION IF EXISTS hstore CASCADE")
    connection_created.connect(signals.register_type_handlers)
    try:
        assert connect() == 2
        assert connect() == 0
        recorded_node.run(0, "CREATE EXTENSION hstore")
        assert connect() == 2
        assert recorded_node.run(COUNT - 1, "SELECT 'a=>1'::extensions.hstore") == [({"a": "1"},)]
    finally:
        connection_created.disconnect(signals.register_type_handlers)
        for lookup in lookups:
            lookup.cache_clear()
        recorded_node.ask("DROP EXTENSION IF EXISTS hstore CASCADE")
