"""``list_editable``: rows saved from the list of one shard or key."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.test import Client

from sharded_orm import runtime
from sharded_orm.models import Placement
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    Rows,
    logged_in,
    object_id_by_hand,
    url,
    user_with,
)
from tests.photos.models import Photo

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]


def list_data(*photos: Photo, **changed: Any) -> dict[str, Any]:
    """The POST data of the list's form, with ``changed`` values for the first photo."""
    data: dict[str, Any] = {
        "form-TOTAL_FORMS": len(photos),
        "form-INITIAL_FORMS": len(photos),
        "_save": "Save",
    }
    for number, photo in enumerate(photos):
        values = {"photo_id": photo.pk, "stars": photo.stars or "", "album": photo.album_id or ""}
        values |= changed if number == 0 else {}
        data |= {f"form-{number}-{name}": value for name, value in values.items()}
    return data


@pytest.mark.parametrize("scope", [{"_shard": SHARD[ONE]}, {"_key": ONE}])
def test_rows_are_saved_on_their_shard(
    admin_client: Client, rows: Rows, scope: dict[str, Any]
) -> None:
    here = url(Photo, "changelist", **scope)
    formset = admin_client.get(here).context["cl"].formset
    assert [form["stars"].value() for form in formset.forms] == [None] * len(formset.forms)
    others = [form.instance for form in formset.forms if form.instance != rows.photo]
    response = admin_client.post(here, list_data(rows.photo, *others, stars=4))
    assert response.status_code == 302, response.context["cl"].formset.errors
    assert response.url == here
    assert Photo.objects.using(SHARD[ONE]).get(pk=rows.photo.pk).stars == 4
    assert Photo.objects.get(user_id=NEAR).stars is None
    assert Photo.objects.get(user_id=TWO).stars is None
    assert [entry.object_id for entry in LogEntry.objects.all()] == [object_id_by_hand(rows.photo)]


def test_pickers_offer_the_rows_of_the_key(admin_client: Client, rows: Rows) -> None:
    formset = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE])).context["cl"].formset
    (form,) = (form for form in formset.forms if form.instance == rows.photo)
    choices = form.fields["album"].choices
    assert {str(label) for value, label in choices if value} == {"album of 1"}
    refused = admin_client.post(
        url(Photo, "changelist", _shard=SHARD[ONE]),
        list_data(rows.photo, rows.near_photo, album=rows.other_album.pk),
    )
    assert refused.status_code == 200
    assert "album" in refused.context["cl"].formset.errors[0]


def test_the_key_cannot_be_edited(admin_client: Client, rows: Rows) -> None:
    # The key is in ``list_editable`` of this admin.
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    assert "user_id" not in admin_client.get(here).context["cl"].formset.forms[0].fields
    admin_client.post(here, list_data(rows.photo, rows.near_photo, user_id=TWO, stars=2))
    assert Photo.objects.using(SHARD[ONE]).get(pk=rows.photo.pk).user_id == ONE


def test_over_all_shards_nothing_is_edited(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert response.context["cl"].formset is None
    response = admin_client.post(url(Photo, "changelist"), list_data(rows.photo, stars=5))
    assert Photo.objects.get(user_id=ONE).stars is None


@pytest.mark.parametrize("pk", [None, 10**9, 10**30, -(10**30), "x"])
def test_a_row_of_another_shard_is_refused(admin_client: Client, rows: Rows, pk: Any) -> None:
    forged = rows.other_photo if pk is None else Photo(photo_id=pk, user_id=TWO)
    response = admin_client.post(
        url(Photo, "changelist", _shard=SHARD[ONE]), list_data(forged, rows.near_photo, stars=5)
    )
    assert response.status_code in (200, 400)
    assert not Photo.objects.scatter().filter(stars=5).exists()


def test_two_editors(admin_client: Client, rows: Rows) -> None:
    """The changes of both are saved: forms find rows by id, not by position."""
    here = url(Photo, "changelist", _shard=SHARD[ONE], o="1")
    data = list_data(rows.photo, rows.near_photo, stars=4)
    Photo.objects.create(user_id=ONE, title="a new one, the first in the list")
    Photo.objects.filter(user_id=NEAR).update(stars=1)
    assert admin_client.post(here, data).status_code == 302
    assert Photo.objects.get(pk=rows.photo.pk, user_id=ONE).stars == 4


def test_a_row_that_was_deleted_meanwhile(admin_client: Client, rows: Rows) -> None:
    data = list_data(rows.photo, rows.near_photo, stars=4)
    rows.near_photo.delete()
    response = admin_client.post(url(Photo, "changelist", _shard=SHARD[ONE]), data)
    assert response.status_code in (200, 400)
    assert Photo.objects.get(user_id=ONE).stars is None


def test_a_row_that_was_moved_meanwhile(admin_client: Client, rows: Rows) -> None:
    """The old copy is not written, and neither are other rows of the same form."""
    data = list_data(rows.near_photo, rows.photo, stars=3) | {"form-1-stars": 4}
    Placement.objects.using("directory").filter(group="photos", key=str(ONE)).update(shard=7)
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    response = admin_client.post(url(Photo, "changelist", _shard=SHARD[ONE]), data)
    assert "its shard key user_id=1 is on shard" in str(*get_messages(response.wsgi_request))
    here = Photo.objects.using(SHARD[ONE])
    assert list(here.values_list("stars", flat=True)) == [None, None]
    assert not LogEntry.objects.exists()


def test_only_who_may_change_edits(rows: Rows) -> None:
    viewer = logged_in(user_with("view_photo"))
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    assert viewer.get(here).context["cl"].formset is None
    assert viewer.post(here, list_data(rows.photo, rows.near_photo, stars=4)).status_code == 403
    assert Photo.objects.get(user_id=ONE).stars is None
