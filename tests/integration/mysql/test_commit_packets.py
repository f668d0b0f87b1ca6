"""The last statements of a transaction are sent with its COMMIT, in one packet."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, transaction

from sharded_orm.backends.write_hooks.commit import CommitOutcome
from sharded_orm.exceptions import ShardDatabaseMissing
from tests.integration.mysql.conftest import Node

INSERT = "INSERT INTO item (value) VALUES ('with the commit')"


def insert(node: Node, number: int, *statements: str) -> Any:
    """Run statements that may be sent with the COMMIT. Return the cursor of the last one."""
    with node[number].sent_with_commit(), node[number].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return cursor.cursor


def count(node: Node, number: int) -> int:
    rows = node.ask(f"SELECT COUNT(*) FROM {node.aliases[number]}.item")
    return int(rows[0][0])


def test_one_packet_has_the_whole_transaction(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_1"):
        cursor = insert(node, 1, "UPDATE item SET value = 'x' WHERE id = 1", INSERT)
        assert (cursor.lastrowid, cursor.rowcount) == (0, 0)
    assert packets == [
        f"USE `t_1`; BEGIN; UPDATE item SET value = 'x' WHERE id = 1; {INSERT}; COMMIT"
    ]
    assert cursor.lastrowid == 3
    assert node.ask("SELECT id, value FROM t_1.item ORDER BY id") == [
        (1, "x"), (2, None), (3, "with the commit"),
    ]  # fmt: skip
    assert node[1].is_idle() and node.pool.size == 1
    node.run(1, "SELECT 1")
    assert packets[-1] == "SELECT 1"  # The schema of the session is known.
    assert node.run(1, "SELECT LAST_INSERT_ID()") == [(3,)]


def test_what_was_sent_before_is_committed_with_it(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        insert(node, 0, INSERT)
    assert packets[1:] == [f"{INSERT}; COMMIT"]
    with transaction.atomic(using="t_0"):
        node.run(0, "CREATE TABLE made (id INT)")
        insert(node, 0, INSERT)
    assert packets[-1] == f"USE `t_0`; {INSERT}; COMMIT; SET autocommit=1"
    assert count(node, 0) == 4


def test_a_refused_statement_is_an_error_of_the_commit(node: Node) -> None:
    reached = False
    with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        insert(node, 0, INSERT, "INSERT INTO item (id) VALUES (1)", INSERT)
        reached = True
    assert reached
    # As the second cursor raises: NULL in a column that cannot have it.
    with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
        insert(node, 0, INSERT, "UPDATE item SET id = NULL WHERE id = 1")
    with pytest.raises(ShardDatabaseMissing), transaction.atomic(using="t_1"):
        node.ask("DROP DATABASE t_1")
        insert(node, 1, INSERT)
    assert (count(node, 0), node.value(0)) == (2, None)
    with transaction.atomic(using="t_0"):
        insert(node, 0, INSERT)
    assert count(node, 0) == 3


def test_a_rollback_drops_them(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
        insert(node, 0, INSERT)
        raise ZeroDivisionError
    assert packets == []
    assert node[0].is_idle()


def test_a_later_statement_is_executed_after_them(packets: list[str], node: Node) -> None:
    node.run(0, "SELECT 1")
    packets.clear()
    with transaction.atomic(using="t_0"):
        insert(node, 0, INSERT)
        assert node.run(0, "SELECT COUNT(*) FROM item") == [(3,)]
    assert packets == [f"BEGIN; {INSERT}", "SELECT COUNT(*) FROM item", "COMMIT"]


@pytest.mark.parametrize("what", ["savepoint", "autocommit", "statements", "pinned"])
def test_where_no_commit_follows_they_are_sent_at_once(
    packets: list[str], node: Node, what: str
) -> None:
    connection = node[0]
    if what == "statements":
        connection.settings_dict["OPTIONS"] = {"multi_statements": False}
    node.run(0, "SELECT 1")
    packets.clear()
    if what == "savepoint":
        with transaction.atomic(using="t_0"), transaction.atomic(using="t_0"):
            assert insert(node, 0, INSERT).lastrowid == 3
        assert packets[0].endswith(INSERT)
        return
    if what == "autocommit":
        connection.set_autocommit(False)
        with transaction.atomic(using="t_0"):
            assert insert(node, 0, INSERT).lastrowid == 3
        connection.rollback()
        connection.set_autocommit(True)
        assert count(node, 0) == 2
        return
    if what == "pinned":
        node.run(0, "SET @x = 1")
    with transaction.atomic(using="t_0"):
        assert insert(node, 0, INSERT).lastrowid == 3
    assert count(node, 0) == 3


def test_a_session_that_is_lost_leaves_the_outcome_unknown(node: Node) -> None:
    outcomes = []
    session = node.session_of(0)
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        insert(node, 0, INSERT)
        node.kill(session)
        rollback = node[0]._rollback

        def note_outcome() -> None:
            outcomes.append(node[0].commit_outcome())
            rollback()

        node[0]._rollback = note_outcome  # type: ignore[method-assign]
    del node[0]._rollback
    assert outcomes == [CommitOutcome.UNKNOWN]
    assert count(node, 0) == 2
    with transaction.atomic(using="t_0"):
        insert(node, 0, INSERT)
    assert count(node, 0) == 3


def test_a_statement_that_returns_rows_is_executed_at_once(node: Node) -> None:
    with transaction.atomic(using="t_0"), node[0].sent_with_commit():
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        assert node.run(0, "SELECT value FROM item WHERE id = 1 FOR UPDATE") == [("x",)]
        assert node.run(0, "INSERT INTO item (id) VALUES (7) RETURNING id") == [(7,)]
    assert (count(node, 0), node.value(0)) == (3, "x")


def test_autocommit_that_is_switched_on_sends_them(node: Node) -> None:
    node[0].set_autocommit(False)
    insert(node, 0, INSERT)
    node[0].set_autocommit(True)
    assert count(node, 0) == 3
    assert node[0].is_idle()


def test_an_error_is_not_its_own_cause(node: Node) -> None:
    with pytest.raises(OperationalError) as raised, transaction.atomic(using="t_0"):
        insert(node, 0, "INSERT INTO item (other) VALUES (1)")
    causes: list[BaseException | None] = [raised.value]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__)
        assert causes.count(causes[-1]) == 1
