"""Group transactions on MariaDB and PostgreSQL: the tests of SQLite, and those that need a server."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError, atomic
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import PartialCommitError
from tests.unit.backends.group.conftest import GROUP, Shards
from tests.unit.backends.group.test_transactions import *  # noqa: F403


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
    if shards[0].vendor == "postgresql":
        # The check of deferred constraints comes before the first commit.
        assert not isinstance(caught.value, PartialCommitError)
        assert [shards.rows(number) for number in (0, 1, 2)] == [[], [], []]
        return
    assert isinstance(caught.value, PartialCommitError)
    assert caught.value.committed == (shards.alias(0),)
    assert caught.value.not_committed == (shards.alias(1), shards.alias(2))
    assert [shards.rows(number) for number in (0, 1, 2)] == [[1], [], []]
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
