"""A process remembers the keys of unique values, and reads what is stored now all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import Count, Q
from django.test.utils import CaptureQueriesContext

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.contrib.lookups import key_source
from sharded_orm.models.sharding import key_sources
from tests.finders.models import Account
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

#: The same question in many forms: each returns the ids of the rows with an address.
READS: dict[str, Callable[[str], Any]] = {
    "get": lambda email: [Account.objects.get(email=email).id],
    "rows": lambda email: [row.id for row in Account.objects.filter(email=email)],
    "values": lambda email: list(
        Account.objects.filter(email=email).values_list("id", flat=True).order_by("id")
    ),
    "first": lambda email: [Account.objects.filter(email=email).first().id],  # type: ignore[union-attr]
    "get_or_create": lambda email: [
        Account.objects.get_or_create(email=email, defaults={"id": 9, "user_id": ONE})[0].id
    ],
    "other conditions": lambda email: [
        row.id for row in Account.objects.filter(email=email, note="", serial__in=[7, 8])
    ],
    "iterator": lambda email: [row.id for row in Account.objects.filter(email=email).iterator()],
    "either": lambda email: sorted(
        row.id for row in Account.objects.filter(Q(email=email) | Q(user_id=5, serial=7))
    ),
    "groups": lambda email: [
        row["id"]
        for row in Account.objects.filter(email=email).values("id").annotate(n=Count("pk"))
    ],
}


def count_lookups(read: Callable[[], Any]) -> int:
    """Return the number of queries of the global database."""
    with CaptureQueriesContext(connections["default"]) as sent:
        read()
    return len(sent)


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    for source in key_sources._sources:
        if isinstance(source, key_source.EntryKeySource):
            source._remembered.clear()


def test_a_lookup_is_asked_once(accounts: Any) -> None:
    assert count_lookups(lambda: Account.objects.get(email="ada@x")) == 1
    for read in (
        lambda: Account.objects.get(email="ada@x"),
        lambda: list(Account.objects.filter(email="ada@x", serial=7).order_by("note")),
        lambda: Account.objects.filter(email="ada@x").exists(),
        lambda: Account.objects.filter(email="ada@x").only("id").first(),
    ):
        assert count_lookups(read) == 0
    # Two rows may have this number. The first query of a process also asks whether the lookup is served.
    assert Account.objects.filter(serial=7).exists()
    for _ in range(2):
        assert count_lookups(lambda: list(Account.objects.filter(serial=7))) == 1


@pytest.mark.parametrize("name", READS)
def test_a_value_that_has_gone_to_another_key(accounts: Any, name: str) -> None:
    read = READS[name]
    for _ in range(2):
        assert read("ada@x") == [1]
    accounts[0].delete()
    Account.objects.create(id=3, user_id=TWO, email="ada@x", serial=7)
    for _ in range(3):
        assert read("ada@x") == [3]


def test_a_value_that_is_gone(accounts: Any) -> None:
    mine = Account.objects.filter(email="ada@x")
    assert mine.exists()
    Account.objects.filter(email="ada@x").update(email="eve@x")
    assert not mine.exists() and list(mine.all()) == []
    with pytest.raises(Account.DoesNotExist):
        mine.get()
    # No row with other conditions is no reason to ask the shard in vain the next time.
    assert Account.objects.filter(email="eve@x", note="").exists()
    assert not Account.objects.filter(email="eve@x", note="n").exists()
    assert count_lookups(lambda: Account.objects.filter(email="eve@x", note="n").exists()) == 1


def test_only_as_many_are_remembered(accounts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_source, "MAX_REMEMBERED", 1)
    for _ in range(2):
        for email in ("ada@x", "bob@x"):
            assert count_lookups(lambda: Account.objects.get(email=email)) == 1  # noqa: B023
    assert count_lookups(lambda: Account.objects.get(email="bob@x")) == 0


def test_a_transaction_reads_what_it_has_written(accounts: Any) -> None:
    Account.objects.get(email="ada@x")
    with transaction.atomic(using=SHARD[ONE]):
        Account.objects.filter(user_id=ONE).update(email="eve@x")
        assert not Account.objects.filter(email="ada@x").exists()
        assert Account.objects.get(email="eve@x").id == 1


@pytest.mark.long
@pytest.mark.mysql_settings
def test_readers_beside_a_value_that_goes_from_key_to_key(accounts: Any) -> None:
    """What a reader has seen, it never sees undone."""
    is_over = threading.Event()
    errors: list[Any] = []

    def read_always() -> None:
        last = 0
        try:
            while not is_over.is_set():
                for row in Account.objects.filter(email="hot@x"):
                    if row.serial < last:
                        errors.append((last, row.serial))
                    last = row.serial
        except Exception as exc:
            errors.append(exc)
        finally:
            AutonomousConnections.close_all()
            connections.close_all()

    readers = [threading.Thread(target=read_always) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number in range(1, 41):
            key = (ONE, TWO)[number % 2]
            row = Account.objects.create(id=100 + key, user_id=key, email="hot@x", serial=number)
            row.delete()
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert errors == []
