"""Statements reach the right schema, in as few packets as possible."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, connections, transaction

from sharded_orm.exceptions import SessionStateRefused, ShardDatabaseMissing
from tests.integration.mysql.conftest import COUNT, Node


def test_each_alias_reads_its_own_schema_on_one_session(packets: list[str], node: Node) -> None:
    for _ in range(3):
        for number in range(COUNT):
            assert node.run(number, "SELECT DISTINCT shard FROM item") == [(number,)]
    assert node.pool.size == 1


def test_a_read_is_one_packet_whatever_the_schema(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    for number in (0, 1, 1, 0):
        node.run(number, "SELECT id FROM item WHERE id = %s", [1])
    query = "SELECT id FROM item WHERE id = 1"
    assert packets == [query, f"USE `t_1`; {query}", query, f"USE `t_0`; {query}"]


def test_a_transaction_with_one_update_is_two_packets(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_1"), transaction.atomic(using="t_1"):
        node.run(1, "UPDATE item SET value = 'x' WHERE id = 1")
    assert len(packets) == 2
    begin, commit = packets
    assert begin.startswith("USE `t_1`; BEGIN; SAVEPOINT `")
    assert begin.endswith("; UPDATE item SET value = 'x' WHERE id = 1")
    assert commit == "COMMIT"
    assert node.value(1) == "x"


def test_autocommit_is_switched_off_where_it_matters(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_0"):
        node.run(0, "SELECT 2")
        node.run(0, "CREATE TABLE made (id INT)")
        node.run(0, "SELECT 3")
    with transaction.atomic(using="t_0"):
        node.run(0, "SELECT 4")
        with pytest.raises(IntegrityError):
            node.run(0, "INSERT INTO item (id) VALUES (1)")
        node.run(0, "SELECT 5")
    assert packets == [
        "BEGIN; SELECT 2",
        "SET autocommit=0; CREATE TABLE made (id INT)",
        "USE `t_0`; SELECT 3",
        "COMMIT; SET autocommit=1",
        "BEGIN; SELECT 4",
        "INSERT INTO item (id) VALUES (1)",
        "USE `t_0`; SET autocommit=0; SELECT 5",
        "COMMIT; SET autocommit=1",
    ]


def test_a_transaction_that_does_nothing_costs_nothing(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_0"), transaction.atomic(using="t_0"):
        pass
    inner = transaction.atomic(using="t_0")
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"), inner:
        raise ZeroDivisionError
    assert packets == []
    assert node[0].is_idle()


def test_nested_blocks_add_one_packet_each(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_0"):
        for number in range(3):
            with transaction.atomic(using="t_0"):
                node.run(0, "INSERT INTO item (value) VALUES (%s)", [number])
    assert len(packets) == 3 + 1
    assert len(node.ask("SELECT 1 FROM t_0.item")) == 5


def test_multi_statements_switched_off(node: Node, packets: list[str]) -> None:
    for alias in ("t_0", "t_1"):
        connections[alias].close()
        connections[alias].settings_dict["OPTIONS"] = {"multi_statements": False}
    for number in (0, 1):
        node.run(number, "SELECT shard FROM item")
        with transaction.atomic(using=f"t_{number}"):
            node.run(number, "UPDATE item SET value = 'x' WHERE id = 1")
        assert node.value(number) == "x"
    assert not any(";" in packet for packet in packets)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_missing_schema(node: Node, in_transaction: bool) -> None:
    node.ask("DROP DATABASE t_1")
    node[1].ensure_connection()  # proves only that the node answers
    if in_transaction:
        with pytest.raises(ShardDatabaseMissing) as caught, transaction.atomic(using="t_1"):
            node.run(1, "SELECT * FROM item")
    else:
        with pytest.raises(ShardDatabaseMissing) as caught:
            node.run(1, "SELECT * FROM item")
    # Programs that read the server's number find it.
    assert isinstance(caught.value, OperationalError)
    assert caught.value.args[0] == 1049
    assert "migrate_shards --create" in str(caught.value)
    assert "migrate --database t_1" in str(caught.value)
    assert node[1].is_idle()
    assert node.run(0, "SELECT DISTINCT shard FROM item") == [(0,)]
    node.ask("CREATE DATABASE t_1")
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]
    # A database that a statement itself names is the statement's fault.
    with pytest.raises(OperationalError, match="1049") as other:
        node.run(1, "USE nowhere")
    assert not isinstance(other.value, ShardDatabaseMissing)


def test_after_an_error_the_schema_is_named_again(packets: list[str], node: Node) -> None:
    for error, sql in [
        (ProgrammingError, "SELECT * FROM missing"),
        (ProgrammingError, "SELEKT"),
        (IntegrityError, "INSERT INTO item (id) VALUES (1)"),
        (IntegrityError, "INSERT INTO item (shard) VALUES (NULL)"),
    ]:
        node.run(0, "SELECT 1")
        with pytest.raises(error):
            node.run(1, sql)
        packets.clear()
        for number in (1, 0):
            assert node.run(number, "SELECT DATABASE()") == [(f"t_{number}",)]
        assert [packet.split(";")[0] for packet in packets] == ["USE `t_1`", "USE `t_0`"]
        assert node[1].is_idle()
    assert node.pool.size == 1


def test_a_converter_that_fails_leaves_the_session_usable(node: Node) -> None:
    # A TIME that Python cannot hold.
    for _ in range(2):
        with pytest.raises(ValueError, match=r"838|hour"):
            node.run(0, "SELECT CAST('838:00:00' AS TIME)")
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        with pytest.raises(ValueError, match=r"838|hour"):
            node.run(0, "SELECT CAST('838:00:00' AS TIME)")
        node.run(0, "UPDATE item SET value = 'y' WHERE id = 2")
    assert (node.value(0, 1), node.value(0, 2)) == ("x", "y")
    assert node.pool.size == 1


def test_wrong_parameters_are_a_programming_error(node: Node) -> None:
    with pytest.raises(ProgrammingError):
        node.run(0, "SELECT %s, %s", [1])
    assert node[0].is_idle()
    assert node.pool.size == 1


def test_dropped_and_created_again(node: Node) -> None:
    for number in (0, 1):
        node.run(number, "SELECT 1")
    node.run(1, "DROP DATABASE t_1")
    with pytest.raises(OperationalError):
        node.run(1, "SELECT * FROM item")
    node.run(0, "CREATE DATABASE t_1")
    node.run(1, "CREATE TABLE item (shard int)")
    node.run(1, "INSERT INTO item VALUES (1)")
    assert node.run(0, "SELECT DISTINCT shard FROM item") == [(0,)]
    assert node.run(1, "SELECT DISTINCT shard FROM item") == [(1,)]


def test_dropped_by_somebody_else_and_created_again(node: Node) -> None:
    node.run(1, "SELECT 1")
    node.ask("DROP DATABASE t_1")
    node.ask("CREATE DATABASE t_1")
    node.ask("CREATE TABLE t_1.item (shard int)")
    node.run(1, "INSERT INTO item VALUES (1)")
    assert node.ask("SELECT shard FROM t_1.item") == [(1,)]


def test_no_schema_is_no_schema(node: Node) -> None:
    node.run(0, "SELECT 1")
    with node[0]._nodb_cursor() as cursor:
        cursor.execute("SELECT DATABASE()")
        assert cursor.fetchone() == (None,)
        with pytest.raises(OperationalError, match="No database selected"):
            cursor.execute("SELECT * FROM item")
    assert node.pool.size == 1


def test_names_are_quoted(node: Node) -> None:
    name = "odd`na;me"
    connections.settings["odd"] = {**node.settings, "NAME": name}
    try:
        connections["odd"].create_shard_database()
        connections["odd"].create_shard_database()
        with connections["odd"].cursor() as cursor:
            cursor.execute("SELECT DATABASE()")
            assert cursor.fetchone() == (name,)
        connections["odd"].drop_shard_database()
        assert (name,) not in node.ask("SHOW DATABASES")
    finally:
        connections["odd"].close()
        del connections["odd"], connections.settings["odd"]


def test_constraints_are_those_of_this_schema(node: Node, packets: list[str]) -> None:
    node.ask("ALTER TABLE t_0.item ADD UNIQUE same_name (value)")
    node.ask("ALTER TABLE t_1.item ADD INDEX same_name (value)")
    unique: list[Any] = []
    for number in (0, 1):
        with node[number].cursor() as cursor:
            constraints = node[number].introspection.get_constraints(cursor, "item")
        unique.append(constraints["same_name"]["unique"])
    assert unique == [True, False]


def test_django_still_asks_for_constraints_as_we_expect(packets: list[str], node: Node) -> None:
    with node[0].cursor() as cursor:
        node[0].introspection.get_constraints(cursor, "item")
    lookups = [packet for packet in packets if "key_column_usage" in packet]
    assert len(lookups) == 1
    assert "c.table_schema = DATABASE()" in lookups[0]


def test_server_data_is_asked_once_per_node(packets: list[str], node: Node) -> None:
    node.pool._server_data = None
    for number in range(COUNT):
        assert node[number].mysql_is_mariadb
        node[number].ensure_connection()
    assert sum("VERSION()" in packet for packet in packets) == 1


def test_node_cursor_spans_schemas_and_leaves_no_trace(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        with node[0].node_cursor() as cursor:
            cursor.execute(
                "SELECT shard, value FROM t_0.item WHERE id = %s"
                " UNION ALL SELECT shard, value FROM t_1.item WHERE id = %s", [1, 1],
            )  # fmt: skip
            # It runs on a session of its own, and does not see the open transaction.
            assert list(cursor.fetchall()) == [(0, None), (1, None)]
            with pytest.raises(SessionStateRefused, match="plain statements only"):
                cursor.execute("USE t_1")
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]
    assert all(node[number].is_idle() for number in range(COUNT))
