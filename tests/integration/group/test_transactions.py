"""Group transactions on MariaDB and PostgreSQL: the tests of SQLite, and those that need a server."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import atomic

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
    with pytest.raises(PartialCommitError) as caught, atomic(using=GROUP):
        for number in (0, 1, 2):
            shards.add(number, 1)
        _kill(shards, 1)
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
