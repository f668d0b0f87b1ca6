"""A schema is locked on the session that runs its statements, and is free when that ends."""

from __future__ import annotations

import pytest
from django.db import OperationalError, transaction

from tests.integration.mysql.conftest import Node
from tests.integration.mysql.test_session_state import STATE

UPDATE = "UPDATE item SET value = %s WHERE id = %s"


def holder(node: Node, number: int = 0) -> int | None:
    """Return the server's id of the session that has the lock."""
    found: int | None = node.ask(f"SELECT IS_USED_LOCK('sharded_orm:t_{number}')")[0][0]
    return found


def test_statements_run_where_the_lock_is(node: Node) -> None:
    assert node[0].lock_schema(0)
    locked = holder(node)
    assert locked is not None
    assert node.session_of(0) == locked
    node.run(0, "ALTER TABLE item ADD COLUMN more INT")
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["x", 1])
    with node[0].cursor() as cursor:
        cursor.executemany(UPDATE, [("y", 1), ("y", 2)])
    node[0].schema_snapshot()
    assert node.session_of(0) == locked == holder(node)
    assert node.session_of(1) != locked


def test_the_session_is_shared_again_when_the_lock_is_given_back(node: Node) -> None:
    assert node[0].lock_schema(0)
    locked = holder(node)
    node[0].unlock_schema()
    assert holder(node) is None
    assert node[0].is_idle()
    node[0].close()
    assert node[1].lock_schema(0)
    assert holder(node, 1) == locked
    node[1].unlock_schema()
    node[1].unlock_schema()
    assert node.run(0, "SELECT DATABASE()") == [("t_0",)]


@pytest.mark.parametrize("name", STATE)
def test_what_a_statement_left_is_not_shared(node: Node, name: str) -> None:
    sets, reads, _, others = STATE[name]
    assert node[0].lock_schema(0)
    locked = holder(node)
    node.run(0, sets)
    node[0].unlock_schema()
    assert holder(node) is None
    node[0].close()
    assert node.session_of(1) != locked
    if others is not ...:
        assert node.run(1, reads.replace("t_3", "t_1")) in ([(others,)], [("t_1",)])


def test_who_closes_gives_the_lock_back_and_the_session_up(node: Node) -> None:
    assert node[0].lock_schema(0)
    locked = holder(node)
    node[0].close()
    assert node.session_of(0) != locked
    assert node.ask("SELECT GET_LOCK('sharded_orm:t_0', 60)") == [(1,)]
    node.ask("DO RELEASE_LOCK('sharded_orm:t_0')")


def test_it_is_not_taken_twice(node: Node) -> None:
    assert node[0].lock_schema(0)
    other = node[0].copy()
    assert not other.lock_schema(0)
    node[0].unlock_schema()
    node[0].close()
    assert other.lock_schema(60)
    other.close()


def test_a_cache_that_gives_the_session_up_does_not_take_the_lock(node: Node) -> None:
    assert node[0].lock_schema(0)
    locked = holder(node)
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["x", 1])
        node[0].hold_session()
    node[0].discard_session()
    assert node.session_of(0) == locked == holder(node)


@pytest.mark.parametrize("within", ["nothing", "transaction", "checks"])
def test_nothing_runs_without_the_lock_that_was_lost(node: Node, within: str) -> None:
    """The connection that held the lock raises an error, or uses another session."""
    assert node[0].lock_schema(0)
    locked, connection = holder(node), node[0].connection
    assert locked is not None
    with pytest.raises(OperationalError):
        if within == "transaction":
            with transaction.atomic(using="t_0"):
                node.run(0, UPDATE, ["x", 1])
                node.kill(locked)
                node.run(0, UPDATE, ["x", 1])
        elif within == "checks":
            with node[0].constraint_checks_disabled():
                node.kill(locked)
        else:
            node.kill(locked)
            node.run(0, UPDATE, ["x", 1])
    if node[0].connection is connection:
        with pytest.raises(OperationalError):
            node.run(0, UPDATE, ["x", 1])
    assert node.value(0) is None
    node[0].close()
    node.run(0, UPDATE, ["y", 1])
    assert node.value(0) == "y"


def test_a_schema_is_looked_at_where_a_statement_has_changed_it(node: Node) -> None:
    node.run(0, "SET @mine = 1")
    node[0].schema_snapshot()
    node.run(0, "USE t_1")
    node.run(0, "CREATE TABLE guest (id INT)")
    assert "guest" not in node[0].schema_snapshot().definitions
    assert "guest" in node[1].schema_snapshot().definitions
