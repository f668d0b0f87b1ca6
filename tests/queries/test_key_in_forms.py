"""A shard key that a visitor changes is an error of its field, in forms and serializers."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import connections
from django.forms import modelform_factory, modelformset_factory
from django.test.utils import CaptureQueriesContext
from rest_framework import serializers
from rest_framework.generics import UpdateAPIView
from rest_framework.test import APIRequestFactory

from sharded_orm.exceptions import ShardKeyChanged
from tests.photos.models import Album, Board, Event, Photo, Save
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

STAYS = "so it never changes"

PhotoForm = modelform_factory(Photo, fields=["user_id", "title"])


class PhotoSerializer(serializers.ModelSerializer):
    class Meta:
        model = Photo
        fields = ["user_id", "title"]


class AlbumSerializer(serializers.ModelSerializer):
    class Meta:
        model = Album
        fields = ["owner", "title"]


class PhotoView(UpdateAPIView):
    serializer_class = PhotoSerializer

    def get_queryset(self) -> Any:
        return Photo.objects.filter(user_id=self.kwargs["user"])


# -- Forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [TWO, NEAR, UNPLACED])
def test_a_changed_key_is_an_error_of_its_field(rows: list[Photo], key: int) -> None:
    photo = Photo.objects.get(user_id=ONE, pk=rows[0].pk)
    form = PhotoForm({"user_id": key, "title": "new"}, instance=photo)
    assert list(form.errors) == ["user_id"]
    [error] = form.errors["user_id"]
    assert STAYS in error and "'user_id'" not in error
    form.full_clean()
    assert list(form.errors) == ["user_id"]
    assert Photo.objects.get(user_id=ONE, pk=photo.pk).title == "p0"


def test_the_same_key_costs_no_query(rows: list[Photo]) -> None:
    photo = Photo.objects.get(user_id=ONE, pk=rows[0].pk)
    form = PhotoForm({"user_id": str(ONE), "title": "new"}, instance=photo)
    with CaptureQueriesContext(connections["photos"]) as photos:
        with CaptureQueriesContext(connections["directory"]) as directory:
            assert form.is_valid()
    assert (len(photos), len(directory)) == (0, 0)
    form.save()
    assert Photo.objects.get(user_id=ONE, pk=photo.pk).title == "new"


def test_a_form_that_was_corrected_is_valid(rows: list[Photo]) -> None:
    photo = rows[0]
    assert not PhotoForm({"user_id": NEAR, "title": "new"}, instance=photo).is_valid()
    form = PhotoForm({"user_id": ONE, "title": "new"}, instance=photo)
    assert form.is_valid()
    form.save()
    assert Photo.objects.get(user_id=ONE, pk=photo.pk).title == "new"


def test_a_row_that_was_not_valid_is_not_saved_with_the_other_key(rows: list[Photo]) -> None:
    photo = rows[0]
    assert not PhotoForm({"user_id": NEAR, "title": "new"}, instance=photo).is_valid()
    with pytest.raises(ShardKeyChanged):
        photo.save()


def test_a_new_row_may_have_any_key(placed: None) -> None:
    form = PhotoForm({"user_id": TWO, "title": "new"})
    assert form.is_valid(), form.errors
    form.save()
    form = PhotoForm({"user_id": ONE, "title": "copy"}, instance=Photo(user_id=TWO))
    assert form.is_valid(), form.errors
    assert form.save().user_id == ONE


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_key_that_is_a_foreign_key_to_a_global_row(album: Album, key: int) -> None:
    form_class = modelform_factory(Album, fields=["owner", "title"])
    stored = Album.objects.get(owner_id=ONE, pk=album.pk)
    form = form_class({"owner": key, "title": "new"}, instance=stored)
    assert list(form.errors) == ["owner"]
    assert STAYS in form.errors["owner"][0]
    form = form_class({"owner": ONE, "title": "new"}, instance=stored)
    assert form.is_valid(), form.errors
    assert form.save().owner.username == f"person {ONE}"


def test_a_key_that_is_a_foreign_key_of_the_group(db: None) -> None:
    board = Board.objects.create(name="x")
    others = [Board.objects.create(name="near", near=board), Board.objects.create(name="any")]
    save = Save.objects.create(board=board, note="old")
    form_class = modelform_factory(Save, fields=["board", "note"])
    form_class.base_fields["board"].queryset = Board.objects.scatter()
    for other in others:
        form = form_class({"board": other.pk, "note": "new"}, instance=save)
        assert list(form.errors) == ["board"], form.errors
        assert STAYS in form.errors["board"][0]
    form = form_class({"board": board.pk, "note": "new"}, instance=save)
    assert form.is_valid(), form.errors
    form.save()
    assert Save.objects.get(pk=save.pk).note == "new"


def test_a_key_of_text(db: None) -> None:
    event = Event.objects.create(account="ada", number=1)
    form_class = modelform_factory(Event, fields=["account", "number"])
    form = form_class({"account": "Ada", "number": 2}, instance=event)
    assert STAYS in form.errors["account"][0]
    assert form_class({"account": " ada ", "number": 2}, instance=event).is_valid()


def test_a_formset(rows: list[Photo]) -> None:
    formset_class = modelformset_factory(Photo, form=PhotoForm, extra=0)
    photos = Photo.objects.filter(user_id=ONE).order_by("pk")
    first, second = photos
    data = {
        "form-TOTAL_FORMS": 2,
        "form-INITIAL_FORMS": 2,
        "form-0-photo_id": first.pk,
        "form-0-user_id": NEAR,
        "form-0-title": "new",
        "form-1-photo_id": second.pk,
        "form-1-user_id": ONE,
        "form-1-title": "new",
    }
    formset = formset_class(data, queryset=photos)
    assert not formset.is_valid()
    assert [list(errors) for errors in formset.errors] == [["user_id"], []]


def test_full_clean_reports_a_key_of_another_shard(rows: list[Photo]) -> None:
    photo = Photo.objects.get(user_id=ONE, pk=rows[0].pk)
    photo.full_clean()
    photo.user_id = TWO
    with pytest.raises(ValidationError) as caught:
        photo.full_clean()
    assert list(caught.value.message_dict) == ["user_id"]
    photo.full_clean(exclude=["user_id"])


def test_full_clean_of_a_deferred_key_sends_nothing_for_it(rows: list[Photo]) -> None:
    photo = Photo.objects.only("pk", "title").get(user_id=ONE, pk=rows[0].pk)
    photo.clean_fields(exclude=[f.name for f in Photo._meta.fields if f.name != "title"])
    assert "user_id" in photo.get_deferred_fields()


# -- Serializers -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", [TWO, NEAR, UNPLACED])
def test_a_patch_of_the_key_is_a_field_error(rows: list[Photo], key: int) -> None:
    for method in ("patch", "put"):
        values = {"user_id": key, "title": "new"}
        request = getattr(APIRequestFactory(), method)("/", values, format="json")
        response = PhotoView.as_view()(request, user=ONE, pk=rows[0].pk)
        assert response.status_code == 400, response.data
        assert list(response.data) == ["user_id"]
        assert STAYS in response.data["user_id"][0]
    assert Photo.objects.get(user_id=ONE, pk=rows[0].pk).title == "p0"


def test_a_patch_with_the_same_key_is_stored(rows: list[Photo]) -> None:
    values = {"user_id": str(ONE), "title": "new"}
    request = APIRequestFactory().patch("/", values, format="json")
    response = PhotoView.as_view()(request, user=ONE, pk=rows[0].pk)
    assert (response.status_code, response.data["title"]) == (200, "new")


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_serializer_of_a_key_that_is_a_foreign_key(album: Album, key: int) -> None:
    serializer = AlbumSerializer(album, {"owner": key, "title": "new"})
    assert not serializer.is_valid()
    assert STAYS in serializer.errors["owner"][0]
    serializer = AlbumSerializer(album, {"owner": ONE, "title": "new"})
    assert serializer.is_valid(), serializer.errors
    assert serializer.save().title == "new"


def test_a_serializer_of_new_rows_takes_any_key(placed: None) -> None:
    serializer = PhotoSerializer(data={"user_id": TWO, "title": "x"})
    assert serializer.is_valid()
    assert serializer.save().user_id == TWO
    many = PhotoSerializer(data=[{"user_id": key, "title": "x"} for key in (ONE, TWO)], many=True)
    assert many.is_valid()
    assert [photo.user_id for photo in many.save()] == [ONE, TWO]


def test_a_serializer_of_another_model_is_left_alone(album: Album) -> None:
    class Nested(serializers.ModelSerializer):
        first = PhotoSerializer(write_only=True)

        class Meta:
            model = Album
            fields = ["title", "first"]

    serializer = Nested(album, {"title": "x", "first": {"user_id": TWO, "title": "y"}})
    assert serializer.is_valid(), serializer.errors


# -- Migrations ------------------------------------------------------------------------------


def test_migrations_do_not_know_of_it() -> None:
    for model in (Photo, Album, Save):
        key = model._shard_options().key
        assert key is not None
        assert "validators" not in key.deconstruct()[3]
        assert not any("StoredKey" in type(v).__name__ for v in key.clone().validators)
