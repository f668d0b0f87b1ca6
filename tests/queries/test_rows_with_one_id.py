"""Rows of two shards that have the same primary key, because each shard counts its own ids."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from django import forms
from django.forms import modelformset_factory

from sharded_orm.exceptions import ScatterNotSupported
from tests.photos.models import Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

ID = 7


@pytest.fixture
def tags(placed: None) -> list[Tag]:
    for key in (ONE, TWO):
        Tag.objects.create(id=ID, user_id=key, name=f"tag {key}")
    return list(Tag.objects.scatter().order_by("user_id"))


def test_they_are_different_rows(tags: list[Tag]) -> None:
    one, two = tags
    assert one != two
    assert len({one, two}) == 2
    assert one not in [two]
    assert not (rows := Tag.objects.filter(user_id=TWO)).contains(one)
    assert list(rows) == [two]
    assert not rows.contains(one)  # the queryset has its rows now
    assert one not in rows


def test_one_row_is_equal_to_itself(tags: list[Tag]) -> None:
    """As in Django, whatever has changed in memory."""
    one, _ = tags
    for again in (
        Tag.objects.get(user_id=ONE),
        Tag.objects.only("name").get(user_id=ONE),
        Tag.objects.defer("user_id").get(user_id=ONE),
        pickle.loads(pickle.dumps(one)),
        Tag(id=ID, user_id=TWO),
    ):
        assert again == one
        assert hash(again) == hash(one)
    again = Tag.objects.get(user_id=ONE)
    again.user_id = NEAR
    assert again == one
    assert one != Tag(id=ID + 1, user_id=ONE)
    assert one != "tag"


Tags = modelformset_factory(Tag, fields=["name"], extra=0)


def _sent(*rows: Tag, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"form-TOTAL_FORMS": len(rows), "form-INITIAL_FORMS": len(rows)}
    for number, row in enumerate(rows):
        data |= {f"form-{number}-id": row.pk, f"form-{number}-name": row.name}
    return data | changes


def test_a_formset_of_such_rows_is_refused(tags: list[Tag]) -> None:
    """The browser sends primary keys alone, so the formset would change the wrong row."""
    rows = Tag.objects.scatter().order_by("user_id")
    for formset in (Tags(_sent(*tags), queryset=rows), Tags(queryset=rows)):
        with pytest.raises(ScatterNotSupported, match="the shard key"):
            formset.is_valid() if formset.is_bound else str(formset)
    formset = Tags(_sent(tags[0], **{"form-0-name": "new"}), queryset=rows.filter(user_id=ONE))
    formset.save()
    assert [tag.name for tag in rows.all()] == ["new", f"tag {TWO}"]


def test_a_form_whose_row_is_gone_has_an_error(tags: list[Tag]) -> None:
    """Somebody else has deleted it, or the visitor has made the id up."""
    Tag.objects.get(user_id=ONE).delete()
    formset = Tags(_sent(tags[0]), queryset=Tag.objects.filter(user_id=ONE))
    (errors,) = formset.errors
    assert list(errors) == ["id"]
    assert "is not one of the available choices" in str(errors)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(forms.ModelChoiceField, ID), (forms.ModelMultipleChoiceField, [ID])],
)
def test_a_choice_of_such_rows_is_refused(tags: list[Tag], kind: Any, value: Any) -> None:
    field = kind(queryset=Tag.objects.scatter())
    with pytest.raises(ScatterNotSupported, match="the shard key"):
        field.clean(value)
    chosen = kind(queryset=Tag.objects.filter(user_id=ONE)).clean(value)
    assert (chosen if isinstance(value, int) else chosen.get()) == tags[0]
