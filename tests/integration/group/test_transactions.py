"""Group transactions on MariaDB and PostgreSQL: the tests of SQLite, and those that need a server."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError, atomic
from django.test.utils import CaptureQueriesContext

from sharded_orm.backends.postgresql.cursor import SessionLeaseMixin
from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession
from sharded_orm.exceptions import PartialCommitError
from tests.integration.group.deadlocks import ROWS, deadlock, fill
from tests.patience import PATIENCE
from tests.unit.backends.group.conftest import GROUP, Shards
from tests.unit.backends.group.test_transactions import *  # noqa: F403
from tests.unit.backends.group.test_transactions import _break_commit


def test_two_nodes(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(8, 1)
    assert shards.rows(0) == shards.rows(8) == [1]
    assert shards[0].shard.node != shards[8].shard.node


def _kill(shards: Shards, number: int) -> None:
    wrapper = shards[number]
    if wrapper.vendor == "mysql":
        own, kill = "SELECT CONNECTION_ID()", "KILL {}"
    else:
        own, kill = "SELECT pg_backend_pid()", "SELECT pg_terminate_backend({}, 60000)"
    with wrapper.cursor() as cursor:
        cursor.execute(own)
        (session,) = cursor.fetchone()
    with wrapper.node_cursor() as cursor:
        cursor.execute(kill.format(session))


def test_connection_lost_before_the_commit(shards: Shards) -> None:
    with pytest.raises(OperationalError) as caught, atomic(using=GROUP):
        for number in (0, 1, 2):
            shards.add(number, 1)
        _kill(shards, 1)
        if shards[1].vendor == "mysql":
            # The server ends the session after the answer to KILL.
            assert shards[1].connection.session.poll(PATIENCE * 1000)
    assert not isinstance(caught.value, PartialCommitError)
    assert [shards.rows(number) for number in (0, 1, 2)] == [[], [], []]
    with atomic(using=GROUP):
        shards.add(1, 2)
    assert shards.rows(1) == [2]


def test_connection_lost_before_a_rollback(shards: Shards) -> None:
    with pytest.raises(ValueError, match="mine"), atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(1, 1)
        _kill(shards, 0)
        raise ValueError("mine")
    assert shards.rows(0) == shards.rows(1) == []
    shards.add(0, 2)
    assert shards.rows(0) == [2]


@pytest.mark.parametrize("nodes", ["mariadb"], indirect=True)
def test_implicit_commit_inside_a_nested_block(shards: Shards) -> None:
    """DDL commits and ends savepoints: the block cannot be rolled back, and raises an error."""
    with pytest.raises(DatabaseError), atomic(using=GROUP):
        shards.add(0, 1)
        with atomic(using=GROUP):
            shards.add(0, 2)
            shards.add(1, 2)
            with shards[0].cursor() as cursor:
                cursor.execute("CREATE TABLE other (value integer)")
    assert shards.rows(1) == []
    shards.add(0, 3)
    assert shards.rows(0) == [1, 2, 3]


def test_select_for_update(shards: Shards) -> None:
    shards.add(0, 1)
    with atomic(using=GROUP), shards[0].cursor() as cursor:
        cursor.execute("SELECT value FROM thing FOR UPDATE")
        assert list(cursor.fetchall()) == [(1,)]
        other = shards[0].copy()
        with other.cursor() as second:
            limit, error = {
                "mysql": ("SET innodb_lock_wait_timeout = 1", "1205"),
                "postgresql": ("SET lock_timeout = '1s'", "lock timeout"),
            }[other.vendor]
            second.execute(limit)
            with pytest.raises(OperationalError, match=error):
                second.execute("UPDATE thing SET value = 2")
        other.close()


def test_closed_connections_keep_no_transaction(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        connections.close_all()
    assert shards.rows(0) == []
    assert transaction.get_autocommit(using=shards.alias(0))


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
@pytest.mark.parametrize("failed", [0, 1, 8])
@pytest.mark.parametrize("writes_first", [False, True])
def test_nothing_is_stored_if_a_statement_has_failed_on_one_shard(
    shards: Shards, failed: int, writes_first: bool
) -> None:
    ran: list[int] = []
    with pytest.raises(
        TransactionManagementError, match=f"'{shards.alias(failed)}'.*block of its own"
    ):
        with atomic(using=GROUP):
            if writes_first:
                for number in (0, 1, 8):
                    shards.add(number, 1)
            with pytest.raises(DatabaseError), shards[failed].cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
            for number in {0, 1, 8} - {failed}:
                shards.add(number, 2)
            transaction.on_commit(lambda: ran.append(1), using=GROUP)
    assert [shards.rows(number) for number in (0, 1, 8)] == [[], [], []]
    assert ran == []
    with atomic(using=GROUP):
        shards.add(failed, 3)
    assert shards.rows(failed) == [3]


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
def test_a_statement_that_failed_on_the_only_shard(shards: Shards) -> None:
    """As on one database, where the server answers the COMMIT by a rollback."""
    with atomic(using=GROUP):
        shards.add(0, 1)
        with pytest.raises(DatabaseError), shards[0].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
    assert shards.rows(0) == []


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
def test_a_statement_that_failed_in_a_savepoint_loses_nothing_else(shards: Shards) -> None:
    with atomic(using=GROUP):
        shards.add(0, 1)
        shards.add(8, 1)
        with pytest.raises(DatabaseError), atomic(using=GROUP), shards[8].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        with pytest.raises(DatabaseError), atomic(using=shards.alias(8)):
            with shards[8].cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
    assert shards.rows(0) == shards.rows(8) == [1]


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
@pytest.mark.parametrize("violated", [0, 1, 8])
def test_deferred_constraints_are_checked_before_the_first_commit(
    shards: Shards, violated: int
) -> None:
    with shards[violated].cursor() as cursor:
        cursor.execute(
            "ALTER TABLE thing DROP CONSTRAINT thing_value_key,"
            " ADD UNIQUE (value) DEFERRABLE INITIALLY DEFERRED"
        )
    with pytest.raises(IntegrityError), atomic(using=GROUP):
        for number in (0, 1, 8):
            shards.add(number, 1)
        shards.add(violated, 1)
    assert [shards.rows(number) for number in (0, 1, 8)] == [[], [], []]
    with CaptureQueriesContext(shards[violated]) as captured, atomic(using=GROUP):
        for number in (0, 1, 8):
            shards.add(number, 1)
    assert shards.rows(violated) == [1]
    assert not any("CONSTRAINTS" in query["sql"] for query in captured)


# ##### What is known before the first commit #####


def _read(shards: Shards, number: int) -> None:
    with shards[number].cursor() as cursor:
        cursor.execute("SELECT value FROM thing")
        cursor.fetchall()


def _fail(shards: Shards, number: int) -> None:
    with pytest.raises(DatabaseError), shards[number].cursor() as cursor:
        cursor.execute("SELECT value FROM missing")


@pytest.mark.parametrize("read_from", [[], [0], [0, 1]])
def test_a_failed_statement_loses_nothing_if_no_other_shard_was_written_to(
    shards: Shards, read_from: list[int]
) -> None:
    """As in a block of one shard: the server answers the COMMIT by a rollback, if it must."""
    with atomic(using=GROUP):
        for number in read_from:
            _read(shards, number)
        _fail(shards, 8)
    with atomic(using=GROUP):
        for number in read_from:
            _read(shards, number)
        shards.add(8, 1)
        _fail(shards, 8)
    # MariaDB undoes the failed statement only.
    assert shards.rows(8) == ([1] if shards[8].vendor == "mysql" else [])


@pytest.mark.parametrize("lost", [0, 8])
@pytest.mark.parametrize("is_written", [True, False])
def test_a_lost_session_that_the_program_knows_of_stores_nothing(
    shards: Shards, lost: int, is_written: bool
) -> None:
    ran: list[int] = []
    with pytest.raises(OperationalError) as caught, atomic(using=GROUP):
        for number in (0, 1, 8):
            if number != lost or is_written:
                shards.add(number, 1)
        transaction.on_commit(lambda: ran.append(1), using=GROUP)
        _kill(shards, lost)
        with pytest.raises(OperationalError):
            _read(shards, lost)
    assert not isinstance(caught.value, PartialCommitError)
    assert [shards.rows(number) for number in (0, 1, 8)] == [[], [], []]
    assert ran == []
    with atomic(using=GROUP):
        shards.add(0, 2)
        shards.add(8, 2)
    assert shards.rows(0) == shards.rows(8) == [2]


@pytest.mark.parametrize("order", [[0, 8], [8, 0]])
def test_a_shard_that_was_only_read_is_lost_before_the_commit(
    shards: Shards, order: list[int]
) -> None:
    ran: list[int] = []
    with pytest.raises(OperationalError) as caught, atomic(using=GROUP):
        for number in order:
            if number == 0:
                shards.add(0, 1)
            else:
                _read(shards, 8)
        transaction.on_commit(lambda: ran.append(1), using=shards.alias(8))
        _kill(shards, 8)
    assert not isinstance(caught.value, PartialCommitError)
    assert (shards.rows(0), ran) == ([], [])


def test_the_first_writer_fails_after_the_readers_have_committed(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def block() -> None:
        with atomic(using=GROUP):
            shards.add(1, 1)
            _read(shards, 0)
            shards.add(8, 1)
            for number in (0, 1, 8):
                transaction.on_commit(lambda n=number: ran.append(n), using=shards.alias(number))

    _break_commit(shards[1], monkeypatch)
    with pytest.raises(OperationalError) as caught:
        block()
    assert not isinstance(caught.value, PartialCommitError)
    assert (shards.rows(1), shards.rows(8), ran) == ([], [], [])
    monkeypatch.undo()
    _break_commit(shards[8], monkeypatch)
    with pytest.raises(PartialCommitError) as partial:
        block()
    assert partial.value.committed == (shards.alias(1), shards.alias(0))
    assert partial.value.not_committed == (shards.alias(8),)
    assert (shards.rows(1), shards.rows(8), ran) == ([1], [], [0, 1])


def _make_function(shards: Shards, number: int) -> None:
    """Make a function on the shard that inserts the row 7."""
    insert = "INSERT INTO thing (value) VALUES (7)"
    with shards[number].cursor() as cursor:
        cursor.execute(
            f"CREATE FUNCTION take() RETURNS int LANGUAGE sql AS '{insert} RETURNING 1'"
            if shards[number].vendor == "postgresql"
            else f"CREATE FUNCTION take() RETURNS int BEGIN {insert}; RETURN 1; END"
        )
    shards[number].close()  # The statement pins its session on MariaDB.


@pytest.mark.parametrize(
    "sql", ["SELECT take()", "SELECT 1 FROM (SELECT take() AS n) s WHERE n = 1"]
)
def test_a_read_that_calls_a_function_counts_as_a_write(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    _make_function(shards, 8)
    _break_commit(shards[0], monkeypatch)
    with pytest.raises(OperationalError) as caught, atomic(using=GROUP):
        shards.add(0, 1)
        with shards[8].cursor() as cursor:
            cursor.execute(sql)
    assert not isinstance(caught.value, PartialCommitError)
    assert shards.rows(0) == shards.rows(8) == []
    monkeypatch.undo()
    with atomic(using=shards.alias(8)):
        _read(shards, 8)
        assert shards[8].reads_as_autocommit()
        with shards[8].cursor() as cursor:
            cursor.execute(sql)
        assert not shards[8].reads_as_autocommit()
    assert shards.rows(8) == [7]


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
def test_a_named_cursor_that_calls_a_function_counts_as_a_write(shards: Shards) -> None:
    _make_function(shards, 8)
    with atomic(using=shards.alias(8)):
        with shards[8].chunked_cursor() as cursor:
            cursor.execute("SELECT take()")
            cursor.fetchall()
        assert not shards[8].reads_as_autocommit()


@pytest.mark.parametrize("nodes", ["mariadb"], indirect=True)
@pytest.mark.parametrize("others", [[0], [0, 1], []])
def test_a_deadlock_that_the_program_ignores(shards: Shards, others: list[int]) -> None:
    """The server has rolled back the whole transaction of one shard, and that of no other."""
    fill(shards, 8)

    def block() -> None:
        with atomic(using=GROUP):
            for number in others:
                shards.add(number, 1)
            _read(shards, 2)
            with shards[8].cursor() as cursor:
                cursor.execute("UPDATE thing SET value = 99 WHERE value = 100")
                with deadlock(shards, 8) as sql:
                    with pytest.raises(OperationalError) as caught:
                        cursor.execute(sql)
                    assert caught.value.args[0] == 1213
            shards.add(8, 1)

    if others:
        with pytest.raises(TransactionManagementError, match=f"'{shards.alias(8)}'"):
            block()
    else:
        # As on one database: only the statements after the deadlock are stored.
        block()
    assert [shards.rows(number) for number in others] == [[] for _ in others]
    assert shards.rows(8) == (ROWS if others else [1, *ROWS])
    with atomic(using=GROUP):
        shards.add(0, 2)
        shards.add(8, 2)
    assert shards.rows(0) == [2]


@pytest.mark.parametrize("nodes", ["mariadb"], indirect=True)
def test_a_snapshot_conflict_that_the_program_ignores(shards: Shards) -> None:
    """With innodb_snapshot_isolation, the server rolls back the whole transaction, too."""
    shards.add(8, 1)
    other = shards[8].copy()
    with shards[8].cursor() as cursor:
        try:
            cursor.execute("SET SESSION innodb_snapshot_isolation = 1")
        except OperationalError:
            pytest.skip("This server has no innodb_snapshot_isolation.")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(TransactionManagementError, match="block of its own"), atomic(using=GROUP):
        shards.add(0, 1)
        _read(shards, 8)
        with other.cursor() as cursor:
            cursor.execute("UPDATE thing SET value = 2")
        with pytest.raises(OperationalError) as caught, shards[8].cursor() as cursor:
            cursor.execute("UPDATE thing SET value = 3 WHERE value < 3")
        assert caught.value.args[0] == 1020
    other.close()
    assert (shards.rows(0), shards.rows(8)) == ([], [2])
    with atomic(using=GROUP):
        shards.add(0, 2)
        shards.add(8, 3)
    assert (shards.rows(0), shards.rows(8)) == ([2], [2, 3])


@pytest.mark.parametrize("nodes", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("read", "written", "checks"),
    [
        ([], [0, 8], 1),
        ([], [0, 1, 8], 2),
        ([0], [8], 0),
        ([8, 1], [0], 0),
        ([0], [1, 8], 1),
        ([0, 8], [], 0),
    ],
)
def test_round_trips_of_a_block(
    shards: Shards, trips: list[str], read: list[int], written: list[int], checks: int
) -> None:
    with atomic(using=GROUP):
        for number in read:
            _read(shards, number)
        for number in written:
            shards.add(number, 1)
        trips.clear()
    commits = len(read) + len(written)
    assert [sql for sql in trips if sql != "commit"] == ["SET CONSTRAINTS ALL IMMEDIATE"] * checks
    assert len(trips) == commits + checks


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packets that are sent, in order."""
    sent: list[str] = []

    def record(owner: Any, name: str, position: int) -> None:
        method = getattr(owner, name)

        def send(self: Any, *args: Any) -> Any:
            text = args[position]
            sent.append(text.decode() if isinstance(text, bytes) else str(text))
            return method(self, *args)

        monkeypatch.setattr(owner, name, send)

    record(SessionLeaseMixin, "_send", 1)
    record(PostgreSQLNodeSession, "run", 0)
    record(PostgreSQLNodeSession, "end_transaction", 0)
    return sent
