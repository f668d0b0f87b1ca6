"""Each way to write rows keeps their lookups right, and unique values are unique over all shards."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db import DataError, IntegrityError, connections, transaction
from django.db.models import Case, F, Value, When
from django.db.models.functions import Upper
from django.test.utils import CaptureQueriesContext

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.contrib.lookups import entries as store
from sharded_orm.contrib.lookups import maintenance, row_changes, states
from sharded_orm.contrib.lookups import transaction as lookup_transaction
from sharded_orm.contrib.lookups.entries import Place
from sharded_orm.contrib.lookups.exceptions import LookupExpired, LookupRefused, LookupValueTaken
from sharded_orm.contrib.lookups.models import LookupEntry
from tests.finders.models import Account, Ticket
from tests.integration.lookups.conftest import differences, entries
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def emails() -> list[str]:
    return [value for value, _ in entries("email")]


def test_every_way_to_write_a_row(accounts: Any) -> None:
    ada, bob = accounts
    Account.objects.bulk_create(
        [
            Account(id=n, user_id=key, email=f"{n}@x", serial=n)
            for n, key in ((3, ONE), (4, TWO), (5, NEAR))
        ]
    )
    assert differences() == {}
    ada.email = "ada@y"
    ada.save()
    bob.email = None
    bob.save(update_fields=["email"])
    assert emails() == ["3@x", "4@x", "5@x", "ada@y"]
    rows = list(Account.objects.scatter().filter(id__in=[3, 4, 5]))
    for row in rows:
        row.email, row.serial = f"{row.id}@z", None
    assert Account.objects.bulk_update(rows, ["email", "serial"]) == 3
    assert emails() == ["3@z", "4@z", "5@z", "ada@y"]
    assert Account.objects.filter(user_id=ONE).update(serial=9) == 2
    assert Account.objects.filter(email="5@z").update(email=Value("5@w")) == 1
    assert Account.objects.get(email="5@w").id == 5
    data = (
        serializers.serialize("json", [ada]).replace("ada@y", "fix@x").replace('"pk": 1', '"pk": 6')
    )
    for row in serializers.deserialize("json", data):
        row.save()
    assert Account.objects.get(email="fix@x").id == 6
    assert differences() == {}
    # Cascades, and deletes by a query and of an instance.
    Ticket.objects.create(user_id=ONE, account=ada, code=uuid.uuid4())
    ada.delete()
    assert Account.objects.filter(user_id=TWO).delete()[0] == 2
    assert differences() == {}
    assert emails() == ["3@z", "5@w", "fix@x"]
    assert not LookupEntry.objects.filter(lookup__startswith="finders.ticket").exists()


def test_a_unique_value_is_unique_over_all_shards(accounts: Any) -> None:
    with pytest.raises(LookupValueTaken, match="unique over all shards") as error:
        Account.objects.create(id=3, user_id=TWO, email="ada@x")
    assert isinstance(error.value, IntegrityError)
    with pytest.raises(LookupValueTaken):
        Account.objects.filter(id__in=[1, 2]).scatter().update(email="same@x")
    # As any write to several shards, it is not atomic over them: the first has the value now.
    with pytest.raises(IntegrityError):
        Account.objects.filter(user_id=TWO).update(email="same@x")
    with pytest.raises(IntegrityError):
        Account.objects.bulk_create([Account(id=n, user_id=ONE, email="twice@x") for n in (3, 4)])
    assert Account.objects.scatter().count() == 2
    assert Account.objects.get(email="bob@x").id == 2
    Account.objects.create(id=3, user_id=TWO, email="twice@x")
    Account.objects.create(id=4, user_id=TWO, email=None)
    Account.objects.create(id=5, user_id=ONE, email=None)


def test_a_value_is_free_again(accounts: Any) -> None:
    ada, bob = accounts
    ada.delete()
    bob.email = "ada@x"
    bob.save()
    Account.objects.create(id=3, user_id=ONE, email="bob@x")
    assert differences() == {}
    with pytest.raises(IntegrityError):  # of the shard
        Account.objects.create(id=3, user_id=ONE, email="free@x")
    Account.objects.create(id=4, user_id=ONE, email="free@x")


def test_a_rollback_gives_values_back(accounts: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        Account.objects.create(id=3, user_id=ONE, email="new@x")
        Account.objects.filter(user_id=ONE, id=1).update(email="other@x", serial=1)
        Account.objects.filter(user_id=ONE, id=1).delete()
        assert "new@x" in emails()
        raise ZeroDivisionError
    assert differences() == {} or emails() == ["ada@x", "bob@x", "other@x"]
    assert Account.objects.get(email="ada@x").serial == 7
    Account.objects.create(id=3, user_id=TWO, email="new@x")
    Account.objects.create(id=4, user_id=TWO, email="other@x")


@pytest.mark.parametrize("manual", [False, True])
def test_savepoints(accounts: Any, manual: bool) -> None:
    alias = SHARD[ONE]

    def write() -> None:
        Account.objects.create(id=3, user_id=ONE, email="new@x", serial=3)
        Account.objects.filter(user_id=ONE, id=1).update(email="other@x", serial=1)

    with transaction.atomic(using=alias):
        Account.objects.create(id=4, user_id=ONE, email="kept@x", serial=4)
        if manual:
            sid = transaction.savepoint(using=alias)
            write()
            transaction.savepoint_rollback(sid, using=alias)
        else:
            with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
                write()
                raise ZeroDivisionError
        assert Account.objects.get(email="ada@x").id == 1
    assert emails() == ["ada@x", "bob@x", "kept@x"]
    assert {a.id for a in Account.objects.filter(serial=7)} == {1, 2}
    assert differences() == {}


def test_a_value_goes_from_row_to_row_in_one_transaction(accounts: Any) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        accounts[0].delete()
        Account.objects.create(id=3, user_id=ONE, email="ada@x", serial=7)
        with pytest.raises(IntegrityError), transaction.atomic(using=SHARD[ONE]):
            Account.objects.create(id=4, user_id=ONE, email="ada@x")
    assert Account.objects.get(email="ada@x").id == 3
    with transaction.atomic(using="photos"):
        # Until the deletion is committed, others find the row by its key.
        Account.objects.get(email="ada@x").delete()
        with pytest.raises(LookupValueTaken), transaction.atomic(using="photos"):
            Account.objects.create(id=5, user_id=TWO, email="ada@x")
    Account.objects.create(id=5, user_id=TWO, email="ada@x")
    assert differences() == {}


def test_others_find_a_row_until_its_change_is_committed(accounts: Any) -> None:
    seen: dict[str, Any] = {}

    def look(step: str) -> None:
        def read() -> None:
            try:
                seen[step] = [
                    [row.id for row in Account.objects.filter(email=email)]
                    for email in ("ada@x", "eve@x")
                ]
            finally:
                connections.close_all()

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    with transaction.atomic(using=SHARD[ONE]):
        Account.objects.filter(user_id=ONE, email="ada@x").update(email="eve@x")
        look("open")
        assert Account.objects.get(email="eve@x").id == 1
    look("committed")
    assert seen == {"open": [[1], []], "committed": [[], [1]]}


def chosen_by(**conditions: Any) -> Case:
    return Case(When(then=Value("eve@x"), **conditions), default=Value("ada@x"))


@pytest.mark.parametrize(
    "write",
    [
        lambda: Account.objects.filter(user_id=ONE).update(email=Upper("email")),
        lambda: Account.objects.filter(user_id=ONE).update(serial=F("serial") + 1),
        lambda: Account.objects.filter(user_id=ONE).update(id=9),
        lambda: Account.objects.filter(user_id=ONE).update(email=chosen_by(note="")),
        lambda: Account.objects.filter(user_id=ONE).update(email=chosen_by(id__gt=0)),
        lambda: Account.objects.filter(user_id=ONE).update(email=chosen_by(id=1, note="")),
        lambda: Ticket.objects.create(user_id=ONE, code="no UUID"),
        lambda: Account.objects.bulk_create([Account(id=9, user_id=ONE)], ignore_conflicts=True),
        lambda: Account.objects.create(id=9, user_id=ONE, email="x" * 61),
    ],
)
def test_what_cannot_be_followed_is_refused(accounts: Any, write: Any) -> None:
    with pytest.raises((LookupRefused, DataError)):  # servers refuse a text that is too long
        write()
    assert Account.objects.scatter().count() == 2
    assert differences() == {}


@pytest.mark.parametrize("pk", [[], [9]])
def test_a_write_of_no_row_changes_no_entry(accounts: Any, pk: list[int]) -> None:
    none = Account.objects.filter(user_id=ONE, pk__in=pk)
    assert (none.update(email="eve@x"), none.delete()) == (0, (0, {}))
    assert none._raw_delete(SHARD[ONE]) == 0
    assert emails() == ["ada@x", "bob@x"]
    assert differences() == {}


def test_an_update_of_too_many_rows_is_refused(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(row_changes, "MAX_UPDATED", 1)
    Account.objects.create(id=3, user_id=ONE, serial=1)
    with pytest.raises(LookupRefused, match="more than 1 rows"):
        Account.objects.filter(user_id=ONE).update(serial=2)
    assert Account.objects.filter(user_id=ONE).update(note="n") == 2
    assert Account.objects.filter(user_id=ONE).delete()[0] == 2


@pytest.mark.parametrize(
    "write", [lambda rows: rows.update(email="new@x"), lambda rows: rows._raw_delete(SHARD[ONE])]
)
def test_conditions_on_other_tables_are_evaluated_once(accounts: Any, write: Any) -> None:
    """If the other table changes in between, the statement still changes the rows that were read."""
    ticket = Ticket.objects.create(user_id=ONE, account=accounts[0], code=uuid.uuid4())
    is_done = False

    def after_the_read(execute: Any, sql: str, *args: Any) -> Any:
        nonlocal is_done
        result = execute(sql, *args)
        if not is_done and sql.startswith("SELECT"):
            is_done = True
            with connections[SHARD[ONE]].cursor() as cursor:
                cursor.execute("DELETE FROM finders_ticket WHERE id = %s", [ticket.pk])
        return result

    with connections[SHARD[ONE]].execute_wrapper(after_the_read):
        write(Account.objects.using(SHARD[ONE]).filter(user_id=ONE, tickets__code=ticket.code))
    assert is_done
    assert {email for email in emails() if email != "bob@x"} == {
        row.email for row in Account.objects.filter(user_id=ONE)
    }


def delete_without_entries(pk: int) -> None:
    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute("DELETE FROM finders_account WHERE id = %s", [pk])


def test_entries_that_a_repair_removes_before_they_are_taken_over(
    accounts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_without_entries(1)
    take, removed = store.take, []

    def take_late(place: Place, *args: Any) -> bool:
        if place not in removed:
            removed.append(place)
            LookupEntry.objects.filter(lookup=place.lookup, value=place.value, key=ONE).delete()
        return take(place, *args)

    monkeypatch.setattr(store, "take", take_late)
    Account.objects.create(id=1, user_id=ONE, email="ada@x", serial=7)
    assert sorted(place.value for place in removed) == ["7", "ada@x"]
    assert differences() == {}


def test_a_value_that_others_write_again_and_again(
    accounts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_without_entries(1)
    take = store.take

    def take_late(place: Place, *args: Any) -> bool:
        entry = LookupEntry.objects.filter(value=place.value)
        entry.update(token=uuid.uuid4().hex, is_open=False)
        return take(place, *args)

    monkeypatch.setattr(store, "take", take_late)
    with pytest.raises(LookupValueTaken, match="again and again"):
        Account.objects.create(id=3, user_id=ONE, email="ada@x")
    monkeypatch.undo()
    assert not Account.objects.filter(user_id=ONE).exists()
    Account.objects.create(id=3, user_id=ONE, email="ada@x")
    assert Account.objects.get(email="ada@x").id == 3


def test_a_row_without_its_entry_is_never_committed(accounts: Any, monkeypatch: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(store, "add", fails)
    with pytest.raises(ZeroDivisionError):
        Account.objects.create(id=3, user_id=ONE, email="new@x")
    with pytest.raises(LookupRefused, match="lookups could not be written"):
        with transaction.atomic(using=SHARD[ONE]):
            with pytest.raises(ZeroDivisionError):
                Account.objects.create(id=3, user_id=ONE, email="new@x")
            transaction.set_rollback(False, using=SHARD[ONE])
    monkeypatch.undo()
    assert Account.objects.scatter().count() == 2


def test_an_entry_without_a_row_does_no_harm(accounts: Any) -> None:
    for value in ("ghost@x", "spook@x"):
        LookupEntry.objects.create(
            lookup="finders.account.email", value=value, slot="", key=str(ONE), token=value,
            is_open=False, writer="", written_at=0,
        )  # fmt: skip
    assert not Account.objects.filter(email="ghost@x").exists()
    defaults = {"id": 3, "user_id": TWO}
    assert Account.objects.get_or_create(email="ghost@x", defaults=defaults)[1]
    account, created = Account.objects.get_or_create(email="ghost@x", defaults={"user_id": ONE})
    assert (account.id, account.user_id, created) == (3, TWO, False)
    assert differences() == {"finders.account.email": (0, 1, 0)}
    call_command("lookups", "check", "--repair")
    assert differences() == {}


@pytest.mark.parametrize("method", ["get_or_create", "update_or_create"])
def test_a_row_that_is_deleted_before_it_is_got_or_created(accounts: Any, method: str) -> None:
    """The row was on the shard of another key than that of the new row."""
    is_gone = False

    def delete_after_look(execute: Any, sql: str, *args: Any) -> Any:
        nonlocal is_gone
        result = execute(sql, *args)
        if not is_gone and sql.startswith("SELECT"):
            is_gone = True
            with connections[SHARD[TWO]].cursor() as cursor:
                cursor.execute("DELETE FROM finders_account WHERE id = 2")
        return result

    defaults = {"id": 3, "user_id": ONE} if method == "get_or_create" else {"note": "n"}
    more = {} if method == "get_or_create" else {"create_defaults": {"id": 3, "user_id": ONE}}
    with connections[SHARD[TWO]].execute_wrapper(delete_after_look):
        row, created = getattr(Account.objects, method)(email="bob@x", defaults=defaults, **more)
    assert is_gone and created
    assert Account.objects.get(email="bob@x") == row
    assert (row.id, row.user_id) == (3, ONE)


def test_raw_sql_is_found_by_the_command(accounts: Any, capsys: Any) -> None:
    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute("UPDATE finders_account SET email = 'raw@x' WHERE id = 1")
    assert differences() == {"finders.account.email": (1, 1, 0)}
    with pytest.raises(CommandError, match="raw@x"):
        call_command("lookups", "check")
    call_command("lookups", "check", "--repair")
    assert differences() == {}
    assert Account.objects.get(email="raw@x").id == 1
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute("UPDATE finders_account SET email = 'raw@x' WHERE id = 2")
    with pytest.raises(CommandError, match="another row has the same value"):
        call_command("lookups", "check", "--repair")
    assert Account.objects.get(email="raw@x").id == 1


def test_a_lookup_for_rows_that_exist_before_it(accounts: Any, monkeypatch: Any) -> None:
    call_command("lookups", "drop", "finders.account.email")
    assert entries("email") == []
    Account.objects.create(id=3, user_id=ONE, email="new@x")
    accounts[0].delete()
    accounts[1].email = "bob@y"
    accounts[1].save()
    Account.objects.create(id=4, user_id=NEAR, email="bob@x")
    for _ in range(2):
        call_command("lookups", "build", "finders.account.email")
        assert entries("email") == [("bob@x", str(NEAR)), ("bob@y", str(TWO)), ("new@x", str(ONE))]
    assert Account.objects.get(email="bob@y").id == 2
    assert differences() == {}


def test_values_of_rows_that_are_older_than_the_lookup(accounts: Any) -> None:
    call_command("lookups", "drop", "finders.account.email")
    for key in (ONE, NEAR, TWO):
        with pytest.raises(LookupValueTaken, match="older than the lookup"):
            Account.objects.create(id=3, user_id=key, email="ada@x")
    with pytest.raises(LookupValueTaken, match="older than the lookup"):
        Account.objects.filter(user_id=TWO).update(email="ada@x")
    rows = [Account(id=4, user_id=TWO, email="new@x"), Account(id=5, user_id=TWO, email="ada@x")]
    with pytest.raises(LookupValueTaken, match="older than the lookup"):
        Account.objects.bulk_create(rows)
    # The row itself may have its value again, and so may another row when it is gone.
    with transaction.atomic(using=SHARD[ONE]):
        for email in ("eve@x", "ada@x"):
            Account.objects.filter(user_id=ONE).update(email=email)
    accounts[0].delete()
    Account.objects.create(id=3, user_id=TWO, email="ada@x")
    call_command("lookups", "build", "finders.account.email")
    assert entries("email") == [("ada@x", str(TWO)), ("bob@x", str(TWO))]
    with CaptureQueriesContext(connections[SHARD[ONE]]) as sent:
        Account.objects.create(id=6, user_id=TWO, email="new@x")
    assert len(sent) == 0  # Other shards are not asked any more.


@pytest.mark.parametrize("key", [ONE, TWO])
def test_a_build_beside_an_open_transaction(accounts: Any, key: int) -> None:
    """What a transaction has written, and removes when it is rolled back, is no entry of a row."""
    call_command("lookups", "drop", "finders.account.email")
    built: list[Any] = []

    def build() -> None:
        try:
            if key == TWO:  # A process without the declaration stores the value, too.
                with connections[SHARD[ONE]].cursor() as cursor:
                    cursor.execute("UPDATE finders_account SET email = 'eve@x' WHERE id = 1")
            built.append(maintenance.build(maintenance.selected(["finders.account.email"])[0]))
        finally:
            AutonomousConnections.close_all()
            connections.close_all()

    email = "ada@x" if key == ONE else "eve@x"
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[key]):
        if key == ONE:
            accounts[0].delete()
        Account.objects.create(id=3, user_id=key, email=email)
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    if key == TWO:  # the value is reserved for a row of another key
        assert not built[0].is_clean and not states.is_served(
            maintenance.selected(["finders.account.email"])[0]
        )
        assert differences() == {"finders.account.email": (1, 0, 0)}
        call_command("lookups", "build", "finders.account.email")
    assert differences() == {}
    assert states.is_served(maintenance.selected(["finders.account.email"])[0])
    assert Account.objects.get(email=email).id == 1


def test_an_entry_that_was_renewed_is_not_taken(accounts: Any) -> None:
    entry = store.entry_at(store.Place("finders.account.email", "ada@x", ""))
    assert entry is not None
    store.renew(store.GLOBAL_TABLE, [entry.token])
    assert not store.take(entry.place, str(TWO), "other", "", entry)
    assert not store.remove_entry(entry)
    renewed = store.entry_at(entry.place)
    assert renewed is not None and renewed.key == str(ONE)
    assert store.take(entry.place, str(TWO), "other", "", renewed)


def test_manual_transactions(accounts: Any) -> None:
    connection = connections[SHARD[ONE]]
    connection.set_autocommit(False)
    try:
        Account.objects.filter(user_id=ONE, id=1).update(email="eve@x")
        connection.rollback()
        Account.objects.filter(user_id=ONE, id=1).update(serial=8)
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert entries("serial") == [("7", str(TWO)), ("8", str(ONE))]
    assert Account.objects.get(email="ada@x").serial == 8
    Account.objects.create(id=3, user_id=TWO, email="eve@x")
    assert differences() == {}


def test_a_transaction_that_lasts_too_long(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lookup_transaction, "QUARANTINE", -1.0)  # each transaction lasts longer
    with transaction.atomic(using=SHARD[ONE]):
        Account.objects.create(id=3, user_id=ONE, email="new@x", serial=3)
        Account.objects.filter(user_id=ONE, id=1).update(email="eve@x")
        Account.objects.filter(user_id=ONE, id=3).delete()
    assert differences() == {}
    with pytest.raises(LookupExpired, match="new@x"):
        with transaction.atomic(using=SHARD[ONE]):
            Account.objects.create(id=3, user_id=ONE, email="new@x")
            # As another process does that takes the writer for dead.
            LookupEntry.objects.filter(value="new@x").update(token="other", is_open=False)
    assert not Account.objects.filter(user_id=ONE, id=3).exists()
