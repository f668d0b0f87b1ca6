"""The log in the global database: each entry names its row by the object id."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import (
    DATABASES,
    ONE,
    SHARD,
    TWO,
    Rows,
    form_of,
    move,
    object_id_by_hand,
    url,
)
from tests.photos.models import Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


@pytest.fixture
def photos_with_one_id(placed: None) -> list[Photo]:
    """Two photos with the same primary key, on two shards."""
    return [Photo.objects.create(photo_id=77, user_id=key, title=f"of {key}") for key in (ONE, TWO)]


def test_rows_with_one_id_have_their_own_history(
    admin_client: Client, photos_with_one_id: list[Photo]
) -> None:
    for photo in photos_with_one_id:
        address = url(Photo, "change", object_id_by_hand(photo))
        assert (
            admin_client.post(address, form_of(photo, title=f"new {photo.user_id}")).status_code
            == 302
        )
    for photo in photos_with_one_id:
        response = admin_client.get(url(Photo, "history", object_id_by_hand(photo)))
        [entry] = response.context["action_list"]
        assert entry.object_id == object_id_by_hand(photo)
        assert entry.object_repr == f"new {photo.user_id}"
        assert url(Photo, "change", object_id_by_hand(photo)) in response.content.decode()


def test_recent_actions_lead_to_the_rows(
    admin_client: Client, photos_with_one_id: list[Photo]
) -> None:
    for photo in photos_with_one_id:
        admin_client.post(
            url(Photo, "change", object_id_by_hand(photo)), form_of(photo, title="new")
        )
    page = admin_client.get("/admin/").content.decode()
    for photo in photos_with_one_id:
        link = url(Photo, "change", object_id_by_hand(photo))
        assert f'href="{link}"' in page
        assert admin_client.get(link).context["original"].user_id == photo.user_id


def test_the_log_is_in_the_global_database(admin_client: Client, rows: Rows) -> None:
    admin_client.post(url(Tag, "add", _key=TWO), {"name": "a"})
    tag = Tag.objects.get(user_id=TWO, name="a")
    admin_client.post(url(Tag, "change", object_id_by_hand(tag)), {"name": "b"})
    admin_client.post(url(Tag, "delete", object_id_by_hand(tag)), {"post": "yes"})
    entries = LogEntry.objects.using("default").order_by("pk")
    assert [(e.action_flag, e.object_id, e.object_repr) for e in entries] == [
        (ADDITION, object_id_by_hand(tag), "a"),
        (CHANGE, object_id_by_hand(tag), "b"),
        (DELETION, object_id_by_hand(tag), "b"),
    ]
    assert "Changed Name." in str(entries[1].get_change_message())
    assert admin_client.get(url(Tag, "history", object_id_by_hand(tag))).status_code == 404


def test_history_goes_along_when_a_key_moves(admin_client: Client, rows: Rows) -> None:
    admin_client.post(url(Tag, "change", object_id_by_hand(rows.tag)), {"name": "new"})
    move(ONE, 12)
    assert admin_client.get(url(Tag, "history", object_id_by_hand(rows.tag))).status_code == 404
    # Like a move. On that shard there is another tag with this primary key.
    Tag.objects.using("photos_00012").all().delete()
    Tag.objects.using("photos_00012").bulk_create([Tag(pk=rows.tag.pk, user_id=ONE, name="new")])
    response = admin_client.get(url(Tag, "history", object_id_by_hand(rows.tag)))
    assert len(response.context["action_list"]) == 1


def test_hooks_are_given_the_row_itself(admin_client: Client, rows: Rows, register: Any) -> None:
    calls: list[tuple[str, Any]] = []

    class Hooks(ShardedModelAdmin):
        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            super().save_model(request, obj, form, change)
            calls.append(("save", obj))

        def log_addition(self, request: Any, obj: Any, message: Any) -> Any:
            calls.append(("log", obj))
            return super().log_addition(request, obj, message)

        def response_add(self, request: Any, obj: Any, post_url_continue: Any = None) -> Any:
            calls.append(("response", obj))
            return super().response_add(request, obj, post_url_continue)

        def response_post_save_add(self, request: Any, obj: Any) -> Any:
            calls.append(("after", obj))
            return super().response_post_save_add(request, obj)

    register(Tag, Hooks)
    admin_client.post(url(Tag, "add", _key=TWO), {"name": "new"})
    tag = Tag.objects.get(user_id=TWO, name="new")
    assert [name for name, _ in calls] == ["save", "log", "response", "after"]
    assert all(type(obj) is Tag and obj.pk == tag.pk for _, obj in calls)


def test_another_name_of_a_row_leads_to_its_history(admin_client: Client, rows: Rows) -> None:
    admin_client.post(url(Tag, "change", object_id_by_hand(rows.tag)), {"name": "new"})
    for name in (str(rows.tag.pk), f"0{ONE}~{rows.tag.pk}", f"@{SHARD[ONE]}~{rows.tag.pk}"):
        response = admin_client.get(url(Tag, "history", name, _shard=SHARD[ONE]), follow=True)
        assert response.redirect_chain == [(url(Tag, "history", object_id_by_hand(rows.tag)), 302)]
        assert len(response.context["action_list"]) == 1
