"""Writes of values while this thread has a transaction open on the database of the entries.

A server commits the entries beside it, on a connection of their own. An SQLite file has one writer: the
connection would wait for the very transaction, so the write is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.db import connections, transaction

from sharded_orm.contrib.lookups import entries as store
from sharded_orm.contrib.lookups.exceptions import LookupRefused, LookupValueTaken
from tests.finders.models import Account, EmailEntry, Member, PlainAccount
from tests.integration.lookups import processes
from tests.integration.lookups.conftest import differences, entries
from tests.integration.lookups.processes import Processes
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def has_one_writer() -> bool:
    return connections["default"].vendor == "sqlite"


@contextmanager
def blocks(order: tuple[str, str], kept: set[str]) -> Iterator[None]:
    """Open transactions, the first one outermost; roll back those that are not ``kept``."""
    with ExitStack() as stack:
        for alias in order:
            stack.enter_context(transaction.atomic(using=alias))
        yield
        for alias in set(order) - kept:
            transaction.set_rollback(True, using=alias)


@pytest.mark.parametrize("order", [("default", SHARD[TWO]), (SHARD[TWO], "default")])
@pytest.mark.parametrize(("keep_global", "keep_rows"), list(product([True, False], repeat=2)))
def test_each_order_and_end(
    accounts: Any, order: tuple[str, str], keep_global: bool, keep_rows: bool
) -> None:
    kept = {"default"} if keep_global else set[str]()
    kept |= {SHARD[TWO]} if keep_rows else set()
    before = entries("email")

    def write() -> None:
        with blocks(order, kept):
            PlainAccount.objects.create(id=1, user_id=ONE)  # Takes the lock of a file.
            Account.objects.filter(user_id=TWO).update(email="bob@y")
            Account.objects.create(id=3, user_id=TWO, email="new@x")

    if has_one_writer():
        with pytest.raises(LookupRefused, match="transaction open on 'default'"):
            write()
        assert entries("email") == before and not PlainAccount.objects.exists()
        keep_rows = False
    else:
        write()
        assert PlainAccount.objects.exists() == keep_global
    rows = {row.email for row in Account.objects.scatter()}
    assert rows == {"ada@x", "bob@y", "new@x"} if keep_rows else rows == {"ada@x", "bob@x"}
    assert differences() == {}
    # Exactly what the rows have is taken.
    for email in ("bob@x", "bob@y", "new@x"):
        if email in rows:
            with pytest.raises(LookupValueTaken):
                Account.objects.create(id=9, user_id=ONE, email=email)
        else:
            Account.objects.create(id=9, user_id=ONE, email=email).delete()


def test_after_a_refusal_the_other_transaction_goes_on(accounts: Any) -> None:
    if not has_one_writer():
        pytest.skip("Servers refuse nothing.")
    with transaction.atomic():
        PlainAccount.objects.create(id=1, user_id=ONE)
        for write in (
            lambda: Account.objects.create(id=3, user_id=TWO, email="new@x"),
            lambda: Account.objects.filter(user_id=TWO).update(email="bob@y"),
            accounts[1].delete,
        ):
            with pytest.raises(LookupRefused):
                write()
        # Other fields, and rows without a value, have no entries.
        Account.objects.filter(user_id=TWO).update(note="n")
        Account.objects.create(id=4, user_id=TWO)
        assert Account.objects.get(email="bob@x").note == "n"
        PlainAccount.objects.create(id=2, user_id=ONE)
    assert PlainAccount.objects.count() == 2
    assert differences() == {}


def test_a_table_in_other_files_is_not_waited_for(accounts: Any) -> None:
    with transaction.atomic():
        PlainAccount.objects.create(id=1, user_id=ONE)
        Member.objects.create(id=1, user_id=ONE, email="ada@x")
        with pytest.raises(LookupValueTaken):
            Member.objects.create(id=2, user_id=TWO, email="ada@x")
        transaction.set_rollback(True)
    assert Member.objects.get(email="ada@x").user_id == ONE
    assert differences() == {}


def test_a_transaction_on_the_shard_of_the_entry(accounts: Any) -> None:
    table = store.table_of("finders.member.email", "new@x")
    with transaction.atomic(using=table.alias):
        EmailEntry.objects.using(table.alias).filter(lookup="none").delete()
        if has_one_writer():
            with pytest.raises(LookupRefused, match=f"transaction open on '{table.alias}'"):
                Member.objects.create(id=1, user_id=ONE, email="new@x")
        else:
            Member.objects.create(id=1, user_id=ONE, email="new@x")
        transaction.set_rollback(True, using=table.alias)
    assert Member.objects.scatter().exists() != has_one_writer()
    assert differences() == {}


def test_on_files(tmp_path: Path, db: None) -> None:
    """A wait would last for minutes."""
    if not has_one_writer():
        pytest.skip("There are no files.")
    files = Processes(tmp_path)
    assert files.run(processes.beside_own_transaction, None) == ["refused", "ada@x"]
    assert files.run(processes.beside_own_transaction, "EXCLUSIVE") == ["refused", "ada@x"]


def test_the_check_tells_before() -> None:
    found = [m for m in checks.run_checks() if m.id == "sharded_orm_lookups.W004"]
    models = {message.obj for message in found}
    assert Account in models if has_one_writer() else not models
