"""An INSERT outside of transactions, which is a transaction by itself, when it fails or meets others."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from sharded_orm.contrib.lookups import entries as store
from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.lookups.transaction import ended_changes
from sharded_orm.exceptions import KeyMoved
from tests.finders.models import Account
from tests.integration.lookups.conftest import differences, entries
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_value_is_free_after_an_error_of_another_field(accounts: Any) -> None:
    """Django finds the error when it compiles the statement, so nothing was sent."""
    with pytest.raises(ValueError, match="no text"):
        Account.objects.create(id=3, user_id=ONE, email="new@x", note=Unprintable())
    Account.objects.create(id=3, user_id=TWO, email="new@x")
    assert differences() == {}


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("error", [ValueError, OperationalError])
def test_an_error_around_the_statement(accounts: Any, is_stored: bool, error: Any) -> None:
    """Before or after it was sent: whoever writes the value next finds out."""

    def fail(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("INSERT"):
            if is_stored:
                execute(sql, *args)
            raise error("test")
        return execute(sql, *args)

    with connections[SHARD[ONE]].execute_wrapper(fail), pytest.raises(error):
        Account.objects.using(SHARD[ONE]).create(id=3, user_id=ONE, email="new@x")
    # In autocommit, the row stays.
    if Account.objects.scatter().filter(id=3).exists():
        assert Account.objects.get(email="new@x").user_id == ONE
        with pytest.raises(LookupValueTaken):
            Account.objects.create(id=4, user_id=TWO, email="new@x")
    else:
        Account.objects.create(id=4, user_id=TWO, email="new@x")
    assert differences() == {}


def test_the_key_moves_before_the_statement_is_sent(accounts: Any) -> None:
    """The write is repeated, and finds the entry of its first attempt."""
    attempts: list[str] = []

    def fail_once(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("INSERT"):
            attempts.append(sql)
            if len(attempts) == 1:
                raise KeyMoved("test")
        return execute(sql, *args)

    with connections[SHARD[ONE]].execute_wrapper(fail_once):
        Account.objects.create(id=3, user_id=ONE, email="new@x")
    assert len(attempts) == 2
    assert Account.objects.get(email="new@x").id == 3
    assert differences() == {}


def test_a_row_is_deleted_and_written_anew_at_the_same_time(accounts: Any) -> None:
    """The entry of a lookup that is not unique belongs to whoever has the lock of the row."""
    shard, sent, deleted = SHARD[ONE], Event(), Event()
    # PostgreSQL refuses the INSERT at once if it meets a row that is locked and not deleted.
    waits_for_lock = connections[shard].vendor == "mysql"

    def look(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("INSERT"):
            sent.set()
            assert waits_for_lock or deleted.wait(PATIENCE)
        return execute(sql, *args)

    def write_anew() -> None:
        try:
            with connections[shard].execute_wrapper(look):
                Account.objects.create(id=1, user_id=ONE, serial=7)
        finally:
            connections.close_all()

    if connections[shard].vendor == "sqlite":
        pytest.skip("A file has one writer.")
    other = Thread(target=write_anew)
    with transaction.atomic(using=shard):
        list(Account.objects.using(shard).filter(id=1).select_for_update())
        other.start()
        assert sent.wait(PATIENCE)
        accounts[0].delete()
        deleted.set()
    other.join(PATIENCE)
    assert {row.id for row in Account.objects.filter(serial=7)} == {1, 2}
    assert differences() == {}


@pytest.mark.mysql_settings
def test_in_a_transaction_that_only_the_server_knows(accounts: Any) -> None:
    taken: list[str] = []

    def take() -> None:
        try:
            Account.objects.create(id=4, user_id=TWO, email="new@x")
        except LookupValueTaken as exc:
            taken.append(str(exc))
        finally:
            connections.close_all()

    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute("BEGIN")
        Account.objects.create(id=3, user_id=ONE, email="new@x")
        # As later changes of the process do.
        waiting = [(store.GLOBAL_TABLE, token) for token in _waiting()]
        store.close(store.GLOBAL_TABLE, [token for _, token in waiting])
        other = Thread(target=take)
        other.start()
        other.join(PATIENCE)
        cursor.execute("COMMIT")
    assert taken and ("new@x", str(ONE)) in entries("email")
    assert Account.objects.scatter().filter(email="new@x").count() == 1


def _waiting() -> list[str]:
    changes = ended_changes._by_table.get(store.GLOBAL_TABLE)
    return [] if changes is None else list(changes.tokens)
