"""Lookups together with moves of keys, migrations, cached models and forms of a project."""

from __future__ import annotations

import time
import uuid
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.core import checks
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connections, models, transaction
from django.db.migrations.state import ProjectState
from django.test.utils import CaptureQueriesContext, isolate_apps

from sharded_orm import ShardedModel, atomic, bound, runtime
from sharded_orm.contrib.lookups import Lookup, declaration
from sharded_orm.contrib.lookups.checks import check_lookups
from sharded_orm.contrib.lookups.declaration import ModelLookup
from sharded_orm.contrib.lookups.exceptions import LookupRefused, LookupValueTaken
from sharded_orm.contrib.lookups.tables import LookupTable
from sharded_orm.exceptions import TwoPhaseUnavailable
from sharded_orm.models.fields import PackedIDField
from sharded_orm.models.sharding.options import shard_options
from tests.finders.models import Account, Ticket
from tests.integration.lookups.conftest import differences, entries
from tests.integration.two_phase.conftest import app as app
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.queries.moves.hand_move import HandMove, before_statement
from tests.versions import HAS_DATABASE_ON_DELETE

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.mark.parametrize("has_plans", [False, True])
def test_a_key_moves(accounts: Any, has_plans: bool) -> None:
    for _ in range(3 if has_plans else 0):
        assert Account.objects.get(email="ada@x").id == 1
        assert Account.objects.filter(serial=7).exists()
        assert len(Account.objects.filter(serial=7)) == Account.objects.filter(serial=7).count()
        assert not Account.objects.filter(email="nobody@x").exists()
    # A test may have turned the clock of the lease. Without its last poll, polls are numbered anew, so
    # placements that were remembered under a higher number must go, too.
    runtime.placement_lease()._poll = None
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    move = HandMove(ONE, {Account._meta.db_table: "user_id"}, int(SHARD[ONE][-5:]), 5)
    move.announce()
    assert Account.objects.get(email="ada@x").id == 1
    move.publish()
    assert Account.objects.get(email="ada@x")._state.db == SHARD[ONE]
    assert Account.objects.filter(serial=7).count() == 2
    # A read that was on its way to the old shard is repeated.
    with before_statement(move.source, move.switch_directory):
        assert Account.objects.get(email="ada@x")._state.db == "photos_00005"
    # The old rows are still there, and no lookup leads to them.
    assert Account.objects.get(email="ada@x")._state.db == "photos_00005"
    assert {row.id for row in Account.objects.filter(serial=7)} == {1, 2}
    Account.objects.filter(email="ada@x").update(serial=8)
    assert differences() == {}
    assert Account.objects.get(serial=8).email == "ada@x"
    # Another key on the old shard gets the value that an old row there still has.
    Account.objects.filter(email="ada@x").update(email="ada@y", serial=9)
    Account.objects.create(id=3, user_id=NEAR, email="ada@x", serial=7)
    assert Account.objects.get(email="ada@x").id == 3
    assert {row.id for row in Account.objects.filter(serial=7)} == {2, 3}
    assert Account.objects.filter(email="ada@x").update(note="n") == 1
    Account.objects.filter(user_id=NEAR).delete()
    # The old row is no proof of what was remembered.
    assert not Account.objects.filter(email="ada@x").exists()
    assert Account.objects.get(email="ada@y").serial == 9


def test_a_key_moves_while_its_lookup_is_built(accounts: Any) -> None:
    """It leaves a shard that was not read yet, for one that was."""
    runtime.placement_lease()._poll = None
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    call_command("lookups", "drop", "finders.account.email")
    move = HandMove(ONE, {Account._meta.db_table: "user_id"}, int(SHARD[ONE][-5:]), 1)
    with before_statement(2, move.whole):
        call_command("lookups", "build", "finders.account.email")
    assert Account.objects.get(email="ada@x")._state.db == "photos_00001"
    assert differences() == {}


def test_a_migration_writes_rows(accounts: Any) -> None:
    historical: Any = ProjectState.from_apps(apps).apps.get_model("finders", "Account")
    rows = historical.objects.using(SHARD[ONE])
    rows.create(id=3, user_id=ONE, email="old@x", serial=3)
    row = rows.get(id=1)
    row.email = "ada@y"
    row.save()
    row.user_id = TWO
    with pytest.raises(LookupRefused, match="shard key"):
        row.save()
    rows.filter(id=3).delete()
    assert entries("email") == [("ada@y", str(ONE)), ("bob@x", str(TWO))]
    assert differences() == {}


def test_a_migration_from_before_the_field(accounts: Any) -> None:
    """Its model lacks the field of one lookup, whose entries are left to the command."""
    state = ProjectState.from_apps(apps)
    state.remove_field("finders", "account", "serial")
    historical: Any = state.apps.get_model("finders", "Account")
    rows = historical.objects.using(SHARD[ONE])
    rows.create(id=3, user_id=ONE, email="old@x")
    assert rows.filter(id=1).update(email="ada@y") == 1
    assert entries("email") == [("ada@y", str(ONE)), ("bob@x", str(TWO)), ("old@x", str(ONE))]
    assert differences() == {}
    rows.filter(id=1).delete()
    assert entries("email") == [("bob@x", str(TWO)), ("old@x", str(ONE))]
    assert differences() == {"finders.account.serial": (0, 1, 0)}
    call_command("lookups", "check", "--repair", verbosity=0)
    assert entries("serial") == [("7", str(TWO))]


def test_a_cached_model(accounts: Any) -> None:
    code = uuid.uuid4()
    ticket = Ticket.objects.create(user_id=TWO, code=code)
    for _ in range(2):
        assert Ticket.objects.get(code=code) == ticket
    Ticket.objects.filter(code=code).update(account=accounts[1])
    assert Ticket.objects.get(code=code).account_id == 2
    assert Ticket.objects.get(account_id=2) == ticket
    ticket.delete()
    assert not Ticket.objects.filter(code=code).exists()


def test_a_bound_key(accounts: Any) -> None:
    with bound(user_id=ONE):
        assert Account.objects.filter(serial=7).count() == 1
        assert not Account.objects.filter(email="bob@x").exists()
        Account.objects.create(id=3, email="new@x")
    assert Account.objects.get(email="new@x").user_id == ONE


def test_no_statement_more_for_other_fields(accounts: Any) -> None:
    with CaptureQueriesContext(connections["default"]) as sent:
        with CaptureQueriesContext(connections[SHARD[ONE]]) as on_shard:
            Account.objects.filter(user_id=ONE).update(note="n")
    assert len(sent) == 0
    assert [query["sql"].split()[0] for query in on_shard] == ["UPDATE"]
    with CaptureQueriesContext(connections["default"]) as sent:
        Ticket.objects.bulk_create([Ticket(user_id=ONE, code=uuid.uuid4()) for _ in range(50)])
    assert len(sent) <= 2


@pytest.mark.parametrize("error", [None, IntegrityError])
def test_an_insert_that_is_a_transaction_by_itself(accounts: Any, error: Any) -> None:
    """On MariaDB, where the session is known before, it follows its entries: one round trip less."""
    seen: list[tuple[bool, bool]] = []

    def look(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("INSERT"):
            is_reserved = ("new@x", str(ONE)) in entries("email")
            seen.append((connections[SHARD[ONE]].get_autocommit(), is_reserved))
        return execute(sql, *args)

    with connections[SHARD[ONE]].execute_wrapper(look):
        with nullcontext() if error is None else pytest.raises(error):
            Account.objects.create(id=1 if error else 3, user_id=ONE, email="new@x")
    is_alone = connections["default"].vendor == "mysql"
    assert seen == [(is_alone, is_alone)]
    stored = [("ada@x", str(ONE)), ("bob@x", str(TWO))]
    assert entries("email") == stored + ([] if error else [("new@x", str(ONE))])
    assert differences() == {}
    with transaction.atomic(using=SHARD[ONE]):
        Account.objects.create(id=4, user_id=ONE, email="later@x")


@pytest.mark.mysql_settings
def test_the_session_of_such_an_insert_is_lost(accounts: Any) -> None:
    """Nobody knows whether the row is stored. When the session is gone, the shard is asked."""
    connection: Any = connections[SHARD[ONE]]

    def kill(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("INSERT"):
            with connection.node_cursor() as cursor:
                cursor.execute(f"KILL {connection.session_id().connection}")
        return execute(sql, *args)

    with connection.execute_wrapper(kill), pytest.raises(OperationalError):
        Account.objects.create(id=3, user_id=ONE, email="new@x")
    deadline = time.monotonic() + PATIENCE
    while not Account.objects.scatter().filter(email="new@x").exists():
        assert time.monotonic() < deadline
        with suppress(LookupValueTaken):
            Account.objects.create(id=4, user_id=TWO, email="new@x")
    assert Account.objects.get(email="new@x").user_id == TWO
    Account.objects.create(id=5, user_id=ONE, email="other@x")
    assert differences() == {}


def test_a_commit_in_two_phases_is_refused(accounts: Any, app: None) -> None:
    for write in (
        lambda: Account.objects.create(id=3, user_id=ONE, email="new@x"),
        lambda: Account.objects.filter(user_id=ONE).update(serial=8),
        accounts[0].delete,
    ):
        # Files cannot commit in two phases at all.
        with pytest.raises((LookupRefused, TwoPhaseUnavailable)):
            with atomic("photos", two_phase=True):
                write()
    if not connections["photos"].features_class.shards_are_files:
        with atomic("photos", two_phase=True):
            Account.objects.filter(user_id=ONE).update(note="n")
    assert entries("email") == [("ada@x", str(ONE)), ("bob@x", str(TWO))]


def test_a_row_of_another_group(accounts: Any) -> None:
    """Rows are imported from databases that do not belong to the model's group."""
    old: Any = connections["events_00000"]
    with old.schema_editor() as editor:
        editor.create_model(Account)
    try:
        rows = Account.objects.using(old.alias)
        with old.cursor() as cursor:
            cursor.execute(
                "INSERT INTO finders_account (id, user_id, serial, note, email)"
                f" VALUES (1, {ONE}, 7, '', 'ada@x')"
            )
        rows.filter(id=1).update(email="other@x")
        rows.filter(id=1)._raw_delete(old.alias)
    finally:
        with old.schema_editor() as editor:
            editor.delete_model(Account)
    assert entries("email") == [("ada@x", str(ONE)), ("bob@x", str(TWO))]


@isolate_apps("tests.finders")
def test_checks() -> None:
    class Wrong(ShardedModel):
        name = models.TextField()
        at = models.DateField(null=True)

        class Meta:
            app_label = "finders"

        class ShardMeta:
            group = "photos"
            shard_key = "id"
            lookups = ["nothing", Lookup("at"), "name", "id"]

    class WrongID(ShardedModel):
        id: Any = models.CharField(primary_key=True, max_length=40, db_default="")
        user_id = models.BigIntegerField()
        at = models.IntegerField()

        class Meta:
            app_label = "finders"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"
            lookups = ["at"]

    options = shard_options(WrongID)
    assert options is not None
    lookup = ModelLookup(WrongID, WrongID._meta.get_field("at"), False, options)
    assert lookup.problem == "needs a primary key that has no default of the database"
    options = shard_options(Wrong)
    assert options is not None
    problems = {
        name: ModelLookup(Wrong, Wrong._meta.get_field(name), False, options).problem
        for name in ("name", "at", "id")
    }
    assert all(problems.values()), problems
    assert "no integer" in str(problems["at"])
    found = check_lookups([type("Config", (), {"get_models": lambda self: [Wrong]})()])
    assert [message.id for message in found] == ["sharded_orm_lookups.E001"]
    messages = [m for m in checks.run_checks() if str(m.id).startswith("sharded_orm_lookups.E")]
    assert not messages


@pytest.mark.skipif(not HAS_DATABASE_ON_DELETE, reason="of Django 6.1")
def test_a_lookup_does_not_follow_deletions_of_the_database() -> None:
    def problem(on_delete: Any, field: str) -> str | None:
        with isolate_apps("tests.finders"):

            class Child(ShardedModel):
                user_id = models.BigIntegerField()
                number = models.IntegerField()
                parent = models.ForeignKey("self", on_delete, null=True, db_default=None)

                class Meta:
                    app_label = "finders"

                class ShardMeta:
                    group = "photos"
                    shard_key = "user_id"

        options = shard_options(Child)
        assert options is not None
        return ModelLookup(Child, Child._meta.get_field(field), False, options).problem

    assert problem(models.CASCADE, "number") is None
    deletes: Any = models.DB_CASCADE  # type: ignore[attr-defined,unused-ignore]  # of Django 6.1
    assert "on_delete=DB_CASCADE" in str(problem(deletes, "number"))
    changes: Any = models.DB_SET_NULL  # type: ignore[attr-defined,unused-ignore]  # of Django 6.1
    assert problem(changes, "number") is None
    assert "on_delete=DB_SET_NULL" in str(problem(changes, "parent"))


@pytest.mark.skipif(not HAS_DATABASE_ON_DELETE, reason="of Django 6.1")
@pytest.mark.parametrize("name", ["DB_SET_NULL", "DB_SET_DEFAULT"])
def test_a_lookup_does_not_follow_changes_of_the_shard_key(name: str) -> None:
    with isolate_apps("tests.finders"):

        class Whole(ShardedModel):
            user_id = models.BigIntegerField(unique=True)

            class Meta:
                app_label = "finders"

            class ShardMeta:
                group = "photos"
                shard_key = "user_id"

        class Part(ShardedModel):
            whole = models.ForeignKey(
                Whole, getattr(models, name), to_field="user_id", default=1, db_default=1
            )
            number = models.IntegerField()

            class Meta:
                app_label = "finders"

            class ShardMeta:
                group = "photos"
                shard_key = "whole"

        options = shard_options(Part)
        assert options is not None
        lookup = ModelLookup(Part, Part._meta.get_field("number"), False, options)
        assert f"on_delete={name}" in str(lookup.problem)


class _Lowered(models.CharField):
    def get_prep_value(self, value: Any) -> Any:
        return str(value).lower()


def _declared(
    model: str, lookup: Any, *, group: str = "photos", key: str = "user_id", **fields: Any
) -> None:
    """Declare a sharded model with an integer ``user_id`` and ``code``, and one lookup."""
    options = {"group": group, "shard_key": key, "lookups": [lookup]}
    parts = {"Meta": {"app_label": "finders"}, "ShardMeta": options}
    attributes = {part: type(part, (), values) for part, values in parts.items()}
    numbers = {each: models.BigIntegerField() for each in ("user_id", "code")}
    type(model, (ShardedModel,), {"__module__": __name__, **numbers, **attributes, **fields})


@isolate_apps("tests.finders")
def test_each_wrong_lookup_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class RangeEntry(LookupTable):
        class Meta:
            app_label = "finders"

        class ShardMeta(LookupTable.ShardMeta):
            group = "archive"

    class Child(Account):
        extra = models.IntegerField()

        class Meta:
            app_label = "finders"

        class ShardMeta(Account.ShardMeta):
            lookups = ["extra"]

    inexact = {"sqlite": "NOCASE", "mysql": "utf8mb4_general_ci", "postgresql": "any_case"}
    collation = inexact[connections[SHARD[ONE]].vendor]
    pk = PackedIDField(primary_key=True, type_id=9)
    _declared("Generated", "code", group="pins", key="id", id=pk)
    two = {"a": models.IntegerField(), "pk": models.CompositePrimaryKey("user_id", "a")}
    _declared("Two", "code", **two)
    _declared("Price", "code", key="price", price=models.DecimalField())
    _declared("Day", "code", id=models.DateField(primary_key=True))
    _declared("Own", "name", name=_Lowered(max_length=9))
    _declared("Default", "code", code=models.BigIntegerField(db_default=1))
    _declared("Key", "user_id")
    _declared("Packed", "packed", packed=PackedIDField(primary_key=True, type_id=8))
    _declared("Ranged", Lookup("code", table="finders.RangeEntry"))
    _declared("Loose", "name", name=models.CharField(max_length=9, db_collation=collation))
    registry: Any = RangeEntry._meta.apps
    config: Any = SimpleNamespace(get_models=registry.get_models)
    monkeypatch.setattr(declaration, "apps", registry)
    declaration.lookups_by_label.cache_clear()
    try:
        messages = [m for m in check_lookups([config]) if str(m.id) != "sharded_orm_lookups.W004"]
    finally:
        declaration.lookups_by_label.cache_clear()
    expected = {
        "Child": "needs the shard key in the model's own table",
        "Generated": "needs a shard key that is known before the insert",
        "Two": "needs a primary key of one column",
        "Price": "cannot use the shard key 'price', which is no integer",
        "Day": "cannot use the primary key 'id', which is no integer",
        "Own": "has a get_prep_value() of its own",
        "Default": "needs a field whose value is known before the insert",
        "Key": "is not needed: the field is the shard key",
        "Packed": "is not needed: the id holds the number of the shard",
        "Ranged": "has its table 'finders.RangeEntry' in group 'archive', whose strategy is not 'modulo'",
        "Loose": f"compares text exactly, and the collation {collation!r} does not",
    }
    reported = {getattr(m.obj, "model", m.obj).__name__: m for m in messages}
    assert reported.keys() == expected.keys()
    assert len(messages) == len(expected)
    for name, problem in expected.items():
        assert problem in reported[name].msg
        number = "E003" if name == "Loose" else "E002"
        assert reported[name].id == f"sharded_orm_lookups.{number}"
