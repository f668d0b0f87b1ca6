"""The page of one row: read, changed, refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    form_of,
    inline,
    move,
    named,
    url,
)
from tests.photos.models import Album, Comment, Note, Person, Photo, Tag, Visit

pytestmark = [
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def test_the_page_shows_the_row_of_its_shard(browser: Client, rows: Rows) -> None:
    response = browser.get(url(Photo, "change", named(rows.photo)))
    assert response.status_code == 200
    assert response.context["original"].title == "photo of 1"
    assert SHARD[ONE] in response.content.decode()


def test_a_change_is_stored_on_the_row_s_shard(browser: Client, rows: Rows) -> None:
    response = browser.post(
        url(Photo, "change", named(rows.other_photo)), form_of(rows.other_photo, title="new")
    )
    assert response.status_code == 302, response.context["errors"]
    assert Photo.objects.using(SHARD[TWO]).get(pk=rows.other_photo.pk).title == "new"
    assert not Photo.objects.using(SHARD[ONE]).filter(title="new").exists()


@pytest.mark.parametrize("given", [str(TWO), str(NEAR), "x", "", "99999999999999999999"])
def test_another_key_is_refused_with_the_reason(browser: Client, rows: Rows, given: str) -> None:
    response = browser.post(
        url(Photo, "change", named(rows.photo)), form_of(rows.photo, title="new", user_id=given)
    )
    assert response.status_code == 200
    assert "cannot be changed here. The shard key: it decides" in str(response.context["errors"])
    assert Photo.objects.get(user_id=ONE, pk=rows.photo.pk).title == "photo of 1"
    assert not LogEntry.objects.exists()


def test_the_same_key_is_no_change(browser: Client, rows: Rows) -> None:
    response = browser.post(
        url(Photo, "change", named(rows.photo)), form_of(rows.photo, title="new", user_id="1")
    )
    assert response.status_code == 302


class OwnReadonly(ShardedModelAdmin):
    """As many a project has it, and shows the key as a field by that."""

    def get_readonly_fields(self, request: Any, obj: Any = None) -> Any:
        return ["title"] if obj else []


def test_another_key_is_refused_where_the_project_shows_it_as_a_field(
    browser: Client, rows: Rows, registered: Any
) -> None:
    registered(Album, OwnReadonly)
    address = url(Album, "change", named(rows.album))
    assert 'name="owner"' in browser.get(address).content.decode()
    response = browser.post(address, {"owner": TWO})
    assert "cannot be changed here" in str(response.context["errors"])
    assert browser.post(address, {"owner": ONE}).status_code == 302
    assert Album.objects.using(SHARD[ONE]).get(pk=rows.album.pk).owner_id == ONE


def test_a_constraint_over_the_key_is_a_form_error(browser: Client, rows: Rows) -> None:
    # The key is in the constraint and not in the form: Django would skip it and then fail.
    Tag.objects.create(user_id=ONE, name="sun")
    response = browser.post(url(Tag, "change", named(rows.tag)), {"name": "sun"})
    assert response.status_code == 200
    assert "already exists" in str(response.context["errors"])
    response = browser.post(url(Tag, "add", _key=ONE), {"name": "sun"})
    assert "already exists" in str(response.context["errors"])
    # On the same shard, but somebody else's.
    assert browser.post(url(Tag, "add", _key=NEAR), {"name": "sun"}).status_code == 302


def test_a_row_of_somebody_who_is_gone_can_be_changed(browser: Client, rows: Rows) -> None:
    Person.objects.filter(pk=ONE).delete()
    data = {"title": "left behind", **inline("photos")}
    response = browser.post(url(Album, "change", named(rows.album)), data)
    assert response.status_code == 302, response.context["errors"]
    assert Album.objects.get(owner=ONE).title == "left behind"
    page = browser.get(url(Album, "change", named(rows.album))).content.decode()
    assert '<div class="readonly">1</div>' in page


def test_the_links_of_the_page_carry_the_key(browser: Client, rows: Rows) -> None:
    page = browser.get(url(Photo, "change", named(rows.photo))).content.decode()
    for name in ("history", "delete", "site"):
        assert url(Photo, name, named(rows.photo)) in page


def test_view_on_site(browser: Client, rows: Rows) -> None:
    response = browser.get(url(Photo, "site", named(rows.photo)))
    assert (response.status_code, response.url) == (302, rows.photo.get_absolute_url())


def test_save_and_continue_stays_on_the_row(browser: Client, rows: Rows) -> None:
    address = url(Photo, "change", named(rows.photo), _changelist_filters=f"_shard={SHARD[ONE]}")
    response = browser.post(address, form_of(rows.photo, title="a", _continue="1"), follow=True)
    assert response.context["original"].title == "a"
    response = browser.post(address, form_of(rows.photo, title="b"))
    assert response.url == url(Photo, "changelist", _shard=SHARD[ONE])


def test_a_row_that_was_deleted_meanwhile(browser: Client, rows: Rows) -> None:
    address = url(Photo, "change", named(rows.photo))
    data = form_of(rows.photo, title="too late")
    assert browser.get(address).status_code == 200
    rows.photo.delete()
    assert browser.post(address, data).status_code == 404
    assert not Photo.objects.filter(user_id=ONE).exists()


def test_the_last_of_two_editors_is_stored_and_both_are_logged(browser: Client, rows: Rows) -> None:
    address = url(Photo, "change", named(rows.photo))
    first, second = form_of(rows.photo, title="a"), form_of(rows.photo, title="b")
    assert browser.post(address, first).status_code == 302
    assert browser.post(address, second).status_code == 302
    assert Photo.objects.get(user_id=ONE).title == "b"
    assert LogEntry.objects.count() == 2


def test_a_row_whose_key_was_moved_meanwhile(browser: Client, rows: Rows) -> None:
    address = url(Photo, "change", named(rows.photo))
    data = form_of(rows.photo, title="too late")
    move(ONE, 12)
    assert browser.post(address, data).status_code == 404
    assert Photo.objects.using(SHARD[ONE]).get(pk=rows.photo.pk).title == "photo of 1"
    assert not LogEntry.objects.exists()


def test_a_row_whose_key_is_moved_while_it_is_saved(
    browser: Client, rows: Rows, registered: Any
) -> None:
    class Moving(ShardedModelAdmin):
        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            move(ONE, 12)
            super().save_model(request, obj, form, change)

    registered(Tag, Moving)
    address = url(Tag, "change", named(rows.tag))
    response = browser.post(address, {"name": "new"})
    assert (response.status_code, response.url) == (302, address)
    assert not LogEntry.objects.exists()
    assert Tag.objects.using(SHARD[ONE]).get(pk=rows.tag.pk).name == "tag of 1"
    [message] = messages_of(browser)
    assert message.startswith("Nothing was saved: Tag(pk=")


def messages_of(client: Client) -> list[str]:
    response = client.get("/admin/")
    return [str(message) for message in response.context["messages"]]


def test_a_read_only_relation_links_to_its_row(
    browser: Client, rows: Rows, registered: Any
) -> None:
    class Reading(ShardedModelAdmin):
        readonly_fields = ["photo", "author"]

    registered(Comment, Reading)
    page = browser.get(url(Comment, "change", named(rows.comment))).content.decode()
    assert url(Photo, "change", named(rows.photo)) in page
    assert url(Person, "change", str(TWO)) in page


def test_only_declared_fields_can_be_referred_to(browser: Client, rows: Rows) -> None:
    for address in (
        url(Photo, "change", str(rows.photo.pk), _to_field="title", _shard=SHARD[ONE]),
        url(Photo, "change", named(rows.photo), _to_field="title"),
        url(Photo, "change", str(rows.photo.pk), _to_field="nothing", _shard=SHARD[ONE]),
        url(Photo, "add", _key=ONE, _to_field="title"),
    ):
        assert browser.get(address).status_code == 400


def test_a_get_changes_nothing(browser: Client, rows: Rows) -> None:
    row, tag = named(rows.photo), named(rows.tag)
    written = []
    with ExitStack() as stack:
        captured = [
            stack.enter_context(CaptureQueriesContext(connections[alias])) for alias in DATABASES
        ]
        for address, data in (
            (url(Photo, "change", row), {"title": "x", "_save": "1"}),
            (url(Photo, "add"), {}),
            (url(Photo, "add", _key=UNPLACED), {"title": "x", "_save": "1"}),
            (url(Note, "add"), {"text": "x"}),  # A shard is drawn.
            (url(Visit, "add"), {"page": "x", "_save": "1"}),
            (url(Photo, "site", row), {}),
            (url(Photo, "delete", row), {"post": "yes"}),
            (url(Photo, "changelist"), {"action": "star", "_selected_action": row}),
            (
                url(Tag, "changelist", _shard=SHARD[ONE]),
                {"action": "delete_selected", "_selected_action": tag, "post": "yes"},
            ),
        ):
            assert browser.get(address, data, follow=address.endswith("note/add/")).status_code
    for one in captured:
        written += [q["sql"] for q in one if not q["sql"].lstrip("(").startswith(("SELECT", "--"))]
    assert not [sql for sql in written if "SAVEPOINT" not in sql]
    assert runtime.locate("photos", UNPLACED) is None


def test_without_the_token_nothing_is_saved(boss: User, rows: Rows) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(boss)
    for address in (url(Photo, "change", named(rows.photo)), url(Photo, "add", _key=ONE)):
        assert strict.post(address, form_of(rows.photo, title="x")).status_code == 403
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"
