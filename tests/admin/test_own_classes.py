"""Forms and formsets of a project keep the promises of the library's classes."""

from __future__ import annotations

from typing import Any

import pytest
from django import forms
from django.forms.models import BaseInlineFormSet, BaseModelFormSet
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    Rows,
    inline,
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


class TitleForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Photo
        fields = ["title", "user_id"]


class FormGiven(ShardedModelAdmin):
    """``get_form()`` as in Django's documentation."""

    list_display = ["title", "stars"]
    list_editable = ["stars"]

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        kwargs["form"] = TitleForm
        return super().get_form(request, obj, change, **kwargs)


def test_a_form_that_get_form_names_adds_under_the_page_s_key(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Photo, FormGiven)
    response = admin_client.post(url(Photo, "add", _key=TWO), {"title": "new"})
    assert response.status_code == 302, response.context["errors"]
    assert Photo.objects.using(SHARD[TWO]).get(title="new").user_id == TWO


def test_it_refuses_another_key(admin_client: Client, rows: Rows, register: Any) -> None:
    register(Photo, FormGiven)
    response = admin_client.post(
        url(Photo, "change", object_id_by_hand(rows.photo)), {"title": "new", "user_id": TWO}
    )
    assert "cannot be changed here" in str(response.context["errors"])
    assert not Photo.objects.filter(title="new").scatter().exists()


class OwnFormSet(BaseInlineFormSet):  # type: ignore[type-arg]
    def clean(self) -> None:
        super().clean()
        if any(form.cleaned_data.get("title") == "bad" for form in self.forms):
            raise forms.ValidationError("not this title")


class OwnForm(forms.ModelForm):  # type: ignore[type-arg]
    pass


class NamesIt(ShardedTabularInline):
    model = Photo
    fields = ["title"]
    formset = OwnFormSet


class GivesIt(ShardedTabularInline):
    model = Photo
    fields = ["title"]

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        return super().get_formset(
            request, obj, **{**kwargs, "formset": OwnFormSet, "form": OwnForm}
        )


@pytest.mark.parametrize("used", [NamesIt, GivesIt])
def test_a_formset_of_django_s_own_class(
    admin_client: Client, rows: Rows, register: Any, used: Any
) -> None:
    register(Album, type("Albums", (ShardedModelAdmin,), {"inlines": [used]}))
    old = {"photo_id": rows.other_photo.pk, "title": "old"}

    def post(*forms: dict[str, Any]) -> Any:
        data = {"title": "t", **inline("photos", old, *forms, initial=1)}
        return admin_client.post(url(Album, "change", object_id_by_hand(rows.other_album)), data)

    assert "not this title" in str(post({"title": "bad"}).context["errors"])
    assert "cannot be changed here" in str(post({"title": "b", "user_id": ONE}).context["errors"])
    assert post({"title": "new"}).status_code == 302
    titles = Photo.objects.using(SHARD[TWO]).filter(user_id=TWO).values_list("title", flat=True)
    assert sorted(titles) == ["new", "old"]


class OwnListForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Tag
        fields = ["name", "user_id"]


class OwnListFormSet(BaseModelFormSet):  # type: ignore[type-arg]
    pass


class Replaces(ShardedModelAdmin):
    list_display = ["pk", "name", "user_id"]
    list_editable = ["name", "user_id"]

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        return OwnListForm

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        return super().get_changelist_formset(request, **{**kwargs, "formset": OwnListFormSet})


class Passes(ShardedModelAdmin):
    list_display = ["pk", "name"]
    list_editable = ["name"]

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        return super().get_changelist_form(request, **{**kwargs, "form": OwnListForm})


@pytest.mark.parametrize("used", [Replaces, Passes])
def test_a_form_of_the_list(admin_client: Client, rows: Rows, register: Any, used: Any) -> None:
    register(Tag, used)
    address = url(Tag, "changelist", _key=ONE)

    def post(**values: Any) -> Any:
        [form] = [{"id": rows.tag.pk, "user_id": ONE, **values}]
        return admin_client.post(address, {**inline("form", form, initial=1), "_save": "Save"})

    assert post(name="new").status_code == 302
    assert Tag.objects.get(user_id=ONE).name == "new"
    # On the same shard, where the database would store a row of NEAR without an error.
    response = post(name="other", user_id=NEAR)
    assert response.status_code == 200
    assert "cannot be changed here" in response.content.decode()
    Tag.objects.create(user_id=ONE, name="sun")
    assert "already exists" in post(name="sun").content.decode()
    assert sorted(Tag.objects.filter(user_id=ONE).values_list("name", flat=True)) == ["new", "sun"]
