"""Deletion of a row, and of rows of several shards, with their related rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.db import connections
from django.test import Client

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
from tests.admin.test_actions import action_data, message_texts
from tests.admin.test_changelist import node, text
from tests.photos.models import Album, Comment, Photo

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]


def remaining(model: Any) -> list[str]:
    return sorted(map(str, model.objects.scatter()))


# -- One row ---------------------------------------------------------------------


def test_the_page_of_one_row(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "delete", object_id_by_hand(rows.album)))
    page_text = text(response)
    assert f"Everything below is on shard {SHARD[ONE]}, node {node(SHARD[ONE])}." in page_text
    assert "Albums: 1 Photos: 1" in page_text and "Comments: 1" in page_text
    page = response.content.decode()
    for row in (rows.album, rows.photo, rows.comment):
        assert f'href="{url(type(row), "change", object_id_by_hand(row))}"' in page
    assert remaining(Album) == ["album of 1", "album of 2", "album of 3"]


def test_one_row_and_what_belongs_to_it(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Album, "delete", object_id_by_hand(rows.album)), {"post": "yes"}
    )
    assert response.status_code == 302
    assert remaining(Album) == ["album of 2", "album of 3"]
    assert remaining(Photo) == ["photo of 2", "photo of 3"]
    assert remaining(Comment) == []
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.action_flag) == (object_id_by_hand(rows.album), DELETION)


def test_the_list_that_it_goes_back_to(admin_client: Client, rows: Rows) -> None:
    back = url(
        Album, "delete", object_id_by_hand(rows.album), _changelist_filters=f"_shard={SHARD[ONE]}"
    )
    response = admin_client.post(back, {"post": "yes"})
    assert response.url == url(Album, "changelist", _shard=SHARD[ONE])


def test_a_popup(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Album, "delete", object_id_by_hand(rows.album), _popup=1), {"post": "yes", "_popup": 1}
    )
    assert f"&quot;value&quot;: &quot;{rows.album.pk}&quot;" in response.content.decode()
    assert remaining(Album) == ["album of 2", "album of 3"]


@pytest.mark.parametrize("method", ["get", "post"])
def test_a_name_that_is_forged(admin_client: Client, rows: Rows, method: str) -> None:
    for name in ("x", f"{TWO}~{rows.album.pk}", str(rows.album.pk), "404~1", "1~x", "@default~1"):
        response = getattr(admin_client, method)(url(Album, "delete", name), {"post": "yes"})
        assert response.status_code == 404, name
    assert len(remaining(Album)) == 3


def test_one_row_without_the_permission(rows: Rows) -> None:
    some = logged_in(user_with("view_album", "delete_album"))
    response = some.get(url(Album, "delete", object_id_by_hand(rows.album)))
    assert "your account doesn't have permission to delete" in text(response)
    refused = some.post(url(Album, "delete", object_id_by_hand(rows.album)), {"post": "yes"})
    assert refused.status_code == 403
    viewer = logged_in(user_with("view_album"))
    assert viewer.get(url(Album, "delete", object_id_by_hand(rows.album))).status_code == 403
    assert len(remaining(Album)) == 3 and len(remaining(Photo)) == 3


def test_a_misplaced_row_is_not_deleted(admin_client: Client, rows: Rows) -> None:
    Placement.objects.using("directory").filter(group="photos", key=str(ONE)).update(shard=7)
    name = f"@{SHARD[ONE]}~{rows.album.pk}"
    assert admin_client.post(url(Album, "delete", name), {"post": "yes"}).status_code == 403
    assert Album.objects.using(SHARD[ONE]).filter(pk=rows.album.pk).exists()


# -- Rows of several shards --------------------------------------------------------


def confirmation_page(admin_client: Client, *albums: Album, **scope: Any) -> Any:
    """The page that asks for confirmation."""
    return admin_client.post(
        url(Album, "changelist", **scope), action_data("delete_selected", *albums)
    )


def confirmation(page: Any) -> dict[str, Any]:
    """The POST data of the confirmation page."""
    fields = re.findall(
        r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.content.decode()
    )
    data: dict[str, Any] = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    return data


def test_the_page_says_how_many_rows_on_which_shards(admin_client: Client, rows: Rows) -> None:
    response = confirmation_page(admin_client, rows.album, rows.near_album, rows.other_album)
    assert response.status_code == 200
    first, second = response.context["deletions"]
    assert first.shard.alias == SHARD[ONE] and second.shard.alias == SHARD[TWO]
    assert first.counts["albums"] == 2 and first.counts["photos"] == 2
    assert first.counts["comments"] == 1
    assert second.counts == {"albums": 1, "photos": 1}
    page_text = text(response)
    assert f"{SHARD[TWO]} {node(SHARD[TWO])} albums: 1, photos: 1 2" in page_text
    assert "2 shards albums: 3, photos: 3, photo-tag relationships: 1, comments: 1 8" in page_text
    assert (
        f'href="{url(Photo, "change", object_id_by_hand(rows.photo))}"' in response.content.decode()
    )
    assert len(remaining(Album)) == 3


def test_rows_of_two_shards(admin_client: Client, rows: Rows) -> None:
    page = confirmation_page(admin_client, rows.album, rows.other_album)
    response = admin_client.post(url(Album, "changelist"), confirmation(page))
    assert response.status_code == 302
    assert (remaining(Album), remaining(Photo), remaining(Comment)) == (
        ["album of 3"],
        ["photo of 3"],
        [],
    )
    assert message_texts(response) == [
        "success: Deleted, with what belonged to them: 6 rows on"
        f" {SHARD[ONE]} (4), {SHARD[TWO]} (2)."
    ]
    entries = LogEntry.objects.filter(action_flag=DELETION)
    assert {entry.object_id for entry in entries} == {
        object_id_by_hand(rows.album),
        object_id_by_hand(rows.other_album),
    }


def test_all_rows(admin_client: Client, rows: Rows) -> None:
    here = url(Album, "changelist", q="album of")
    page = admin_client.post(here, action_data("delete_selected", rows.album, select_across=1))
    admin_client.post(here, confirmation(page))
    assert remaining(Album) == remaining(Photo) == []


def test_what_has_changed_is_shown_again(admin_client: Client, rows: Rows) -> None:
    page = confirmation_page(admin_client, rows.album, rows.other_album)
    Comment.objects.create(user_id=TWO, photo=rows.other_photo, text="wait", author_id=ONE)
    again = admin_client.post(url(Album, "changelist"), confirmation(page))
    assert again.status_code == 200
    assert "What would be deleted has changed since it was shown." in text(again)
    assert len(remaining(Album)) == 3
    admin_client.post(url(Album, "changelist"), confirmation(again))
    assert remaining(Album) == ["album of 3"]


def test_as_many_rows_elsewhere_are_something_else(admin_client: Client, rows: Rows) -> None:
    """The total number of rows is the same, but not that of each shard."""
    page = confirmation_page(admin_client, rows.album, rows.other_album)
    rows.comment.delete()
    Comment.objects.create(user_id=TWO, photo=rows.other_photo, text="wait", author_id=ONE)
    again = admin_client.post(url(Album, "changelist"), confirmation(page))
    assert "What would be deleted has changed since it was shown." in text(again)
    assert len(remaining(Album)) == 3


def test_a_thousand_rows(admin_client: Client, rows: Rows, thousand_separators: None) -> None:
    Comment.objects.using(SHARD[ONE]).bulk_create(
        Comment(comment_id=10**6 + n, user_id=ONE, photo=rows.photo, text="x") for n in range(1001)
    )
    page = confirmation_page(admin_client, rows.album)
    assert "1,005" in text(page)
    assert admin_client.post(url(Album, "changelist"), confirmation(page)).status_code == 302
    assert remaining(Album) == ["album of 2", "album of 3"]


def test_a_shard_that_fails(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = confirmation_page(admin_client, rows.album, rows.other_album)
    from tests.admin.lists import AlbumAdmin

    delete = AlbumAdmin.delete_queryset

    def fail(self: Any, request: Any, queryset: Any) -> None:
        delete(self, request, queryset)
        if queryset.db == SHARD[TWO]:
            raise ValueError("not here")

    monkeypatch.setattr(AlbumAdmin, "delete_queryset", fail)
    response = admin_client.post(url(Album, "changelist"), confirmation(page))
    assert remaining(Album) == ["album of 2", "album of 3"]
    assert remaining(Photo) == ["photo of 2", "photo of 3"]
    success, failure = message_texts(response)
    assert success.startswith("warning: Deleted") and f"4 rows on {SHARD[ONE]} (4)" in success
    assert failure.startswith(f"error: Not done on {SHARD[TWO]}")
    # The log has no entry either.
    assert [entry.object_id for entry in LogEntry.objects.all()] == [object_id_by_hand(rows.album)]


def test_rows_without_the_permission(rows: Rows) -> None:
    some = logged_in(user_with("view_album", "delete_album", "delete_photo"))
    page = confirmation_page(some, rows.album, rows.other_album)
    assert "your account doesn't have permission to delete" in text(page)
    data = action_data("delete_selected", rows.album, rows.other_album, post="yes")
    assert some.post(url(Album, "changelist"), data).status_code == 403
    assert len(remaining(Album)) == 3


def test_many_rows_are_counted_and_some_listed(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.admin.delete_views.MAX_LISTED", 2)
    for number in range(4):
        Album.objects.create(owner_id=NEAR, title=f"more {number}")
    page = admin_client.post(
        url(Album, "changelist", _shard=SHARD[ONE]),
        action_data("delete_selected", rows.album, select_across=1),
    )
    (deletion,) = page.context["deletions"]
    assert deletion.counts["albums"] == 6
    assert len([entry for entry in deletion.listed if not isinstance(entry, list)]) == 2
    assert f"and {deletion.unlisted} more" in text(page) and deletion.unlisted >= 4


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_shard_that_does_not_answer(admin_client: Client, rows: Rows) -> None:
    table = Comment._meta.db_table
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    try:
        page = confirmation_page(admin_client, rows.album, rows.other_album)
        page_text = text(page)
        assert "These did not answer. Nothing will be deleted on them:" in page_text
        assert f"{SHARD[TWO]} on {node(SHARD[TWO])}: " in page_text
        response = admin_client.post(url(Album, "changelist"), confirmation(page))
    finally:
        with connections[SHARD[TWO]].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")
    assert remaining(Album) == ["album of 2", "album of 3"]
    assert message_texts(response)[1].startswith(f"error: Not done on {SHARD[TWO]}")
