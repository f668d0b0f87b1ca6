"""Entries of transactions that have ended are closed later, many at a time, and not for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections

from sharded_orm.contrib.lookups import transaction as lookup_transaction
from sharded_orm.contrib.lookups.models import LookupEntry
from sharded_orm.contrib.lookups.transaction import CLOSE_ATTEMPTS, EndedChanges
from tests.finders.models import Account
from tests.integration.lookups.conftest import differences
from tests.queries.conftest import DATABASES, ONE

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
