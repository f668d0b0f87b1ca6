"""Entries of transactions that have ended are closed later, many at a time, and not for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connections, transaction

from sharded_orm.contrib.lookups import transaction as lookup_transaction
from sharded_orm.contrib.lookups.models import LookupEntry
from sharded_orm.contrib.lookups.transaction import CLOSE_ATTEMPTS, EndedChanges
from tests.finders.models import Account
from tests.integration.lookups.conftest import differences, entries
from tests.queries.conftest import DATABASES, ONE, SHARD

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def test_entries_that_cannot_be_closed_are_left_to_the_command(
    accounts: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(lookup_transaction, "ended_changes", EndedChanges())
    monkeypatch.setattr(lookup_transaction, "CLOSE_AFTER", 0)
    attempts = 0

    def refuse_to_close(execute: Any, sql: str, params: Any, *args: Any) -> Any:
        nonlocal attempts
        if sql.startswith("UPDATE") and "sharded_orm_lookup" in sql:
            attempts += 1
            raise OperationalError("The account may not update.")
        return execute(sql, params, *args)

    caplog.set_level(logging.WARNING, "sharded_orm.lookups")
    with connections["default"].execute_wrapper(refuse_to_close):
        for number in range(CLOSE_ATTEMPTS):
            Account.objects.create(id=10 + number, user_id=ONE, email=f"{number}@x")
    first, last = caplog.records
    assert attempts == CLOSE_ATTEMPTS
    assert "may not update" in str(first.exc_info) and last.exc_info is None
    assert "lookups check --repair" in last.getMessage()
    # The process has forgotten them: nothing is tried again.
    Account.objects.create(id=9, user_id=ONE, email="next@x")
    left = LookupEntry.objects.filter(is_open=True, lookup="finders.account.email")
    assert left.count() >= CLOSE_ATTEMPTS
    assert differences() == {}
    call_command("lookups", "check", "--repair", "--verbosity", "0")
    assert not left.exists() and differences() == {}
    assert caplog.records == [first, last]


def _create() -> None:
    Account.objects.create(id=3, user_id=ONE, email="new@x", serial=9)


def _give(*values: int | None) -> None:
    for value in values:
        email = None if value is None else f"{value}@x"
        Account.objects.filter(user_id=ONE, id=1).update(serial=value, email=email)


def _delete(pk: int) -> None:
    Account.objects.filter(user_id=ONE, id=pk).delete()


def _in_vain(*works: Callable[[], None]) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        for work in works:
            work()
        raise ZeroDivisionError


def _create_with_a_value_of_another_row(number: int = 4) -> None:
    with suppress(IntegrityError), transaction.atomic(using=SHARD[ONE]):
        Account.objects.create(id=number, user_id=ONE, email="ada@x", serial=7)


#: Work that writes an entry more than once.
SEVERAL_TIMES: dict[str, Callable[[], None]] = {
    "create, delete": lambda: (_create(), _delete(3))[0],
    "create, delete, create": lambda: (_create(), _delete(3), _create())[0],
    "create in vain, create": lambda: (_in_vain(_create), _create())[0],
    "create and delete in vain": lambda: _in_vain(_create, lambda: _delete(3)),
    "create, delete in vain": lambda: (_create(), _in_vain(lambda: _delete(3)))[0],
    "create, delete in vain, delete": lambda: (
        _create(),
        _in_vain(lambda: _delete(3)),
        _delete(3),
    )[0],
    "give, take, give": lambda: _give(8, None, 8),
    "give, take": lambda: _give(8, None),
    "give another, give the old one": lambda: _give(8, 7),
    "delete in vain, give": lambda: (_in_vain(lambda: _delete(1)), _give(8))[0],
    "delete, create in vain": lambda: (_delete(1), _in_vain(_create))[0],
    "give, delete in vain": lambda: (_give(8), _in_vain(lambda: _delete(1)))[0],
    "refused, delete": lambda: (_create_with_a_value_of_another_row(), _delete(1))[0],
    "refused, give": lambda: (_create_with_a_value_of_another_row(), _give(8))[0],
    "refused, delete in vain": lambda: (
        _create_with_a_value_of_another_row(),
        _in_vain(lambda: _delete(1)),
    )[0],
    "refused, delete, create": lambda: (
        _create_with_a_value_of_another_row(),
        _delete(1),
        _create_with_a_value_of_another_row(5),
    )[0],
}


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("name", SEVERAL_TIMES)
def test_an_entry_that_a_transaction_has_written_several_times(
    accounts: Any, name: str, is_committed: bool
) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        SEVERAL_TIMES[name]()
        if not is_committed:
            raise ZeroDivisionError
    rows = list(Account.objects.scatter().values_list("user_id", "email", "serial"))
    assert entries("email") == sorted((email, str(key)) for key, email, _ in rows if email)
    assert entries("serial") == sorted((str(value), str(key)) for key, _, value in rows if value)
