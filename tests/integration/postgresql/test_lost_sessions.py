"""Sessions that the server closes, at every point; forks; restarts; errors of servers."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError

from sharded_orm.exceptions import ShardDatabaseMissing
from tests.integration.postgresql.conftest import COUNT, Node
from tests.services.postgresql import DATABASE, PostgreSQLServer

UPDATE = "UPDATE item SET value = %s WHERE id = %s"
SHARD = "SELECT DISTINCT shard FROM item"


@pytest.mark.parametrize(
    "sql", ["SELECT 1", "UPDATE item SET value = 'x'", "CREATE TABLE x (i int)", "VACUUM item"]
)
def test_killed_while_idle(node: Node, sql: str) -> None:
    node.kill(node.session_of(0))
    node.run(1, sql)
    assert node.pool.stats.dead >= 1
    assert node.run(0, SHARD) == [(0,)]


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
    assert node.run(0, SHARD) == [(0,)]


@pytest.mark.parametrize("how", ["chunks", "stream", "copy"])
def test_killed_while_rows_are_fetched(node: Node, how: str) -> None:
    """The error may be caught; the commit must fail all the same."""
    rows = "SELECT repeat('x', 2000) FROM generate_series(1, 20000)"
    ended = []
    with pytest.raises((OperationalError, InterfaceError)), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        pid = node.session_of(0)
        try:
            if how == "chunks":
                with node[0].chunked_cursor() as cursor:
                    cursor.execute(rows)
                    cursor.fetchone()
                    node.kill(pid)
                    cursor.fetchall()
            else:
                with node[0].cursor() as cursor, node[0].wrap_database_errors:
                    if how == "stream":
                        for _ in cursor.stream(rows):
                            node.ask("SELECT pg_terminate_backend(%s)", pid)
                    else:
                        with cursor.copy(f"COPY ({rows}) TO STDOUT") as copy:
                            for _ in copy:
                                node.ask("SELECT pg_terminate_backend(%s)", pid)
        except DatabaseError as exc:
            ended.append(exc)
    assert len(ended) == 1
    assert node.value(0) is None
    assert node.run(0, SHARD) == [(0,)]
    assert node.pool.size == node.pool.idle


def test_chunks_of_autocommit_whose_session_is_killed(node: Node) -> None:
    with pytest.raises(OperationalError), node[0].chunked_cursor() as cursor:
        cursor.execute("SELECT n FROM generate_series(1, 500) n")
        cursor.fetchone()
        (session,) = node.pool._open_sessions()
        node.kill(session.pgconn.backend_pid)
        cursor.fetchall()
    assert node[0].is_idle()
    assert node.run(0, SHARD) == [(0,)]
    assert node.pool.size == node.pool.idle


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
    node.run(0, "SET work_mem = '2MB'")
    node.kill(node.session_of(0))
    for _ in range(2):
        with pytest.raises(OperationalError):
            node.run(0, "SHOW work_mem")
    # As after an error with Django's own backend, the end of the request repairs it.
    connections["t_0"].close_if_unusable_or_obsolete()
    assert node.run(0, "SHOW work_mem") == [("4MB",)]


class Cut:
    """Lets a session be killed between the poll and the statement."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.monkeypatch = monkeypatch

    def before_next_statement(self) -> None:
        node, lease = self.node, self.node.pool.lease

        def killing() -> Any:
            self.monkeypatch.setattr(node.pool, "lease", lease)
            session = lease()
            node.kill(session.pgconn.backend_pid)
            return session

        self.monkeypatch.setattr(node.pool, "lease", killing)


@pytest.fixture
def cut(node: Node, monkeypatch: pytest.MonkeyPatch) -> Cut:
    node.run(1, "SELECT 1")
    return Cut(node, monkeypatch)


def test_a_read_is_repeated_once(node: Node, cut: Cut) -> None:
    retries = node.pool.stats.retries
    cut.before_next_statement()
    assert node.run(1, "SELECT shard, %s FROM item LIMIT 1", [5]) == [(1, 5)]
    assert node.pool.stats.retries == retries + 1


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE item SET value = 'x'",
        "SELECT * FROM item FOR UPDATE",
        "SELECT pg_notify('a', 'b')",
        "CREATE TABLE x (i int)",
    ],
)
def test_what_may_write_is_never_repeated(node: Node, cut: Cut, sql: str) -> None:
    retries = node.pool.stats.retries
    cut.before_next_statement()
    with pytest.raises(OperationalError):
        node.run(1, sql)
    assert node.pool.stats.retries == retries
    assert node.run(1, SHARD) == [(1,)]


def test_a_read_in_a_transaction_is_not_repeated(node: Node, cut: Cut) -> None:
    cut.before_next_statement()
    with pytest.raises(OperationalError), transaction.atomic(using="t_1"):
        node.run(1, "SELECT 1")
    with transaction.atomic(using="t_1"):
        assert node.run(1, SHARD) == [(1,)]


def test_a_slow_read_that_was_killed_is_not_repeated(
    node: Node, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.backends.postgresql.cursor.RETRY_WITHIN", -1.0)
    cut.before_next_statement()
    with pytest.raises(OperationalError):
        node.run(1, "SELECT 1")


def test_killed_while_it_runs(node: Node) -> None:
    def kill() -> None:
        with node.connect() as connection:
            while not connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'active'"
                " AND query LIKE '%pg_sleep(4321)%' AND pid <> pg_backend_pid()"
            ).fetchall():
                pass

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(OperationalError):
        node.run(0, "SELECT pg_sleep(4321)")
    thread.join()
    assert node.run(0, SHARD) == [(0,)]


def test_an_exception_thrown_into_the_statement(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a time limit that a signal enforces: the result is still to be received."""

    class TimeLimit(Exception):
        pass

    node.run(0, "SELECT 1")

    def interrupted(generator: Any, *args: Any, **kwargs: Any) -> Any:
        next(generator)  # Sends the statement.
        raise TimeLimit

    with monkeypatch.context() as patch:
        patch.setattr("psycopg.waiting.wait", interrupted)
        with pytest.raises(TimeLimit):
            node.run(0, "SELECT 1")
    assert node.pool.size == 0
    assert node.run(1, SHARD) == [(1,)]
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, UPDATE, ["lost", 1])
        with monkeypatch.context() as patch:
            patch.setattr("psycopg.waiting.wait", interrupted)
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
            assert node.run(number, SHARD) == [(number,)]
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
            assert node.run(1, SHARD) == [(1,)]
            connections["t_0"].close()

        in_child(work)
        node.run(0, UPDATE, ["kept", 2])
    assert (node.value(0, 1), node.value(0, 2)) == ("kept", "kept")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_deferred_constraint_that_fails_at_the_end(node: Node, in_transaction: bool) -> None:
    node.run(0, "CREATE TABLE child (item int REFERENCES item (id) DEFERRABLE INITIALLY DEFERRED)")
    ran: list[int] = []
    with pytest.raises(IntegrityError):
        if in_transaction:
            with transaction.atomic(using="t_0"):
                node.run(0, "INSERT INTO child VALUES (99)")
                node.run(0, UPDATE, ["lost", 1])
                transaction.on_commit(lambda: ran.append(1), using="t_0")
        else:
            node.run(0, "INSERT INTO child VALUES (99)")
    assert ran == []
    assert node.value(0) is None
    assert node.ask("SELECT count(*) FROM t_0.child") == [(0,)]
    assert node[0].is_idle()
    assert node.pool.size == 1


def test_a_serialization_failure(node: Node) -> None:
    with pytest.raises(OperationalError) as caught, transaction.atomic(using="t_0"):
        node.run(0, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        node.run(0, SHARD)
        node.ask("UPDATE t_0.item SET value = 'first' WHERE id = 1")
        node.run(0, UPDATE, ["second", 1])
    assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
    assert node.value(0) == "first"
    assert node.run(0, SHARD) == [(0,)]


@pytest.mark.parametrize(
    "how", ["autocommit", "transaction", "chunks", "copy", "executemany", "VACUUM", "SET", "SET TRANSACTION"]
)  # fmt: skip
def test_a_missing_schema(node: Node, how: str) -> None:
    node.ask("DROP SCHEMA t_1 CASCADE")
    node[1].ensure_connection()  # proves only that the node answers
    with pytest.raises(
        ShardDatabaseMissing, match=r"'t_1'.*migrate_shards --create.*migrate --database t_1"
    ) as caught:
        if how == "chunks":
            with node[1].chunked_cursor() as cursor:
                cursor.execute("SELECT 1")
        elif how == "copy":
            with node[1].cursor() as cursor, cursor.copy("COPY item FROM STDIN"):
                pass
        elif how == "executemany":
            with node[1].cursor() as cursor:
                cursor.executemany("SELECT %s", [[1], [2]])
        elif how == "VACUUM":
            node.run(1, "VACUUM")
        elif how == "SET":
            node.run(1, "SET search_path TO x")
        elif how == "autocommit":
            # Without the check, this would be a table of another schema of the path.
            node.run(1, "CREATE TABLE stray (i int)")
        else:
            with transaction.atomic(using="t_1"):
                if how == "SET TRANSACTION":
                    node.run(1, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                node.run(1, "CREATE TABLE stray (i int)")
    assert isinstance(caught.value, OperationalError)
    assert node[1].is_idle()
    assert node.ask("SELECT count(*) FROM pg_class WHERE relname = 'stray'") == [(0,)]
    assert node.run(0, SHARD) == [(0,)]
    node.create(1)
    assert node.run(1, SHARD) == [(1,)]
    # A schema that a statement itself names is the statement's fault.
    for sql in ("SELECT 'nowhere'::regnamespace", "CREATE TABLE nowhere.t (i int)"):
        with pytest.raises(DatabaseError, match="nowhere") as other:
            node.run(1, sql)
        assert not isinstance(other.value, ShardDatabaseMissing)


@pytest.mark.parametrize("how", ["autocommit", "transaction", "chunks", "VACUUM"])
def test_a_schema_that_the_account_may_not_use(node: Node, how: str) -> None:
    """The server leaves the schema out of the search path, so others of the path would be used."""
    node.ask("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
    connections.settings["stranger"] = {
        **node.settings, "SCHEMA": "t_1", "USER": "stranger", "PASSWORD": "stranger",
    }  # fmt: skip
    wrapper = connections["stranger"]
    try:
        with pytest.raises(ProgrammingError, match=r"'t_1' of alias 'stranger'.*GRANT"):
            if how == "chunks":
                with wrapper.chunked_cursor() as cursor:
                    cursor.execute("SELECT 1")
            elif how == "transaction":
                with transaction.atomic(using="stranger"), wrapper.cursor() as cursor:
                    cursor.execute("SELECT 1")
            else:
                with wrapper.cursor() as cursor:
                    cursor.execute("VACUUM" if how == "VACUUM" else "SELECT 1")
        assert wrapper.is_idle()
    finally:
        wrapper.close()
        wrapper.node_pool.dispose()
        del connections["stranger"], connections.settings["stranger"]
        node.ask("DROP ROLE stranger")


def test_an_account_that_may_not_create_a_schema(node: Node) -> None:
    node.ask("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
    common = {**node.settings, "USER": "stranger", "PASSWORD": "stranger"}
    connections.settings["stranger"] = {**common, "SCHEMA": "t_9"}
    connections.settings["guest"] = {**common, "SCHEMA": "t_1"}
    try:
        with pytest.raises(ProgrammingError, match=r"schema 't_9'.*GRANT CREATE"):
            connections["stranger"].create_shard_database()
        # An administrator has created this one.
        connections["guest"].create_shard_database()
    finally:
        connections["stranger"].node_pool.dispose()
        for alias in ("stranger", "guest"):
            connections[alias].close()
            del connections[alias], connections.settings[alias]
        node.ask("DROP ROLE stranger")


@pytest.fixture
def own_node(own_postgresql: PostgreSQLServer, django_db_blocker: Any) -> Iterator[Node]:
    with django_db_blocker.unblock():
        own_postgresql.wait_ready()
        node = Node(own_postgresql.address)
        node.set_up()
        yield node
        node.admin.close()
        node.tear_down()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_server_restart(own_node: Node, own_postgresql: PostgreSQLServer, how: str) -> None:
    for number in range(COUNT):
        own_node.run(number, "SELECT 1")
    own_node.run(3, "SET work_mem = '2MB'")
    connections["t_2"].set_autocommit(False)
    own_node.run(2, UPDATE, ["lost", 1])
    getattr(own_postgresql, how)()
    with pytest.raises(OperationalError, match="refused"):
        own_node.run(0, "SELECT 1")
    assert not own_node[0].is_usable()
    own_postgresql.start()
    # Outside of transactions and without session state, no caller notices.
    own_node.run(0, "UPDATE item SET value = 'after' WHERE id = 1")
    own_node.run(1, "SELECT 1")
    for number in (2, 3):
        with pytest.raises(OperationalError):
            own_node.run(number, "SELECT 1")
        connections[f"t_{number}"].close()
        assert own_node.run(number, f"SELECT value FROM item WHERE shard = {number}") == [
            (None,), (None,),
        ]  # fmt: skip


def test_too_many_connections(node: Node) -> None:
    node.ask("ALTER DATABASE site CONNECTION LIMIT 0")
    node.ask("CREATE ROLE small LOGIN PASSWORD 'small'")
    try:
        connections.settings["small"] = {
            **node.settings, "SCHEMA": "t_0", "USER": "small", "PASSWORD": "small",
        }  # fmt: skip
        with pytest.raises(OperationalError, match="too many connections"):
            connections["small"].ensure_connection()
        assert isinstance(connections["small"].node_failure(), psycopg.OperationalError)
    finally:
        node.ask("ALTER DATABASE site CONNECTION LIMIT -1")
        node.ask("DROP ROLE small")
        del connections["small"], connections.settings["small"]


def test_a_wrong_password_is_not_told(node: Node) -> None:
    connections.settings["wrong"] = {**node.settings, "PASSWORD": "xyzzy"}
    try:
        with pytest.raises(OperationalError, match="password authentication failed") as caught:
            connections["wrong"].ensure_connection()
        text = "".join(traceback.format_exception(caught.value))
        assert "xyzzy" not in text
        assert "xyzzy" not in repr(connections["wrong"].node_pool)
    finally:
        del connections["wrong"], connections.settings["wrong"]


def test_a_database_that_does_not_exist(node: Node) -> None:
    connections.settings["absent"] = {**node.settings, "NAME": f"{DATABASE}_absent"}
    try:
        with pytest.raises(OperationalError, match=f'"{DATABASE}_absent" does not exist'):
            connections["absent"].ensure_connection()
    finally:
        del connections["absent"], connections.settings["absent"]
