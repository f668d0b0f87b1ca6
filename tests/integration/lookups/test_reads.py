"""Queries by a lookup go to the shards of its rows, without their key."""

from __future__ import annotations

import uuid
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from django.db import connections
from django.db.models import Q, Sum
from django.test.utils import CaptureQueriesContext

from sharded_orm.contrib.lookups import maintenance, states
from sharded_orm.exceptions import ShardKeyRequired
from tests.finders.models import Account, Ticket
from tests.integration.lookups.conftest import entries
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def test_each_kind_of_read_finds_the_shard(accounts: Any) -> None:
    ada, bob = accounts
    assert Account.objects.get(email="ada@x") == ada
    assert Account.objects.filter(serial=7).count() == 2
    assert list(Account.objects.filter(email__in=["ada@x", "bob@x", "?"]).order_by("id")) == [
        ada,
        bob,
    ]
    assert Account.objects.filter(serial="7", email="bob@x").get() == bob
    either = Account.objects.filter(Q(email="bob@x") | Q(user_id=ONE, serial=7))
    assert set(either) == {ada, bob}
    assert Account.objects.filter(email="bob@x").exists()
    assert Account.objects.filter(serial=7).aggregate(n=Sum("serial")) == {"n": 14}
    route = Account.objects.filter(email="bob@x").explain_routing()
    assert route.aliases == (SHARD[TWO],)
    assert "Account.email" in str(route)


def test_a_value_that_no_row_has_asks_no_shard(accounts: Any) -> None:
    with CaptureQueriesContext(connections["photos"]) as sent:
        assert not Account.objects.filter(email="nobody@x").exists()
        with pytest.raises(Account.DoesNotExist):
            Account.objects.get(serial=404)
    assert len(sent) == 0
    assert Account.objects.filter(email="ada@x").explain_routing().aliases == (SHARD[ONE],)


def test_text_is_compared_exactly(accounts: Any) -> None:
    for other in ("Ada@x", "ada@x ", "äda@x", "x" * 300):
        assert not Account.objects.filter(email=other).exists()


class Address(str, Enum):  # noqa: UP042  # its str() is another text than its value
    ADA = "ada@x"


@pytest.mark.parametrize(
    "query",
    [
        lambda: Account.objects.filter(email__iexact="ada@x"),
        lambda: Account.objects.exclude(email="ada@x"),
        lambda: Account.objects.filter(email=None),
        lambda: Account.objects.filter(email=Address.ADA),
        lambda: Account.objects.filter(Q(email="ada@x") | Q(note="")),
        # Two queries for entries: a row that goes from one value to the other would be missed.
        lambda: Account.objects.filter(Q(email="ada@x") | Q(serial=7)),
        lambda: Account.objects.filter(serial__in=range(501)),
        lambda: Ticket.objects.filter(account__email="ada@x"),
    ],
)
def test_other_conditions_are_refused_as_before(accounts: Any, query: Any) -> None:
    with pytest.raises(ShardKeyRequired):
        list(query())


def test_a_refusal_says_what_lookups_find(accounts: Any) -> None:
    with pytest.raises(ShardKeyRequired, match=r"only find rows by exact values .* at most 500"):
        Account.objects.filter(serial__in=range(501)).count()


def test_a_lookup_is_not_asked_if_the_key_is_given(accounts: Any) -> None:
    with CaptureQueriesContext(connections["default"]) as sent:
        assert Account.objects.get(user_id=ONE, email="ada@x") == accounts[0]
        assert Account.objects.scatter().get(email="ada@x") == accounts[0]
    assert len(sent) == 0


def test_a_lookup_that_is_not_served_is_named(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(states, "_served", set())
    states.withdraw("finders.account.email")
    with pytest.raises(ShardKeyRequired, match=r"\['email'\] are not served .*lookups build"):
        Account.objects.get(email="ada@x")
    assert Account.objects.filter(serial=7).count() == 2


def test_a_lookup_that_becomes_unique_is_built_again(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(states, "_served", set())
    (serial,) = maintenance.selected(["finders.account.serial"])
    unique = replace(serial, unique=True)
    assert states.is_served(serial)
    assert not states.is_served(unique)
    Account.objects.filter(user_id=ONE).update(serial=8)
    assert maintenance.build(unique).is_clean
    assert states.is_served(unique)
    assert not maintenance.check(serial).is_clean


def test_ids_of_the_shard_uuids_and_foreign_keys(accounts: Any) -> None:
    code = uuid.uuid4()
    one = Ticket.objects.create(user_id=ONE, code=code, account=accounts[0])
    two, three = Ticket.objects.bulk_create(
        [
            Ticket(user_id=TWO, code=code),
            Ticket(user_id=TWO, code=uuid.uuid4(), account=accounts[1]),
        ]
    )
    assert {(t.user_id, t.pk) for t in Ticket.objects.filter(code=str(code))} == {
        (ONE, one.pk),
        (TWO, two.pk),
    }
    assert Ticket.objects.get(account_id=2).pk == three.pk


def test_writes_by_a_lookup(accounts: Any) -> None:
    assert Account.objects.filter(email="bob@x").update(note="b", serial=8) == 1
    assert Account.objects.get(serial=8).note == "b"
    assert Account.objects.filter(serial=7).delete()[0] == 1
    assert Account.objects.scatter().get().email == "bob@x"
    account, created = Account.objects.get_or_create(
        email="bob@x", defaults={"user_id": ONE, "id": 5}
    )
    assert (account.id, created) == (2, False)
    account, created = Account.objects.get_or_create(
        email="new@x", defaults={"user_id": ONE, "id": 5}
    )
    assert (account.id, created) == (5, True)
    account, created = Account.objects.update_or_create(email="new@x", defaults={"note": "n"})
    assert (account.id, account.note, created) == (5, "n", False)
    # A test case commits nothing, so the entry of the deleted row is still there.
    assert entries("email") == [("ada@x", "1"), ("bob@x", "2"), ("new@x", "1")]
