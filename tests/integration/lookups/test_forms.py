"""Forms find values that a unique lookup would refuse, on any shard, as in one database."""

from __future__ import annotations

from typing import Any

import pytest
from django import forms
from django.core.exceptions import ValidationError

import sharded_orm
from sharded_orm.backends.write_hooks.followers import is_read_only
from sharded_orm.contrib.lookups import states
from tests.finders.models import Account, EmailEntry, Member, PlainAccount
from tests.queries.conftest import DATABASES, ONE, TWO, UNPLACED

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=[*DATABASES, "events"], transaction=True),
]


def form_of(model: Any, *args: Any, **kwargs: Any) -> Any:
    return forms.modelform_factory(model, fields=("id", "user_id", "email"))(*args, **kwargs)


@pytest.mark.parametrize("model", [Account, Member])
@pytest.mark.parametrize("user_id", [ONE, TWO, UNPLACED])
def test_a_form_refuses_a_value_of_any_shard(accounts: Any, model: Any, user_id: int) -> None:
    sent = {"id": 9, "user_id": user_id, "email": "ada@y"}
    for each in (model, PlainAccount):
        each.objects.create(id=8, user_id=ONE, email="ada@y")
    expected = form_of(PlainAccount, sent).errors
    assert set(expected) == {"email"}
    errors = form_of(model, sent).errors
    name = str(model._meta.verbose_name).capitalize()
    assert errors == {"email": [f"{name} with this Email already exists."]}
    with sharded_orm.bound(user_id=user_id):
        assert form_of(model, sent).errors == errors
    assert form_of(model, sent | {"email": "eve@y"}).is_valid()
    model(id=9, user_id=user_id, email=None).validate_unique()


def test_a_form_lets_a_row_keep_its_value(accounts: Any) -> None:
    ada, bob = accounts
    sent = {"id": ada.pk, "user_id": ONE, "email": "ada@x"}
    assert form_of(Account, sent, instance=ada).is_valid()
    assert set(form_of(Account, sent | {"email": "bob@x"}, instance=ada).errors) == {"email"}
    bob.email = "ada@x"
    with pytest.raises(ValidationError, match="already exists"):
        bob.full_clean()
    bob.full_clean(exclude=["email", "note"])


def test_a_form_asks_no_lookup_that_is_not_served(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(states, "_served", set())
    states.withdraw("finders.account.email")
    assert form_of(Account, {"id": 9, "user_id": TWO, "email": "ada@x"}).is_valid()


def test_entries_are_read_only_in_the_admin() -> None:
    assert is_read_only(EmailEntry)
    assert not is_read_only(Account)
