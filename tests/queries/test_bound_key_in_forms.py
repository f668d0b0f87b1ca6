"""Another key than the bound one, chosen by a visitor, is an error of its field.

Nothing is read or written on the shard of the other key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.core.exceptions import ValidationError
from django.db import connections
from django.forms import ModelForm, inlineformset_factory, modelform_factory, modelformset_factory
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from rest_framework import serializers
from rest_framework.test import APIRequestFactory
from rest_framework.viewsets import ModelViewSet

from sharded_orm import bound, unbound
from sharded_orm.exceptions import BoundKeyMismatch
from tests.photos.models import Album, Event, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries
OTHER = "this is another one"
STAYS = "so it never changes"

TagForm = modelform_factory(Tag, fields=["user_id", "name"])
PhotoForm = modelform_factory(Photo, fields=["user_id", "title", "album"])


@contextmanager
def nothing_elsewhere() -> Iterator[None]:
    """No query goes to the shard of TWO, and the placement of no other key is looked up."""
    with CaptureQueriesContext(connections["directory"]) as look_ups:
        with assert_queries(0, using=SHARD[TWO]):
            yield
    for query in look_ups:
        assert not any(f"'{key}'" in query["sql"] for key in (NEAR, TWO, UNPLACED))


# -- Forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [TWO, NEAR, UNPLACED])
def test_a_new_row_of_another_key(placed: None, key: int) -> None:
    with bound(user_id=ONE), nothing_elsewhere():
        form = TagForm({"user_id": key, "name": "x"})
        assert list(form.errors) == ["user_id"]
        assert OTHER in form.errors["user_id"][0]
        with pytest.raises(ValueError, match="didn't validate"):
            form.save()
        assert form.instance.user_id == ONE
    assert not Tag.objects.scatter().exists()


def test_the_form_that_was_corrected_is_valid(placed: None) -> None:
    with bound(user_id=ONE):
        tag = Tag()
        assert not TagForm({"user_id": TWO, "name": "x"}, instance=tag).is_valid()
        form = TagForm({"user_id": str(ONE), "name": "x"}, instance=tag)
        assert form.is_valid(), form.errors
        assert form.save()._state.db == SHARD[ONE]
        assert not TagForm({"user_id": TWO, "name": "y"}, instance=tag).is_valid()
        tag.full_clean()


@pytest.mark.parametrize("key", [TWO, NEAR])
@pytest.mark.parametrize("bound_keys", [{"user_id": ONE, "owner": ONE}, {"owner": ONE}])
def test_a_submitted_key_does_not_choose_the_rows(
    album: Album, key: int, bound_keys: dict[str, int]
) -> None:
    with unbound():
        Album.objects.create(owner_id=key, title="theirs")
    with bound(**bound_keys):
        # A row that was made without a key, such as before the block.
        for photo in (Photo(), Photo(user_id=None)):
            form = PhotoForm({"user_id": key, "title": "x", "album": album.pk}, instance=photo)
            assert list(form.errors) == ["user_id" if "user_id" in bound_keys else "album"]
            assert "theirs" not in form.as_p()


def test_a_new_row_without_a_key_gets_no_other_than_the_bound_one(placed: None) -> None:
    tag = Tag(name="x")
    assert tag.user_id is None
    with bound(user_id=ONE):
        form = TagForm({"user_id": TWO, "name": "x"}, instance=tag)
        assert OTHER in form.errors["user_id"][0]
        form = TagForm({"user_id": ONE, "name": "x"}, instance=tag)
        assert form.save().user_id == ONE


@pytest.mark.parametrize("key", [TWO, NEAR])
def test_a_stored_row(rows: list[Photo], key: int) -> None:
    with bound(user_id=ONE):
        photo = Photo.objects.get(pk=rows[0].pk)
        with nothing_elsewhere():
            form = PhotoForm({"user_id": key, "title": "new"}, instance=photo)
            assert list(form.errors) == ["user_id"]
        assert STAYS in form.errors["user_id"][0]
        # The page of the form is shown again, with rows that belong to this one.
        assert list(photo.comments.all()) == []
        photo.refresh_from_db()
        assert photo.title == "p0"


def test_a_row_of_another_key_in_the_form(rows: list[Photo]) -> None:
    with bound(user_id=ONE), nothing_elsewhere():
        form = PhotoForm({"user_id": NEAR, "title": "new"}, instance=rows[2])
        assert list(form.errors) == ["user_id"]
        without_key = modelform_factory(Photo, fields=["title", "album"])
        with pytest.raises(BoundKeyMismatch):
            without_key({"title": "new"}, instance=rows[2]).is_valid()


def test_other_fields_are_not_looked_up_under_the_other_key(album: Album) -> None:
    with unbound():
        theirs = Album.objects.create(owner_id=NEAR, title="theirs")
    with bound(user_id=ONE, owner=ONE), nothing_elsewhere():
        form = PhotoForm({"user_id": NEAR, "title": "x", "album": album.pk})
        assert list(form.errors) == ["user_id"]
        form = PhotoForm({"user_id": NEAR, "title": "x", "album": theirs.pk})
        assert sorted(form.errors) == ["album", "user_id"]


def test_a_unique_value_of_another_key_is_not_found(placed: None) -> None:
    with unbound():
        Tag.objects.create(user_id=NEAR, name="secret")
    with bound(user_id=ONE), assert_queries(0, using=SHARD[ONE]):
        form = TagForm({"user_id": NEAR, "name": "secret"})
        assert list(form.errors) == ["user_id"]
        tag = Tag(user_id=NEAR, name="secret")
        tag.validate_unique()
        tag.validate_constraints()
        with pytest.raises(BoundKeyMismatch):
            tag.save()


def test_a_key_that_is_a_foreign_key(album: Album) -> None:
    form_class = modelform_factory(Album, fields=["owner", "title"])
    with bound(owner=ONE), nothing_elsewhere():
        for key in (NEAR, TWO):
            form = form_class({"owner": key, "title": "new"})
            assert list(form.errors) == ["owner"]
            assert OTHER in form.errors["owner"][0]
            form = form_class({"owner": key, "title": "new"}, instance=album)
            assert STAYS in form.errors["owner"][0]
        form = form_class({"owner": ONE, "title": "new"})
        assert form.is_valid(), form.errors
        assert form.save().owner.username == f"person {ONE}"


def test_a_key_of_text(db: None) -> None:
    form_class = modelform_factory(Event, fields=["account", "number"])
    with bound(account="ada"):
        assert OTHER in form_class({"account": "Ada", "number": 1}).errors["account"][0]
        assert form_class({"account": "", "number": 1}).errors["account"] == [
            "This field is required."
        ]
        assert form_class({"account": " ada ", "number": 1}).is_valid()


class CuriousForm(ModelForm):
    """Its ``clean()`` and the page use relations of the row."""

    class Meta:
        model = Photo
        fields = ("user_id", "title", "album")

    def _post_clean(self) -> None:
        super()._post_clean()
        assert self.instance.album is None or self.instance.album.title
        list(self.instance.comments.all() if self.instance.pk else ())


def test_code_that_uses_the_row_of_a_form_with_an_error(rows: list[Photo], album: Album) -> None:
    with bound(user_id=ONE, owner=ONE), nothing_elsewhere():
        photo = Photo.objects.get(pk=rows[0].pk)
        form = CuriousForm({"user_id": TWO, "title": "x", "album": album.pk}, instance=photo)
        assert list(form.errors) == ["user_id"]


def test_formsets(rows: list[Photo]) -> None:
    formset_class = modelformset_factory(Photo, fields=("user_id", "title"), extra=1)
    data = {"form-TOTAL_FORMS": "2", "form-INITIAL_FORMS": "1"}
    for number, key in enumerate((NEAR, TWO)):
        data |= {f"form-{number}-user_id": str(key), f"form-{number}-title": "x"}
    with bound(user_id=ONE), nothing_elsewhere():
        shown = Photo.objects.filter(pk=rows[0].pk)
        formset = formset_class({**data, "form-0-photo_id": str(rows[0].pk)}, queryset=shown)
        errors = formset.errors
        assert [list(form_errors) for form_errors in errors] == [["user_id"], ["user_id"]]
        assert STAYS in errors[0]["user_id"][0] and OTHER in errors[1]["user_id"][0]
        formset = formset_class({**data, "form-0-photo_id": str(rows[2].pk)}, queryset=shown)
        assert "photo_id" in formset.errors[0]
    assert not Photo.objects.scatter().filter(title="x").exists()


def test_an_inline_formset(album: Album) -> None:
    formset_class = inlineformset_factory(Album, Photo, fields=("user_id", "title"), extra=1)
    data = {"photos-TOTAL_FORMS": "1", "photos-INITIAL_FORMS": "0"}
    data |= {"photos-0-user_id": str(TWO), "photos-0-title": "x"}
    with bound(user_id=ONE, owner=ONE), nothing_elsewhere():
        formset = formset_class(data, instance=album)
        assert not formset.is_valid()
        assert [list(errors) for errors in formset.errors] == [["user_id"]]


def test_full_clean_of_a_row_that_was_made_in_code(placed: None) -> None:
    with bound(user_id=ONE), nothing_elsewhere():
        with pytest.raises(ValidationError) as refused:
            Tag(user_id=TWO, name="x").full_clean()
        assert list(refused.value.message_dict) == ["user_id"]
        with pytest.raises(BoundKeyMismatch):
            Tag(user_id=TWO, name="x").full_clean(exclude=["user_id"])


# -- Serializers ---------------------------------------------------------------------------


class TagSerializer(serializers.ModelSerializer):
    class Meta:
        model = Tag
        fields = ["id", "user_id", "name"]


class TagViewSet(ModelViewSet):
    queryset = Tag.objects.all()
    serializer_class = TagSerializer
    authentication_classes = ()
    permission_classes = ()


class AlbumSerializer(serializers.ModelSerializer):
    class Meta:
        model = Album
        fields = ["owner", "title"]


@pytest.mark.parametrize("key", [TWO, NEAR, UNPLACED])
def test_a_view_set(placed: None, key: int) -> None:
    requests = APIRequestFactory()
    many = TagViewSet.as_view({"post": "create"})
    one = TagViewSet.as_view({"patch": "partial_update", "put": "update"})
    with bound(user_id=ONE), nothing_elsewhere():
        tag = Tag.objects.create(name="a")
        other = {"user_id": key, "name": "x"}
        answer = many(requests.post("/", other, "json"))
        assert (answer.status_code, list(answer.data)) == (400, ["user_id"])
        assert OTHER in answer.data["user_id"][0]
        for request in (requests.put("/", other, "json"), requests.patch("/", other, "json")):
            answer = one(request, pk=tag.pk)
            assert (answer.status_code, list(answer.data)) == (400, ["user_id"])
        answer = many(requests.post("/", {"user_id": str(ONE), "name": "x"}, "json"))
        assert answer.status_code == 201
    assert {tag.user_id for tag in Tag.objects.scatter()} == {ONE}


def test_a_serializer_of_many(placed: None) -> None:
    with bound(user_id=ONE), nothing_elsewhere():
        rows = [{"user_id": ONE, "name": "x"}, {"user_id": NEAR, "name": "y"}]
        serializer = TagSerializer(data=rows, many=True)
        assert not serializer.is_valid()
        assert list(serializer.errors[1]) == ["user_id"]


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_serializer_of_a_key_that_is_a_foreign_key(album: Album, key: int) -> None:
    with bound(owner=ONE), nothing_elsewhere():
        serializer = AlbumSerializer(data={"owner": key, "title": "x"})
        assert not serializer.is_valid()
        assert list(serializer.errors) == ["owner"]
