"""Transactions of several aliases, each on a session of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import MySQLdb
import pytest
from django.db import (
    Error,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)

from tests.conftest import service_missing
from tests.integration.mysql.conftest import Node
from tests.patience import PATIENCE
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer

UPDATE = "UPDATE item SET value = %s WHERE id = %s"


def test_two_shards_of_a_node_in_two_transactions(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["kept", 1])
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_1"):
            node.run(1, UPDATE, ["gone", 1])
            assert node.session_of(0) != node.session_of(1)
            assert (node.value(0), node.value(1)) == (None, None)
            raise ZeroDivisionError
        assert node.run(0, "SELECT value FROM item WHERE id = 1") == [("kept",)]
        # A third alias, in autocommit, shares neither.
        node.run(2, UPDATE, ["at once", 1])
        assert node.value(2) == "at once"
    assert (node.value(0), node.value(1)) == ("kept", None)
    assert node.pool.size == node.pool.idle == 2


def test_an_inner_block_rolls_back_alone(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["outer", 1])
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
            node.run(0, UPDATE, ["inner", 1])
            with transaction.atomic(using="t_0"):
                node.run(0, UPDATE, ["inner", 2])
            raise ZeroDivisionError
    assert (node.value(0, 1), node.value(0, 2)) == ("outer", None)


def test_on_commit_and_durable(node: Node) -> None:
    ran: list[str] = []
    with transaction.atomic(using="t_0", durable=True):
        transaction.on_commit(lambda: ran.append("outer"), using="t_0")
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
            transaction.on_commit(lambda: ran.append("inner"), using="t_0")
            raise ZeroDivisionError
        with pytest.raises(RuntimeError), transaction.atomic(using="t_0", durable=True):
            pass
        with transaction.atomic(using="t_1", durable=True):
            node.run(1, UPDATE, ["x", 1])
        assert ran == []
    assert ran == ["outer"]


def test_what_follows_an_implicit_commit_is_in_a_transaction_again(node: Node) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["committed", 1])
        node.run(0, "CREATE TABLE made (id INT)")
        node.run(0, UPDATE, ["rolled back", 2])
        raise ZeroDivisionError
    assert (node.value(0, 1), node.value(0, 2)) == ("committed", None)
    assert node.run(0, "SELECT @@autocommit") == [(1,)]


@contextmanager
def deadlock(node: Node) -> Iterator[None]:
    """Make the statement ``DEADLOCK`` on alias 0 the victim of a deadlock in the block.

    Enter it with row 1 locked by a transaction that has done little.
    """
    ready = threading.Event()

    def other() -> None:
        # The heavier transaction survives.
        with transaction.atomic(using="t_0"), connections["t_0"].cursor() as cursor:
            cursor.execute("UPDATE item SET value = 'other' WHERE id > 2")
            cursor.execute("SELECT * FROM item WHERE id = 2 FOR UPDATE")
            ready.set()
            cursor.execute("SELECT * FROM item WHERE id = 1 FOR UPDATE")
        connections["t_0"].close()

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(PATIENCE)
    # Until the other transaction waits for us, our statement would only wait.
    while node.ask("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1] == "0":
        pass
    yield
    thread.join()


DEADLOCK = "SELECT * FROM item WHERE id = 2 FOR UPDATE"


@pytest.fixture
def many_rows(node: Node) -> None:
    values = ", ".join(["('row')"] * 30)
    node.ask(f"INSERT INTO t_0.item (value) VALUES {values}")


@pytest.mark.usefixtures("many_rows")
def test_after_a_deadlock_the_rest_of_the_block_is_still_in_a_transaction(node: Node) -> None:
    # The server rolled the transaction back. If the program catches the error, its later statements
    # must not be committed one by one.
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        with deadlock(node), pytest.raises(OperationalError) as caught:
            node.run(0, DEADLOCK)
        assert caught.value.args[0] == 1213
        node.run(0, "INSERT INTO item (value) VALUES ('after the deadlock')")
        raise ZeroDivisionError
    assert node.ask("SELECT * FROM t_0.item WHERE value LIKE 'after%'") == []
    assert node.value(0) is None
    assert node.run(0, "SELECT @@autocommit") == [(1,)]


@pytest.mark.usefixtures("many_rows")
def test_a_savepoint_that_a_deadlock_removed_is_missed(node: Node) -> None:
    # Django's own backend raises here; committing half of the block would be worse.
    with pytest.raises(OperationalError) as caught, transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        with transaction.atomic(using="t_0"):
            node.run(0, "SELECT 1")
            with deadlock(node), pytest.raises(OperationalError):
                node.run(0, DEADLOCK)
    assert caught.value.args[0] == 1305
    assert node.value(0) is None


def test_an_error_in_a_block_keeps_the_rest(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["kept", 1])
        with pytest.raises(IntegrityError), transaction.atomic(using="t_0"):
            node.run(0, "INSERT INTO item (id) VALUES (1)")
        node.run(0, UPDATE, ["kept", 2])
    assert (node.value(0, 1), node.value(0, 2)) == ("kept", "kept")


def test_manual_transactions(node: Node) -> None:
    connection = node[0]
    connection.set_autocommit(False)
    node.run(0, UPDATE, ["one", 1])
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]
    connection.rollback()
    node.run(0, UPDATE, ["two", 1])
    connection.commit()
    node.run(0, UPDATE, ["three", 1])
    # As on the server: switching autocommit on commits.
    connection.set_autocommit(True)
    assert node.value(0) == "three"
    assert connection.is_idle()


def test_autocommit_switched_off_in_the_settings(node: Node) -> None:
    connections["t_0"].settings_dict["AUTOCOMMIT"] = False
    node.run(0, UPDATE, ["one", 1])
    assert node.value(0) is None
    connections["t_0"].commit()
    assert node.value(0) == "one"
    connections["t_0"].close_if_unusable_or_obsolete()
    assert node.run(1, "SELECT @@autocommit") == [(1,)]


def test_closed_in_a_block(node: Node) -> None:
    with pytest.raises(Error), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["x", 1])
        node[0].close()
        node.run(0, "SELECT 1")
    assert node.value(0) is None
    assert node.run(0, "SELECT DATABASE(), @@autocommit") == [("t_0", 1)]


def test_select_for_update_blocks_others(node: Node) -> None:
    node.ask("SET SESSION innodb_lock_wait_timeout = 1")
    with transaction.atomic(using="t_0"):
        node.run(0, "SELECT * FROM item WHERE id = 1 FOR UPDATE")
        with pytest.raises(node[0].Database.OperationalError) as caught:
            node.ask("SELECT * FROM t_0.item WHERE id = 1 FOR UPDATE NOWAIT")
        assert caught.value.args[0] == 1205
    node.ask("SELECT * FROM t_0.item WHERE id = 1 FOR UPDATE NOWAIT")


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_isolation_level(node: Node, level: str) -> None:
    for alias in ("t_0", "t_1"):
        connections[alias].settings_dict["OPTIONS"] = {"isolation_level": level}
    with transaction.atomic(using="t_0"):
        assert node.run(0, "SELECT @@tx_isolation") == [(level.replace(" ", "-").upper(),)]
        before = node.run(0, "SELECT value FROM item WHERE id = 1")
        node.run(1, "UPDATE t_0.item SET value = 'new' WHERE id = 1")
        after = node.run(0, "SELECT value FROM item WHERE id = 1")
    assert (before == after) is (level == "repeatable read")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stands", [0, 1])
def test_an_error_in_the_first_statement(node: Node, stands: int, nested: bool) -> None:
    """The transaction has begun by then, and must end with the block."""
    node.run(stands, "SELECT 1")
    inner = transaction.atomic(using="t_0") if nested else nullcontext()
    with transaction.atomic(using="t_0"):
        with pytest.raises(ProgrammingError), inner:
            node.run(0, "SELECT * FROM missing")
        assert not node.pool.idle
        node.run(0, UPDATE, ["x", 1])
        assert node.value(0) is None
    assert node.value(0) == "x"
    for _ in range(2):
        node.run(1, UPDATE, ["y", 1])
        assert node.value(1) == "y"
    assert node.pool.size == 1


def test_an_exception_at_the_start_leaves_nothing(node: Node) -> None:
    with pytest.raises(TypeError), transaction.atomic(using="t_0"):
        node.run(0, "SELECT %s", 5)
    assert node[0].is_idle()
    assert node.pool.size == node.pool.idle


@pytest.mark.parametrize("completion", ["CHAIN", "RELEASE"])
def test_a_commit_begins_no_transaction_of_the_session(node: Node, completion: str) -> None:
    """Whatever the server's completion_type: another alias may be the next to use the session."""
    before = node.ask("SELECT @@GLOBAL.completion_type")[0][0]
    node.ask(f"SET GLOBAL completion_type = '{completion}'")
    try:
        node.pool.dispose()
        opened = node.pool.stats.opened
        with transaction.atomic(using="t_0"):
            node.run(0, UPDATE, ["in a block", 1])
        node.run(1, UPDATE, ["at once", 1])
        assert (node.value(0), node.value(1)) == ("in a block", "at once")
        assert node.pool.stats.opened == opened + 1
    finally:
        node.ask(f"SET GLOBAL completion_type = '{before}'")
        node.pool.dispose()


@pytest.fixture
def undoing_node(django_db_blocker: Any) -> Iterator[Node]:
    """A node whose server rolls back a transaction that waits too long for a lock."""
    try:
        server = MariaDBServer(innodb_rollback_on_timeout=None, innodb_lock_wait_timeout="1")
    except ServiceMissing as exc:
        service_missing(exc)
    with server, django_db_blocker.unblock():
        node = Node(server.address)
        node.set_up()
        yield node
        node.tear_down()


def test_a_lock_wait_that_undoes_the_transaction_is_known(undoing_node: Node) -> None:
    node = undoing_node
    with transaction.atomic(using="t_1"):
        with transaction.atomic(using="t_0"):
            node.run(0, UPDATE, ["gone", 2])
            with closing(MySQLdb.connect(**node.address.mysqldb())) as other:
                other.cursor().execute("UPDATE t_0.item SET value = 'other' WHERE id = 1")
                with pytest.raises(OperationalError, match="Lock wait timeout"):
                    node.run(0, UPDATE, ["late", 1])
            assert node[0].has_failed
            node.run(0, "INSERT INTO item (value) VALUES ('after')")
            assert node.ask("SELECT COUNT(*) FROM t_0.item WHERE value = 'after'") == [(0,)]
        assert node.value(0, 2) is None
