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


@pytest.mark.parametrize("model", [Account, Member])
def test_a_formset_refuses_a_value_that_two_of_its_forms_have(accounts: Any, model: Any) -> None:
    errors = [formset_of(each, ONE, TWO).errors for each in (model, PlainAccount)]
    assert (
        errors[0] == errors[1] == [{}, {"__all__": ["Please correct the duplicate values below."]}]
    )
    formset = formset_of(model, UNPLACED, TWO, emails=("new@x", "other@x"))
    assert formset.is_valid(), formset.errors


def formset_of(model: Any, *user_ids: int, emails: Any = ("new@x", "new@x")) -> Any:
    """A formset with one new row for each of ``user_ids``."""
    sent: dict[str, Any] = {"form-TOTAL_FORMS": len(user_ids), "form-INITIAL_FORMS": 0}
    for index, user_id in enumerate(user_ids):
        sent |= {
            f"form-{index}-id": 100 + index,
            f"form-{index}-user_id": user_id,
            f"form-{index}-email": emails[index],
        }
    make = forms.modelformset_factory(model, fields=("id", "user_id", "email"))
    return make(sent, queryset=model.objects.none())


def test_a_stored_row_whose_id_is_given_as_a_text_keeps_its_value(accounts: Any) -> None:
    ada, _ = accounts
    ada.pk, ada.user_id = str(ada.pk), str(ONE)
    ada.validate_unique()
    ada.user_id = "no key"
    with pytest.raises(ValidationError, match="already exists"):
        ada.validate_unique(exclude={"user_id"})


def test_a_form_asks_no_lookup_that_is_not_served(accounts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(states, "_served", set())
    states.withdraw("finders.account.email")
    assert form_of(Account, {"id": 9, "user_id": TWO, "email": "ada@x"}).is_valid()


def test_entries_are_read_only_in_the_admin() -> None:
    assert is_read_only(EmailEntry)
    assert not is_read_only(Account)
