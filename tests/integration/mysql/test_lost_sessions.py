"""Sessions that the server closes, at every point; forks; restarts."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import MySQLdb
import pytest
from django.db import OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from sharded_orm.backends.mysql.session import NodeSession
from tests.integration.mysql.conftest import COUNT, Node
from tests.services.mariadb import MariaDBServer

UPDATE = "UPDATE item SET value = %s WHERE id = %s"


@pytest.mark.parametrize(
    "sql", ["SELECT 1", "UPDATE item SET value = 'x'", "CREATE TABLE x (i INT)"]
)
def test_killed_while_idle(node: Node, sql: str) -> None:
    node.kill(node.session_of(0))
    node.run(1, sql)
    assert node.pool.stats.dead >= 1
    assert node.run(0, "SELECT DATABASE()") == [("t_0",)]


def test_killed_while_idle_before_a_transaction(node: Node) -> None:
    node.kill(node.session_of(0))
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["x", 1])
    assert node.value(0) == "x"


def test_killed_in_a_transaction(node: Node) -> None:
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        node.kill(node.session_of(0))
        node.run(0, UPDATE, ["lost", 2])
    assert (node.value(0, 1), node.value(0, 2)) == (None, None)
    node.run(0, UPDATE, ["next", 1])
    assert node.value(0) == "next"


def test_a_program_that_ignores_the_error_cannot_go_on_in_the_transaction(node: Node) -> None:
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        node.kill(node.session_of(0))
        for _ in range(3):
            with pytest.raises(OperationalError):
                node.run(0, UPDATE, ["lost", 2])
        # Leaving the block commits, which must not succeed.
    assert (node.value(0, 1), node.value(0, 2)) == (None, None)


def test_killed_before_the_commit(node: Node) -> None:
    ran: list[int] = []
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        transaction.on_commit(lambda: ran.append(1), using="t_0")
        node.kill(node.session_of(0))
    assert node.value(0) is None
    assert ran == []
    assert node.run(0, "SELECT @@autocommit") == [(1,)]


def test_killed_in_an_inner_block(node: Node) -> None:
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        with transaction.atomic(using="t_0"):
            node.run(0, UPDATE, ["lost", 2])
            node.kill(node.session_of(0))
            node.run(0, "SELECT 1")
    assert (node.value(0, 1), node.value(0, 2)) == (None, None)
    node.run(0, "SELECT 1")


def test_killed_between_the_savepoint_and_its_first_statement(node: Node) -> None:
    with pytest.raises(TransactionManagementError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
            node.kill(node.session_of(0))
            node.run(0, UPDATE, ["lost", 2])
        node.run(0, UPDATE, ["lost", 2])
    assert (node.value(0, 1), node.value(0, 2)) == (None, None)


def test_another_transaction_of_the_thread_is_not_touched(node: Node) -> None:
    with transaction.atomic(using="t_1"):
        node.run(1, UPDATE, ["kept", 1])
        with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
            node.run(0, UPDATE, ["lost", 1])
            node.kill(node.session_of(0))
            node.run(0, "SELECT 1")
        node.run(1, UPDATE, ["kept", 2])
    assert (node.value(1, 1), node.value(1, 2), node.value(0)) == ("kept", "kept", None)


def test_killed_with_manual_transactions(node: Node) -> None:
    connection = node[0]
    connection.set_autocommit(False)
    node.run(0, UPDATE, ["lost", 1])
    node.kill(node.session_of(0))
    with pytest.raises(OperationalError):
        node.run(0, "SELECT 1")
    with pytest.raises(OperationalError):
        connection.commit()
    with pytest.raises(OperationalError):
        connection.set_autocommit(True)
    connection.rollback()
    node.run(0, UPDATE, ["kept", 1])
    connection.commit()
    assert node.value(0) == "kept"
    connection.set_autocommit(True)


def test_a_killed_pin_loses_its_state_loudly(node: Node) -> None:
    node.run(0, "SET @mine = 1")
    node.kill(node.session_of(0))
    for _ in range(2):
        with pytest.raises(OperationalError):
            node.run(0, "SELECT @mine")
    # As after an error with Django's own backend, the end of the request repairs it.
    connections["t_0"].close_if_unusable_or_obsolete()
    assert node.run(0, "SELECT @mine") == [(None,)]


class Cut:
    """Lets a session be killed between the poll and the statement, or after it was sent."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.monkeypatch = monkeypatch

    def before_next_query(self, match: bytes = b"") -> None:
        node = self.node
        session = node.pool.lease()
        query = session.query

        def killing(statement: bytes) -> None:
            if match in statement:
                session.query = query
                node.kill(session.raw.thread_id())
            query(statement)

        session.query = killing
        node.pool.release(session)


@pytest.fixture
def cut(node: Node, monkeypatch: pytest.MonkeyPatch) -> Cut:
    node.run(0, "SELECT 1")
    return Cut(node, monkeypatch)


def test_a_read_is_repeated_once(node: Node, cut: Cut) -> None:
    retries = node.pool.stats.retries
    cut.before_next_query()
    assert node.run(1, "SELECT DATABASE(), %s", [5]) == [("t_1", 5)]
    assert node.pool.stats.retries == retries + 1


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE item SET value = 'x'",
        "SELECT * FROM item FOR UPDATE",
        "SELECT take(1)",
        "CREATE TABLE x (i INT)",
    ],
)
def test_what_may_write_is_never_repeated(node: Node, cut: Cut, sql: str) -> None:
    retries = node.pool.stats.retries
    cut.before_next_query()
    with pytest.raises(OperationalError):
        node.run(1, sql)
    assert node.pool.stats.retries == retries
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]


def test_a_read_in_a_transaction_is_not_repeated(node: Node, cut: Cut) -> None:
    with pytest.raises(OperationalError), transaction.atomic(using="t_1"):
        node.run(1, UPDATE, ["lost", 1])
        node.kill(node.session_of(1))
        node.run(1, "SELECT 1")
    assert node.value(1) is None


def test_a_slow_read_that_was_killed_is_not_repeated(
    node: Node, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.backends.mysql.cursor.RETRY_WITHIN", -1.0)
    cut.before_next_query()
    with pytest.raises(OperationalError):
        node.run(1, "SELECT 1")


def test_the_commit_itself_is_cut(node: Node, cut: Cut) -> None:
    cut.before_next_query(b"COMMIT")
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["unknown", 1])
    assert node.run(0, "SELECT @@autocommit") == [(1,)]
    assert node[0].is_idle()


def test_killed_while_it_runs(node: Node) -> None:
    def kill() -> None:
        with MySQLdb.connect(**node.address.mysqldb(), autocommit=True) as connection:
            cursor = connection.cursor()
            while not cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE info LIKE 'SELECT /* here%'"
            ):
                pass
            cursor.execute(f"KILL {cursor.fetchone()[0]}")

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(OperationalError):
        # Our backend takes it for a write: it must not run twice.
        node.run(0, "SELECT /* here */ SLEEP(30) FROM item WHERE id = 1 FOR UPDATE")
    thread.join()
    assert node.run(0, "SELECT DATABASE()") == [("t_0",)]


def test_wait_timeout(node: Node) -> None:
    session = node.pool.lease()
    session.run(b"SET SESSION wait_timeout = 1")
    node.pool.release(session)
    gone = node.session_of(0)
    while gone in node.sessions():
        time.sleep(0.05)  # the server's clock, not ours
    assert node.session_of(0) != gone


def test_an_exception_thrown_into_the_statement(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a time limit that a signal enforces: the result is still to be received."""

    class TimeLimit(Exception):
        pass

    node.run(0, "SELECT 1")
    session = node.pool.lease()
    node.pool.release(session)
    query = session.query

    def interrupted(statement: bytes) -> None:
        query(statement)
        raise TimeLimit

    session.query = interrupted
    with pytest.raises(TimeLimit):
        node.run(0, "SELECT 1")
    assert session.retired
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]

    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        held = node[0].connection.session
        query, held.query = held.query, interrupted
        with pytest.raises(TimeLimit):
            node.run(0, "SELECT 1")
        node.run(0, "SELECT 1")
    assert node.value(0) is None


def in_child(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_with_idle_sessions(node: Node) -> None:
    before = node.session_of(0)

    def work() -> None:
        assert node.session_of(0) != before
        for number in range(COUNT):
            assert node.run(number, "SELECT DATABASE()") == [(f"t_{number}",)]
        connections["t_0"].close()
        node.pool.dispose()

    in_child(work)
    assert node.session_of(0) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_inside_a_transaction(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["kept", 1])

        def work() -> None:
            with pytest.raises(OperationalError):
                node.run(0, "SELECT 1")
            assert node.run(1, "SELECT DATABASE()") == [("t_1",)]
            connections["t_0"].close()

        in_child(work)
        node.run(0, UPDATE, ["kept", 2])
    assert (node.value(0, 1), node.value(0, 2)) == ("kept", "kept")


@pytest.fixture
def own_node(own_mariadb: MariaDBServer, django_db_blocker: Any) -> Iterator[Node]:
    with django_db_blocker.unblock():
        own_mariadb.wait_ready()
        node = Node(own_mariadb.address)
        node.set_up()
        yield node
        node.admin = MySQLdb.connect(**own_mariadb.address.mysqldb(), autocommit=True)
        node.tear_down()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_server_restart(own_node: Node, own_mariadb: MariaDBServer, how: str) -> None:
    for number in range(COUNT):
        own_node.run(number, "SELECT 1")
    own_node.run(3, "SET @mine = 1")
    connections["t_2"].set_autocommit(False)
    own_node.run(2, UPDATE, ["lost", 1])
    getattr(own_mariadb, how)()
    with pytest.raises(OperationalError) as caught:
        own_node.run(0, "SELECT 1")
    assert caught.value.args[0] in (2002, 2003)
    assert not own_node[0].is_usable()
    own_mariadb.start()
    # Outside of transactions and without session state, no caller notices.
    own_node.run(0, "UPDATE item SET value = 'after' WHERE id = 1")
    own_node.run(1, "SELECT 1")
    for number in (2, 3):
        with pytest.raises(OperationalError):
            own_node.run(number, "SELECT 1")
        connections[f"t_{number}"].close()
        # (A killed server may have lost the row itself: for speed, it does not flush.)
        rows = own_node.run(number, "SELECT DATABASE(), MAX(value) FROM item WHERE id = 1")
        assert rows == [(f"t_{number}", None)]


def test_a_session_whose_prefix_is_cut_stays_out_of_the_pool(node: Node) -> None:
    session: NodeSession = node.pool.lease()
    node.pool.release(session)
    node.run(0, "SELECT 1")
    next_result = session.next_result

    def cut() -> int:
        session.next_result = next_result
        node.kill(session.raw.thread_id())
        session.raw.close()
        return next_result()

    session.next_result = cut
    with pytest.raises(OperationalError):
        node.run(1, "UPDATE item SET value = 'x' WHERE id = 1")
    assert session.retired
    assert node.run(0, "SELECT DATABASE()") == [("t_0",)]
