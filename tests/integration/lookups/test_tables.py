"""Entries in a table of the project, on the shard that the value itself names (Pinterest, P11)."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction

from sharded_orm.contrib.lookups import entries, maintenance, states
from sharded_orm.contrib.lookups import transaction as lookup_transaction
from sharded_orm.contrib.lookups.declaration import lookups_by_name
from sharded_orm.contrib.lookups.exceptions import LookupRefused, LookupValueTaken
from sharded_orm.contrib.lookups.models import LookupEntry, LookupState
from sharded_orm.exceptions import ShardKeyRequired
from tests.finders.models import EmailEntry, Member
from tests.integration.lookups.conftest import differences
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

NAME = "finders.member.email"


@pytest.fixture
def members(accounts: Any) -> Any:
    return (
        Member.objects.create(id=1, user_id=ONE, email="1.2.3.4"),
        Member.objects.create(id=2, user_id=TWO, email="bob@x"),
    )


def stored() -> list[tuple[str, str]]:
    """Value and key of each entry. Fails if one is on a wrong shard."""
    rows = []
    for number in range(8):
        for entry in EmailEntry.objects.using(f"events_{number:05}"):
            digest = hashlib.md5(entry.value.encode(), usedforsecurity=False).hexdigest()
            assert int(digest, 16) % 8 == number
            rows.append((entry.value, entry.key))
    return sorted(rows)


def test_each_entry_is_on_the_shard_of_its_value(members: Any) -> None:
    assert entries.table_of(NAME, "1.2.3.4").alias == f"events_{1537 % 8:05}"  # The value of P11.
    assert stored() == [("1.2.3.4", str(ONE)), ("bob@x", str(TWO))]
    assert not LookupEntry.objects.filter(lookup=NAME).exists()
    assert [Member.objects.get(email=m.email) for m in members] == list(members)
    assert not Member.objects.filter(email="nobody@x").exists()
    for email in ("bob@x", "1.2.3.4"):
        with pytest.raises(LookupValueTaken):
            Member.objects.create(id=3, user_id=ONE, email=email)
    Member.objects.bulk_create(
        Member(id=10 + n, user_id=(ONE, TWO)[n % 2], email=f"{n}@x", serial=n) for n in range(20)
    )
    Member.objects.filter(user_id=ONE, serial__lt=10).update(email=None)
    Member.objects.filter(user_id=TWO, serial__gt=10).delete()
    assert len(stored()) == 12 and differences() == {}
    # The row may go from a value of one shard to a value of another between two queries.
    with pytest.raises(ShardKeyRequired):
        list(Member.objects.filter(email__in=["bob@x", "1.2.3.4"]))


def test_transactions(members: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        Member.objects.create(id=3, user_id=ONE, email="new@x")
        members[0].delete()
        assert ("new@x", str(ONE)) in stored()
        raise ZeroDivisionError
    assert stored() == [("1.2.3.4", str(ONE)), ("bob@x", str(TWO))]
    assert differences() == {}


@pytest.mark.mysql_settings
def test_beside_a_transaction_on_the_shards_of_the_entries(members: Any) -> None:
    with transaction.atomic(using="events"), transaction.atomic(using="photos"):
        list(EmailEntry.objects.using(entries.table_of(NAME, "new@x").alias))
        Member.objects.create(id=3, user_id=ONE, email="new@x")
        assert Member.objects.get(email="new@x").id == 3
        transaction.set_rollback(True, using="events")
    assert Member.objects.get(email="new@x").id == 3
    assert differences() == {}


def test_commands(members: Any, capsys: Any) -> None:
    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute("UPDATE finders_member SET email = 'raw@x' WHERE id = 1")
    assert differences() == {NAME: (1, 1, 0)}
    call_command("lookups", "check", NAME, "--repair")
    assert differences() == {}
    assert stored() == [("bob@x", str(TWO)), ("raw@x", str(ONE))]
    assert {s.lookup: s.entries for s in maintenance.statuses()}[NAME] == 2
    call_command("lookups", "drop", NAME)
    assert stored() == []
    capsys.readouterr()
    call_command("lookups", "status")
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if NAME in line]
    assert shown.split() == [NAME, "yes", "no", "0"]
    with pytest.raises(CommandError, match=r"There are .*'finders\.member\.email'"):
        call_command("lookups", "build", "finders.member.nothing")
    call_command("lookups", "build", NAME)
    assert Member.objects.get(email="raw@x").id == 1


def test_a_lookup_that_gets_a_table_is_built_again(members: Any) -> None:
    lookup = lookups_by_name()[NAME]
    assert states.is_served(lookup)
    assert not states.is_served(replace(lookup, table_name=None))
    assert not states.is_served(replace(lookup, table_name="finders.OtherEntry"))


def test_the_former_table_is_dropped_before_the_new_one_is_written(
    accounts: Any, monkeypatch: Any
) -> None:
    """Processes with the former declaration would not find what others write to the new table."""
    LookupState.objects.filter(lookup=NAME).update(table="")
    former = {"slot": "", "token": "t", "is_open": False, "writer": "", "written_at": 0}
    LookupEntry.objects.create(lookup=NAME, value="old@x", key=str(ONE), **former)
    monkeypatch.setattr(states, "_served", set())
    with pytest.raises(LookupRefused, match=r"lookups drop finders\.member\.email"):
        Member.objects.create(id=1, user_id=ONE, email="new@x")
    with pytest.raises(CommandError, match=r"lookups drop finders\.member\.email"):
        call_command("lookups", "build", NAME)
    assert not Member.objects.scatter().exists() and stored() == []
    Member.objects.create(id=1, user_id=ONE)
    call_command("lookups", "drop", NAME)
    assert not LookupEntry.objects.filter(lookup=NAME).exists()
    Member.objects.filter(user_id=ONE).update(email="new@x")
    call_command("lookups", "build", NAME)
    assert Member.objects.get(email="new@x").id == 1


def test_entries_of_a_lookup_that_is_not_declared_any_more(members: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(states, "_served", set())
    for module in (states, entries):
        monkeypatch.setattr(module, "lookups_by_name", dict)
    states.after_migrate(using="default")
    assert not LookupState.objects.filter(served_since__isnull=False).exists()
    assert maintenance.drop(NAME) == 2
    assert stored() == []
    assert not LookupState.objects.filter(lookup=NAME).exists()


def test_a_shard_of_entries_is_down_at_a_rollback(members: Any, monkeypatch: Any) -> None:
    emails = {entries.table_of(NAME, f"{n}@x").alias: f"{n}@x" for n in range(60)}
    down = "events_00003"
    monkeypatch.setattr(lookup_transaction, "CLOSE_AFTER", 0)

    def refuse(*args: Any) -> None:
        raise OperationalError("The shard is down.")

    with ExitStack() as stack:
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
            Member.objects.bulk_create(
                Member(id=10 + n, user_id=ONE, email=email)
                for n, email in enumerate(emails.values())
            )
            stack.enter_context(connections[down].execute_wrapper(refuse))
            raise ZeroDivisionError
    # The values of the other shards are free at once.
    (left,) = {value for value, _ in stored()} - {"1.2.3.4", "bob@x"}
    assert left == emails[down]
    Member.objects.create(id=3, user_id=TWO, email=emails["events_00000"])
    assert not EmailEntry.objects.using(down).get(value=left).is_open
    Member.objects.create(id=4, user_id=TWO, email=left)
    assert differences() == {}


def test_wrong_tables() -> None:
    lookup = lookups_by_name()[NAME]
    assert lookup.problem is None
    for name, problem in (
        ("finders.Nothing", "derives from LookupTable"),
        ("finders.Account", "derives from LookupTable"),
    ):
        assert problem in str(replace(lookup, table_name=name).problem)
    options = replace(lookup.options, group="events")
    assert "in the group of its rows" in str(replace(lookup, options=options).problem)
