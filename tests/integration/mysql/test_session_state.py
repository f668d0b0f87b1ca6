"""Session state that a statement sets is kept for its alias and never seen by another."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import (
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created

from sharded_orm.backends.signals import session_opened
from sharded_orm.exceptions import SessionStateRefused
from tests.integration.mysql.conftest import COUNT, Node

# A statement that sets state; one that reads it; the values that the owner and another alias see.
STATE: dict[str, tuple[str, str, Any, Any]] = {
    "sql_mode": ("SET sql_mode = 'ANSI'", "SELECT @@sql_mode LIKE '%%ANSI%%'", 1, 0),
    "variable": ("SET @mine = 7", "SELECT @mine", 7, None),
    "variable in a select": ("SELECT @mine := 7", "SELECT @mine", 7, None),
    "isolation": (
        "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "SELECT @@tx_isolation", "SERIALIZABLE", "READ-COMMITTED",
    ),
    "temporary table": (
        "CREATE TEMPORARY TABLE item (shard INT DEFAULT 99)",
        "SELECT COUNT(*) FROM item", 0, 2,
    ),
    "lock": ("SELECT GET_LOCK('a_lock', 0)", "SELECT IS_USED_LOCK('a_lock') <=> CONNECTION_ID()",
             1, 0),
    "locked tables": ("LOCK TABLES item READ", "SELECT COUNT(*) FROM item", 2, 2),
    "use": ("USE t_3", "SELECT DATABASE()", "t_3", None),
    "hidden use": ("SELECT 1; USE t_3", "SELECT DATABASE()", "t_3", None),
    "commented use": ("/* x */ USE t_3", "SELECT DATABASE()", "t_3", None),
    "time zone": ("SET time_zone = '+05:00'", "SELECT @@time_zone", "+05:00", "SYSTEM"),
    "prepared": ("PREPARE mine FROM 'SELECT 5'", "EXECUTE mine", 5, ...),
    "begin": ("START TRANSACTION", "SELECT @@in_transaction", 1, 0),
    "autocommit": ("SET autocommit = 0", "SELECT @@autocommit", 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("in_transaction", [False, True])
def test_state_is_kept_and_does_not_leak(node: Node, name: str, in_transaction: bool) -> None:
    sets, reads, mine, others = STATE[name]
    if in_transaction and name == "autocommit":
        pytest.skip("the same in a transaction")
    pins = node.pool.stats.pins
    if in_transaction:
        with transaction.atomic(using="t_0"):
            node.run(0, sets)
            assert node.run(0, reads) == [(mine,)] or name == "isolation"
    else:
        node.run(0, sets)
    assert node.pool.stats.pins == pins + 1
    assert not node[0].is_idle()
    for _ in range(2):
        if name != "begin" or not in_transaction:
            assert node.run(0, reads) == [(mine,)]
        for number in range(1, COUNT):
            if others is not ...:
                expected = f"t_{number}" if "USE" in sets else others
                assert node.run(number, reads) == [(expected,)]
    node[0].close()
    for number in range(COUNT):
        if others is not ...:
            expected = f"t_{number}" if "USE" in sets else others
            assert node.run(number, reads) == [(expected,)]
    assert node.run(0, "SELECT DISTINCT shard FROM item") == [(0,)]


def test_a_pin_is_logged_without_values(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sharded_orm.backends"):
        node.run(0, "SET @secret = 'xyzzy'")
        node.run(0, "SET @secret = 'xyzzy'")
    (record,) = (r for r in caplog.records if r.name == "sharded_orm.backends")
    assert "'t_0'" in record.getMessage()
    assert "xyzzy" not in record.getMessage()


def test_reading_system_variables_pins_nothing(node: Node) -> None:
    pins = node.pool.stats.pins
    node.run(0, "SELECT @@sql_mode, 'user@example.com', CONNECTION_ID()")
    node.run(0, "SELECT %s", ["@mine := 1; USE t_3"])
    assert node.pool.stats.pins == pins
    assert node[0].is_idle()


def test_a_statement_that_is_no_sql_pins_nothing(node: Node) -> None:
    pins = node.pool.stats.pins
    with pytest.raises(ProgrammingError, match="1064"):
        node.run(0, "SELEKT 1")
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        with pytest.raises(ProgrammingError, match="1064"):
            node.run(0, "SELEKT 1")
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 2")
    assert node.pool.stats.pins == pins
    assert node[0].is_idle()
    assert (node.value(0, 1), node.value(0, 2)) == ("x", "x")


def test_last_insert_id_is_that_of_this_alias(node: Node) -> None:
    node.run(0, "INSERT INTO item (id) VALUES (NULL)")
    assert node.run(0, "SELECT LAST_INSERT_ID()") == [(3,)]
    node.run(0, "INSERT INTO item (id, value) VALUES (NULL, LAST_INSERT_ID())")
    assert node.value(0, 4) == "3"
    # Statements on other aliases that insert nothing do not disturb it.
    node.run(1, "SELECT 1")
    assert node.run(0, "SELECT LAST_INSERT_ID()") == [(4,)]
    node.run(1, "INSERT INTO item (id) VALUES (NULL)")
    with pytest.raises(SessionStateRefused, match=r"'t_0'.*atomic\(\)"):
        node.run(0, "SELECT LAST_INSERT_ID()")
    with transaction.atomic(using="t_0"):
        node.run(0, "INSERT INTO item (id) VALUES (NULL)")
        node.run(1, "INSERT INTO item (id) VALUES (NULL)")
        assert node.run(0, "SELECT LAST_INSERT_ID()") == [(5,)]


def test_last_insert_id_of_an_alias_that_did_nothing(node: Node) -> None:
    node.run(1, "INSERT INTO item (id) VALUES (NULL)")
    assert node.run(0, "SELECT LAST_INSERT_ID()") == [(0,)]
    node.run(1, "INSERT INTO item (id) VALUES (NULL)")
    with transaction.atomic(using="t_0"):
        assert node.run(0, "SELECT LAST_INSERT_ID()") == [(0,)]
    node.run(1, "INSERT INTO item (id) VALUES (NULL)")
    node.run(0, "SET @mine = 1")
    assert node.run(0, "SELECT LAST_INSERT_ID()") == [(0,)]


def test_warnings_and_row_count(node: Node) -> None:
    node.run(0, "UPDATE item SET value = 'x'")
    assert node.run(0, "SELECT ROW_COUNT()") == [(2,)]
    node.run(1, "UPDATE item SET value = 'x' WHERE id = 1")
    with pytest.raises(SessionStateRefused):
        node.run(0, "SELECT ROW_COUNT()")
    node.run(0, "DROP TABLE IF EXISTS missing")
    assert [row[1] for row in node.run(0, "SHOW WARNINGS")] == [1051]
    with node[0].cursor() as cursor:
        cursor.execute("SELECT SQL_CALC_FOUND_ROWS id FROM item LIMIT 1")
        cursor.execute("SELECT FOUND_ROWS()")
        assert cursor.fetchone() == (2,)


def make_child(node: Node) -> None:
    node.ask("CREATE TABLE t_0.child (item INT, FOREIGN KEY (item) REFERENCES t_0.item (id))")


def test_constraint_checks_are_off_for_the_region_and_the_alias_only(node: Node) -> None:
    make_child(node)
    pins = node.pool.stats.pins
    with node[0].constraint_checks_disabled():
        node.run(0, "INSERT INTO child VALUES (99)")
        assert not node[0].is_idle()
        assert node.run(1, "SELECT @@foreign_key_checks") == [(1,)]
        with transaction.atomic(using="t_0"):
            node.run(0, "INSERT INTO child VALUES (98)")
        assert node.run(0, "SELECT @@foreign_key_checks, @@autocommit") == [(0, 1)]
    assert node[0].is_idle()
    assert node.pool.stats.pins == pins
    with pytest.raises(IntegrityError):
        node.run(0, "INSERT INTO child VALUES (97)")


def test_constraint_checks_inside_a_transaction(node: Node) -> None:
    make_child(node)
    with transaction.atomic(using="t_0"):
        with node[0].constraint_checks_disabled():
            node.run(0, "INSERT INTO child VALUES (99)")
        with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
            node.run(0, "INSERT INTO child VALUES (97)")
        assert node[0].disable_constraint_checking()
    # Still off: held beyond the transaction, and closed rather than shared.
    assert not node[0].is_idle()
    node[0].close()
    assert node.run(1, "SELECT @@foreign_key_checks") == [(1,)]


def test_a_region_whose_session_is_killed_ends_cleanly(node: Node) -> None:
    make_child(node)
    with node[0].constraint_checks_disabled():
        node.kill(node.session_of(0))
        for _ in range(2):
            with pytest.raises(OperationalError):
                node.run(0, "INSERT INTO child VALUES (99)")
    assert node.run(0, "SELECT @@foreign_key_checks, DATABASE()") == [(1, "t_0")]


def test_procedures_and_out_parameters(node: Node) -> None:
    with node[0].cursor() as cursor:
        cursor.execute("CREATE PROCEDURE double_it (INOUT number INT) SET number = number * 2")
        cursor.callproc("double_it", [21])
        cursor.execute("SELECT @_double_it_0")
        assert cursor.fetchone() == (42,)
    with pytest.raises(OperationalError):
        node.run(1, "CALL double_it(@x)")
    assert node.run(2, "SELECT @_double_it_0") == [(None,)]


def test_methods_of_the_drivers_connection(node: Node) -> None:
    node.run(0, "SELECT 1")
    connection = node[0].connection
    pins = node.pool.stats.pins
    assert connection.get_server_info().startswith(node[0].mysql_server_info[:4])
    assert connection.escape("a'b", connection.encoders) == b"'a\\'b'"
    assert connection.thread_id() == node.session_of(0)
    assert connection.get_autocommit() is True
    connection.ping()
    assert node.pool.stats.pins == pins
    assert node[0].is_idle()
    # Any unknown call pins the session to its alias.
    connection.select_db("t_3")
    assert node.pool.stats.pins == pins + 1
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]
    assert node.run(0, "SELECT DATABASE()") == [("t_3",)]
    assert not hasattr(connection, "no_such_method")


def test_session_opened_reaches_every_session(node: Node) -> None:
    def receiver(session: Any, **kwargs: Any) -> None:
        session.query("SET lc_time_names = 'de_DE'")

    session_opened.connect(receiver)
    try:
        node.pool.dispose()
        assert node.run(1, "SELECT @@lc_time_names") == [("de_DE",)]
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


def test_pinned_connections_are_closed_with_their_alias(node: Node) -> None:
    node.run(0, "SET @mine = 1")
    session = node.session_of(0)
    connections["t_0"].close()
    while session in node.sessions():
        pass
    assert node[0].is_idle()
