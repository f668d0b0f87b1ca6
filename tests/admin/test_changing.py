"""The change page of a row: read, saved, refused."""

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
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Comment, Note, Person, Photo, Tag, Visit

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def test_the_page_shows_the_row_of_its_shard(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
    assert response.status_code == 200
    assert response.context["original"].title == "photo of 1"
    assert SHARD[ONE] in response.content.decode()


def test_a_change_is_stored_on_the_row_s_shard(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "change", object_id_by_hand(rows.other_photo)),
        form_of(rows.other_photo, title="new"),
    )
    assert response.status_code == 302, response.context["errors"]
    assert Photo.objects.using(SHARD[TWO]).get(pk=rows.other_photo.pk).title == "new"
    assert not Photo.objects.using(SHARD[ONE]).filter(title="new").exists()


@pytest.mark.parametrize("value", [str(TWO), str(NEAR), "x", "", "99999999999999999999"])
def test_another_key_is_refused_with_the_reason(
    admin_client: Client, rows: Rows, value: str
) -> None:
    response = admin_client.post(
        url(Photo, "change", object_id_by_hand(rows.photo)),
        form_of(rows.photo, title="new", user_id=value),
    )
    assert response.status_code == 200
    assert "cannot be changed here. The shard key: it decides" in str(response.context["errors"])
    assert Photo.objects.get(user_id=ONE, pk=rows.photo.pk).title == "photo of 1"
    assert not LogEntry.objects.exists()


def test_the_same_key_is_no_change(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Photo, "change", object_id_by_hand(rows.photo)),
        form_of(rows.photo, title="new", user_id="1"),
    )
    assert response.status_code == 302


class OwnReadonly(ShardedModelAdmin):
    """An override that many projects have; the key is a form field because of it."""

    def get_readonly_fields(self, request: Any, obj: Any = None) -> Any:
        return ["title"] if obj else []


def test_another_key_is_refused_where_the_project_shows_it_as_a_field(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Album, OwnReadonly)
    address = url(Album, "change", object_id_by_hand(rows.album))
    assert 'name="owner"' in admin_client.get(address).content.decode()
    response = admin_client.post(address, {"owner": TWO})
    assert "cannot be changed here" in str(response.context["errors"])
    assert admin_client.post(address, {"owner": ONE}).status_code == 302
    assert Album.objects.using(SHARD[ONE]).get(pk=rows.album.pk).owner_id == ONE


def test_a_constraint_over_the_key_is_a_form_error(admin_client: Client, rows: Rows) -> None:
    # The key is in the constraint, but not in the form: Django would skip the check, and fail later.
    Tag.objects.create(user_id=ONE, name="sun")
    response = admin_client.post(url(Tag, "change", object_id_by_hand(rows.tag)), {"name": "sun"})
    assert response.status_code == 200
    assert "already exists" in str(response.context["errors"])
    response = admin_client.post(url(Tag, "add", _key=ONE), {"name": "sun"})
    assert "already exists" in str(response.context["errors"])
    # A row of another key on the same shard.
    assert admin_client.post(url(Tag, "add", _key=NEAR), {"name": "sun"}).status_code == 302


def test_a_row_of_somebody_who_is_gone_can_be_changed(admin_client: Client, rows: Rows) -> None:
    Person.objects.filter(pk=ONE).delete()
    data = {"title": "left behind", **inline("photos")}
    response = admin_client.post(url(Album, "change", object_id_by_hand(rows.album)), data)
    assert response.status_code == 302, response.context["errors"]
    assert Album.objects.get(owner=ONE).title == "left behind"
    page = admin_client.get(url(Album, "change", object_id_by_hand(rows.album))).content.decode()
    assert '<div class="readonly">1</div>' in page


def test_the_links_of_the_page_carry_the_key(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    for name in ("history", "delete", "site"):
        assert url(Photo, name, object_id_by_hand(rows.photo)) in page


def test_view_on_site(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "site", object_id_by_hand(rows.photo)))
    assert (response.status_code, response.url) == (302, rows.photo.get_absolute_url())


def test_save_and_continue_stays_on_the_row(admin_client: Client, rows: Rows) -> None:
    address = url(
        Photo, "change", object_id_by_hand(rows.photo), _changelist_filters=f"_shard={SHARD[ONE]}"
    )
    response = admin_client.post(
        address, form_of(rows.photo, title="a", _continue="1"), follow=True
    )
    assert response.context["original"].title == "a"
    response = admin_client.post(address, form_of(rows.photo, title="b"))
    assert response.url == url(Photo, "changelist", _shard=SHARD[ONE])


def test_a_row_that_was_deleted_meanwhile(admin_client: Client, rows: Rows) -> None:
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    data = form_of(rows.photo, title="too late")
    assert admin_client.get(address).status_code == 200
    rows.photo.delete()
    assert admin_client.post(address, data).status_code == 404
    assert not Photo.objects.filter(user_id=ONE).exists()


def test_the_last_of_two_editors_is_stored_and_both_are_logged(
    admin_client: Client, rows: Rows
) -> None:
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    first, second = form_of(rows.photo, title="a"), form_of(rows.photo, title="b")
    assert admin_client.post(address, first).status_code == 302
    assert admin_client.post(address, second).status_code == 302
    assert Photo.objects.get(user_id=ONE).title == "b"
    assert LogEntry.objects.count() == 2


def test_a_row_whose_key_was_moved_meanwhile(admin_client: Client, rows: Rows) -> None:
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    data = form_of(rows.photo, title="too late")
    move(ONE, 12)
    assert admin_client.post(address, data).status_code == 404
    assert Photo.objects.using(SHARD[ONE]).get(pk=rows.photo.pk).title == "photo of 1"
    assert not LogEntry.objects.exists()


def test_a_row_whose_key_is_moved_while_it_is_saved(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Moving(ShardedModelAdmin):
        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            move(ONE, 12)
            super().save_model(request, obj, form, change)

    register(Tag, Moving)
    address = url(Tag, "change", object_id_by_hand(rows.tag))
    response = admin_client.post(address, {"name": "new"})
    assert (response.status_code, response.url) == (302, address)
    assert not LogEntry.objects.exists()
    assert Tag.objects.using(SHARD[ONE]).get(pk=rows.tag.pk).name == "tag of 1"
    [message] = messages_of(admin_client)
    assert message.startswith("Nothing was saved: Tag(pk=")


def messages_of(client: Client) -> list[str]:
    response = client.get("/admin/")
    return [str(message) for message in response.context["messages"]]


def test_a_read_only_relation_links_to_its_row(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Reading(ShardedModelAdmin):
        readonly_fields = ["photo", "author"]

    register(Comment, Reading)
    page = admin_client.get(
        url(Comment, "change", object_id_by_hand(rows.comment))
    ).content.decode()
    assert url(Photo, "change", object_id_by_hand(rows.photo)) in page
    assert url(Person, "change", str(TWO)) in page


def test_only_declared_fields_can_be_referred_to(admin_client: Client, rows: Rows) -> None:
    for address in (
        url(Photo, "change", str(rows.photo.pk), _to_field="title", _shard=SHARD[ONE]),
        url(Photo, "change", object_id_by_hand(rows.photo), _to_field="title"),
        url(Photo, "change", str(rows.photo.pk), _to_field="nothing", _shard=SHARD[ONE]),
        url(Photo, "add", _key=ONE, _to_field="title"),
    ):
        assert admin_client.get(address).status_code == 400


def test_a_get_changes_nothing(admin_client: Client, rows: Rows) -> None:
    row, tag = object_id_by_hand(rows.photo), object_id_by_hand(rows.tag)
    written = []
    with ExitStack() as stack:
        captured = [
            stack.enter_context(CaptureQueriesContext(connections[alias])) for alias in DATABASES
        ]
        for address, data in (
            (url(Photo, "change", row), {"title": "x", "_save": "1"}),
            (url(Photo, "add"), {}),
            (url(Photo, "add", _key=UNPLACED), {"title": "x", "_save": "1"}),
            (url(Note, "add"), {"text": "x"}),  # On a random shard.
            (url(Visit, "add"), {"page": "x", "_save": "1"}),
            (url(Photo, "site", row), {}),
            (url(Photo, "delete", row), {"post": "yes"}),
            (url(Photo, "changelist"), {"action": "star", "_selected_action": row}),
            (
                url(Tag, "changelist", _shard=SHARD[ONE]),
                {"action": "delete_selected", "_selected_action": tag, "post": "yes"},
            ),
        ):
            assert admin_client.get(address, data, follow=address.endswith("note/add/")).status_code
    for context in captured:
        written += [
            q["sql"]
            for q in context
            if not q["sql"].lstrip("(").startswith(("SELECT", "DECLARE", "--"))
        ]
    assert not [sql for sql in written if "SAVEPOINT" not in sql]
    assert runtime.locate("photos", UNPLACED) is None


def test_without_the_token_nothing_is_saved(admin_user: User, rows: Rows) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(admin_user)
    for address in (
        url(Photo, "change", object_id_by_hand(rows.photo)),
        url(Photo, "add", _key=ONE),
    ):
        assert strict.post(address, form_of(rows.photo, title="x")).status_code == 403
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"
