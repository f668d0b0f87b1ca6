"""Actions: a call and a transaction per shard, and one report."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.messages import get_messages
from django.core.exceptions import PermissionDenied
from django.db import connections
from django.test import Client

from sharded_orm.models import Placement
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    logged_in,
    object_id_by_hand,
    url,
    user_with,
)
from tests.admin.lists import PhotoAdmin
from tests.admin.test_changelist import Statements
from tests.photos.models import Event, Photo
from tests.versions import HAS_ACTIONS_OF_A_ROW

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]


def action_data(action: str, *photos: Any, **more: Any) -> dict[str, Any]:
    """The POST data of a list's form. A photo may be given by its object id."""
    names = [photo if isinstance(photo, str) else object_id_by_hand(photo) for photo in photos]
    return {"action": action, "_selected_action": names, "index": 0, "select_across": 0, **more}


def message_texts(response: Any) -> list[str]:
    """The messages of a response, with their levels."""
    return [f"{message.level_tag}: {message}" for message in get_messages(response.wsgi_request)]


def stars() -> dict[int, int | None]:
    return dict(Photo.objects.scatter().values_list("user_id", "stars"))


def test_checkboxes_hold_the_names_of_the_rows(admin_client: Client, rows: Rows) -> None:
    for scope in ({}, {"_shard": SHARD[ONE]}):
        page = admin_client.get(url(Photo, "changelist", **scope)).content.decode()
        assert f'name="_selected_action" value="{object_id_by_hand(rows.photo)}"' in page


def test_one_shard(admin_client: Client, rows: Rows) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    with Statements(SHARD[ONE], SHARD[TWO]) as statements:
        response = admin_client.post(here, action_data("star", rows.photo))
    assert (response.status_code, response.url) == (302, here)
    assert stars() == {ONE: 5, TWO: None, NEAR: None}
    assert message_texts(response) == [f"success: Give five stars: 1 row on {SHARD[ONE]} (1)."]
    assert statements[SHARD[TWO]] == []


@pytest.mark.skipif(not HAS_ACTIONS_OF_A_ROW, reason="of Django 6.1")
def test_an_action_of_the_page_of_a_row(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhotoAdmin.star, "locations", list(admin.ActionLocation), raising=False)  # type: ignore[attr-defined,unused-ignore]
    here = url(Photo, "change", object_id_by_hand(rows.photo))
    page = admin_client.get(here).content.decode()
    assert 'name="CHANGE_FORM-action"' in page
    data = {"CHANGE_FORM-action": "star", "_selected_action": rows.photo.pk}
    response = admin_client.post(here, data)
    assert (response.status_code, response.url) == (302, here)
    assert stars() == {ONE: 5, TWO: None, NEAR: None}
    assert message_texts(response) == [f"success: Give five stars: 1 row on {SHARD[ONE]} (1)."]
    nothing = admin_client.post(here, {"CHANGE_FORM-action": "", "_selected_action": rows.photo.pk})
    assert message_texts(nothing)[-1] == "warning: No action selected."


def test_two_shards(admin_client: Client, rows: Rows) -> None:
    here = url(Photo, "changelist")
    response = admin_client.post(
        here, action_data("star", rows.photo, rows.near_photo, rows.other_photo)
    )
    assert (response.status_code, response.url) == (302, here)
    assert stars() == {ONE: 5, TWO: 5, NEAR: 5}
    assert message_texts(response) == [
        f"success: Give five stars: 3 rows on {SHARD[ONE]} (2), {SHARD[TWO]} (1)."
    ]


def test_a_shard_that_fails_keeps_nobody_back(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "changelist"), action_data("fail_on_12", rows.other_photo, rows.photo)
    )
    assert response.status_code == 302
    # Changes before the error are rolled back.
    assert stars() == {ONE: 5, TWO: None, NEAR: None}
    success, failure = message_texts(response)
    assert success == f"warning: Fail on 12: 1 row on {SHARD[ONE]} (1)."
    assert failure.startswith(f"error: Not done on {SHARD[TWO]} on ")
    assert failure.endswith(": ValueError: not here")


def test_all_rows_of_a_shard(admin_client: Client, rows: Rows) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE], q="photo")
    response = admin_client.post(here, action_data("star", rows.photo, select_across=1))
    assert stars() == {ONE: 5, TWO: None, NEAR: 5}
    assert message_texts(response) == [f"success: Give five stars: 2 rows on {SHARD[ONE]} (2)."]


def test_all_matching_rows_of_all_shards(admin_client: Client, rows: Rows) -> None:
    Photo.objects.create(user_id=TWO, title="another", stars=1)
    response = admin_client.post(
        url(Photo, "changelist", q="photo of", starred="no"),
        action_data("star", rows.photo, select_across=1),
    )
    assert message_texts(response) == [
        f"success: Give five stars: 3 rows on {SHARD[ONE]} (2), {SHARD[TWO]} (1)."
    ]
    assert Photo.objects.get(title="another", user_id=TWO).stars == 1


def test_all_rows_of_a_key(admin_client: Client, rows: Rows) -> None:
    admin_client.post(
        url(Photo, "changelist", _key=ONE), action_data("star", rows.photo, select_across=1)
    )
    assert stars() == {ONE: 5, TWO: None, NEAR: None}


def test_a_page_for_the_rows_of_one_shard(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "changelist"), action_data("export", rows.photo, rows.near_photo)
    )
    assert sorted(response.content.decode().split(",")) == ["photo of 1", "photo of 3"]
    assert stars() == {ONE: 1, TWO: None, NEAR: 1}


def test_a_page_for_the_rows_of_two_shards_is_refused(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "changelist"), action_data("export", rows.photo, rows.other_photo)
    )
    assert response.status_code == 302
    assert stars() == {ONE: None, TWO: None, NEAR: None}
    (report,) = message_texts(response)
    assert report.startswith("error: “Export” shows a page") and "across_shards" in report


def test_an_action_across_shards_sees_all_rows(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "changelist"), action_data("names_of_all", rows.photo, rows.other_photo)
    )
    assert response.content.decode() == "photo of 1,photo of 2"
    response = admin_client.post(
        url(Photo, "changelist"), action_data("names_of_all", rows.photo, select_across=1)
    )
    assert response.content.decode() == "photo of 1,photo of 2,photo of 3"


FORGED = [
    "1",
    "x",
    "1~x",
    "~",
    "1~",
    "~1",
    "9" * 40,
    f"{UNPLACED}~1",
    "' OR 1=1",
    "1~1~1",
    "@photos_00003~1",
    "@photos_00099~1",
    "@default~1",
]


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}])
@pytest.mark.parametrize("name", FORGED)
def test_forged_names(admin_client: Client, rows: Rows, name: str, scope: Any) -> None:
    if name == "1" and scope:
        pytest.skip("in a list of one shard an id is name enough")
    response = admin_client.post(
        url(Photo, "changelist", **scope), action_data("star", rows.photo, name)
    )
    assert response.status_code == 302
    assert stars() == {ONE: None, TWO: None, NEAR: None}
    assert message_texts(response) == [
        "warning: 1 of 2 selected rows are not here, or not any more. No items have been changed."
    ]


def test_the_id_of_one_row_with_the_key_of_another(admin_client: Client, rows: Rows) -> None:
    """Also if both rows are on one shard."""
    for forged in (f"{NEAR}~{rows.photo.pk}", f"{TWO}~{rows.photo.pk}"):
        response = admin_client.post(url(Photo, "changelist"), action_data("star", forged))
        assert message_texts(response)[-1].startswith("warning: 1 of 1 selected rows are not here")
    assert stars() == {ONE: None, TWO: None, NEAR: None}


def test_a_row_of_another_place(admin_client: Client, rows: Rows) -> None:
    for scope in ({"_shard": SHARD[ONE]}, {"_key": ONE}):
        response = admin_client.post(
            url(Photo, "changelist", **scope), action_data("star", rows.photo, rows.other_photo)
        )
        assert message_texts(response)[0].startswith("warning: 1 of 2 selected rows are not here")
    admin_client.post(url(Photo, "changelist", _key=ONE), action_data("star", rows.near_photo))
    assert stars() == {ONE: None, TWO: None, NEAR: None}


def test_an_id_alone_is_enough_in_a_list_of_one_shard(admin_client: Client, rows: Rows) -> None:
    admin_client.post(
        url(Photo, "changelist", _shard=SHARD[ONE]), action_data("star", str(rows.photo.pk))
    )
    assert stars() == {ONE: 5, TWO: None, NEAR: None}


def test_a_row_that_was_moved_meanwhile(admin_client: Client, rows: Rows) -> None:
    """The action runs on the shard of the key, and not on the copy that a move has left behind."""
    copy = Photo.objects.using(SHARD[ONE]).get(pk=rows.photo.pk)
    with connections["photos_00007"].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Photo._meta.db_table} (photo_id, user_id, title)"
            " VALUES (%s, %s, 'moved')",
            [copy.pk, ONE],
        )
    Placement.objects.using("directory").filter(group="photos", key=str(ONE)).update(shard=7)
    response = admin_client.post(url(Photo, "changelist"), action_data("star", rows.photo))
    assert message_texts(response) == ["success: Give five stars: 1 row on photos_00007 (1)."]
    assert Photo.objects.using("photos_00007").get(pk=copy.pk).stars == 5
    assert Photo.objects.using(SHARD[ONE]).get(pk=copy.pk).stars is None
    response = admin_client.post(
        url(Photo, "changelist", _shard=SHARD[ONE]), action_data("star", rows.photo)
    )
    assert message_texts(response)[-1].startswith("warning: 1 of 1 selected rows are not here")


def test_the_copy_that_a_move_has_left_is_not_among_all(admin_client: Client, rows: Rows) -> None:
    with connections["photos_00007"].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Photo._meta.db_table} (photo_id, user_id, title)"
            " VALUES (%s, %s, 'moved')",
            [rows.photo.pk, ONE],
        )
    Placement.objects.using("directory").filter(group="photos", key=str(ONE)).update(shard=7)
    response = admin_client.post(
        url(Photo, "changelist"), action_data("names_of_all", rows.photo, rows.near_photo)
    )
    # The copy is on the shard of the other row.
    assert response.content.decode() == "moved,photo of 3"


def test_the_same_id_on_two_shards(admin_client: Client, db: None) -> None:
    """Each shard counts the ids of its events."""
    events = [Event(account=f"a{number}", number=0) for number in range(20)]
    for event in events:
        event.save()
    # PostgreSQL goes on counting where an earlier test has stopped.
    ((pk, count),) = Counter(event.pk for event in events).most_common(1)
    assert count > 1
    same = [event for event in events if event.pk == pk]
    data = {
        "action": "delete_selected",
        "_selected_action": [f"{same[0].account}~{pk}"],
        "index": 0,
        "post": "yes",
    }
    admin_client.post(url(Event, "changelist"), data)
    remaining = {event.account for event in Event.objects.scatter()}
    assert remaining == {event.account for event in events} - {same[0].account}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"action": "star", "index": 0}, "warning: Items must be selected"),
        ({"action": "", "index": 0, "_selected_action": "1~1"}, "warning: No action selected."),
        ({"action": "nothing", "index": 0, "_selected_action": "1~1"}, "warning: No action"),
        ({"action": "deny", "index": 0, "_selected_action": "1~1"}, "warning: No action"),
        ({"action": "star", "index": "x", "_selected_action": "0~1"}, "warning: 1 of 1"),
        ({"action": "star", "index": "9", "_selected_action": "0~1"}, "warning: 1 of 1"),
    ],
)
def test_nothing_to_do(
    admin_client: Client, rows: Rows, data: dict[str, Any], message: str
) -> None:
    response = admin_client.post(url(Photo, "changelist"), data)
    assert response.status_code == 302
    assert message_texts(response)[0].startswith(message)
    assert stars() == {ONE: None, TWO: None, NEAR: None}


def test_only_who_may(rows: Rows) -> None:
    viewer = logged_in(user_with("view_photo"))
    page = viewer.get(url(Photo, "changelist")).content.decode()
    assert 'value="star"' not in page and 'value="delete_selected"' not in page
    response = viewer.post(url(Photo, "changelist"), action_data("star", rows.photo))
    assert stars() == {ONE: None, TWO: None, NEAR: None}
    assert response.status_code == 302
    stranger = logged_in(user_with("view_album"))
    assert stranger.get(url(Photo, "changelist")).status_code == 403
    assert (
        stranger.post(url(Photo, "changelist"), action_data("star", rows.photo)).status_code == 403
    )


def test_a_forged_form_is_refused(admin_user: Any, rows: Rows) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(admin_user)
    response = client.post(url(Photo, "changelist"), action_data("star", rows.photo))
    assert response.status_code == 403
    assert stars() == {ONE: None, TWO: None, NEAR: None}


def test_as_many_rows_as_a_form_can_send(admin_client: Client, rows: Rows) -> None:
    names = [f"{ONE}~{rows.photo.pk}", *(f"{ONE}~{10**6 + number}" for number in range(900))]
    response = admin_client.post(url(Photo, "changelist"), action_data("star", *names))
    assert message_texts(response)[0].startswith("warning: 900 of 901 selected rows are not here")


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_what_all_rows_of_a_shard_cost(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE])

    def sent() -> tuple[int, int]:
        admin_client.get(here)  # Queries that read the keys of the page.
        with Statements(SHARD[ONE], "directory") as statements:
            admin_client.post(here, action_data("star", "x", select_across=1))
        queries = [
            sql
            for sql in statements[SHARD[ONE]]
            if re.search(r"DISTINCT [^,]*user_id[^,]* FROM", sql)
        ]
        return len(queries), len(statements["directory"])

    assert sent() == (1, 0)
    # Two keys, in a batch each, and an empty batch at the end.
    monkeypatch.setattr("sharded_orm.admin.misplaced_rows._BATCH", 1)
    assert sent() == (3, 0)
    assert stars() == {ONE: 5, TWO: None, NEAR: 5}


def test_a_refusal_after_a_shard_that_failed_does_not_hide_it(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def star(self: Any, request: Any, queryset: Any) -> None:
        raise ValueError("broken") if queryset.db == SHARD[ONE] else PermissionDenied("not you")

    monkeypatch.setattr(PhotoAdmin, "star", star)
    response = admin_client.post(
        url(Photo, "changelist"), action_data("star", rows.photo, rows.other_photo)
    )
    first, second = message_texts(response)
    assert first.endswith("ValueError: broken") and second.endswith("PermissionDenied: not you")
    # For one shard, it is one transaction.
    response = admin_client.post(url(Photo, "changelist"), action_data("star", rows.other_photo))
    assert response.status_code == 403
