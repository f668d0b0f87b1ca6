"""What was done, and to which row: the log in the global database."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, form_of, move, named, url
from tests.photos.models import Photo, Tag

pytestmark = [
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


@pytest.fixture
def twins(placed: None) -> list[Photo]:
    """Two photos with one id, on two shards."""
    return [Photo.objects.create(photo_id=77, user_id=key, title=f"of {key}") for key in (ONE, TWO)]


def test_rows_with_one_id_have_their_own_history(browser: Client, twins: list[Photo]) -> None:
    for photo in twins:
        address = url(Photo, "change", named(photo))
        assert (
            browser.post(address, form_of(photo, title=f"new {photo.user_id}")).status_code == 302
        )
    for photo in twins:
        response = browser.get(url(Photo, "history", named(photo)))
        [entry] = response.context["action_list"]
        assert entry.object_id == named(photo)
        assert entry.object_repr == f"new {photo.user_id}"
        assert url(Photo, "change", named(photo)) in response.content.decode()


def test_recent_actions_lead_to_the_rows(browser: Client, twins: list[Photo]) -> None:
    for photo in twins:
        browser.post(url(Photo, "change", named(photo)), form_of(photo, title="new"))
    page = browser.get("/admin/").content.decode()
    for photo in twins:
        link = url(Photo, "change", named(photo))
        assert f'href="{link}"' in page
        assert browser.get(link).context["original"].user_id == photo.user_id


def test_the_log_is_in_the_global_database(browser: Client, rows: Rows) -> None:
    browser.post(url(Tag, "add", _key=TWO), {"name": "a"})
    tag = Tag.objects.get(user_id=TWO, name="a")
    browser.post(url(Tag, "change", named(tag)), {"name": "b"})
    browser.post(url(Tag, "delete", named(tag)), {"post": "yes"})
    entries = LogEntry.objects.using("default").order_by("pk")
    assert [(e.action_flag, e.object_id, e.object_repr) for e in entries] == [
        (ADDITION, named(tag), "a"),
        (CHANGE, named(tag), "b"),
        (DELETION, named(tag), "b"),
    ]
    assert "Changed Name." in str(entries[1].get_change_message())
    assert browser.get(url(Tag, "history", named(tag))).status_code == 404


def test_history_goes_along_when_a_key_moves(browser: Client, rows: Rows) -> None:
    browser.post(url(Tag, "change", named(rows.tag)), {"name": "new"})
    move(ONE, 12)
    assert browser.get(url(Tag, "history", named(rows.tag))).status_code == 404
    # As a move would do it: there is another tag with this id on that shard.
    Tag.objects.using("photos_00012").all().delete()
    Tag.objects.using("photos_00012").bulk_create([Tag(pk=rows.tag.pk, user_id=ONE, name="new")])
    response = browser.get(url(Tag, "history", named(rows.tag)))
    assert len(response.context["action_list"]) == 1


def test_hooks_are_given_the_row_itself(browser: Client, rows: Rows, registered: Any) -> None:
    seen: list[tuple[str, Any]] = []

    class Hooks(ShardedModelAdmin):
        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            super().save_model(request, obj, form, change)
            seen.append(("save", obj))

        def log_addition(self, request: Any, obj: Any, message: Any) -> Any:
            seen.append(("log", obj))
            return super().log_addition(request, obj, message)

        def response_add(self, request: Any, obj: Any, post_url_continue: Any = None) -> Any:
            seen.append(("response", obj))
            return super().response_add(request, obj, post_url_continue)

        def response_post_save_add(self, request: Any, obj: Any) -> Any:
            seen.append(("after", obj))
            return super().response_post_save_add(request, obj)

    registered(Tag, Hooks)
    browser.post(url(Tag, "add", _key=TWO), {"name": "new"})
    tag = Tag.objects.get(user_id=TWO, name="new")
    assert [name for name, _ in seen] == ["save", "log", "response", "after"]
    assert all(type(obj) is Tag and obj.pk == tag.pk for _, obj in seen)


def test_another_name_of_a_row_leads_to_its_history(browser: Client, rows: Rows) -> None:
    browser.post(url(Tag, "change", named(rows.tag)), {"name": "new"})
    for name in (str(rows.tag.pk), f"0{ONE}~{rows.tag.pk}", f"@{SHARD[ONE]}~{rows.tag.pk}"):
        response = browser.get(url(Tag, "history", name, _shard=SHARD[ONE]), follow=True)
        assert response.redirect_chain == [(url(Tag, "history", named(rows.tag)), 302)]
        assert len(response.context["action_list"]) == 1
