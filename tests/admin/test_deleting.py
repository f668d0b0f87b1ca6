"""Deleting a row, and rows of several shards, with what belongs to them."""

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
    named,
    url,
    user_with,
)
from tests.admin.test_actions import chosen, reports
from tests.admin.test_changelist import node, text
from tests.photos.models import Album, Comment, Photo

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]


def left(model: Any) -> list[str]:
    return sorted(map(str, model.objects.scatter()))


# -- One row ---------------------------------------------------------------------


def test_the_page_of_one_row(browser: Client, rows: Rows) -> None:
    response = browser.get(url(Album, "delete", named(rows.album)))
    shown = text(response)
    assert f"Everything below is on shard {SHARD[ONE]}, node {node(SHARD[ONE])}." in shown
    assert "Albums: 1 Photos: 1" in shown and "Comments: 1" in shown
    page = response.content.decode()
    for row in (rows.album, rows.photo, rows.comment):
        assert f'href="{url(type(row), "change", named(row))}"' in page
    assert left(Album) == ["album of 1", "album of 2", "album of 3"]


def test_one_row_and_what_belongs_to_it(browser: Client, rows: Rows) -> None:
    response = browser.post(url(Album, "delete", named(rows.album)), {"post": "yes"})
    assert response.status_code == 302
    assert left(Album) == ["album of 2", "album of 3"]
    assert left(Photo) == ["photo of 2", "photo of 3"]
    assert left(Comment) == []
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.action_flag) == (named(rows.album), DELETION)


def test_the_list_that_it_goes_back_to(browser: Client, rows: Rows) -> None:
    back = url(Album, "delete", named(rows.album), _changelist_filters=f"_shard={SHARD[ONE]}")
    response = browser.post(back, {"post": "yes"})
    assert response.url == url(Album, "changelist", _shard=SHARD[ONE])


def test_a_popup(browser: Client, rows: Rows) -> None:
    response = browser.post(
        url(Album, "delete", named(rows.album), _popup=1), {"post": "yes", "_popup": 1}
    )
    assert f"&quot;value&quot;: &quot;{rows.album.pk}&quot;" in response.content.decode()
    assert left(Album) == ["album of 2", "album of 3"]


@pytest.mark.parametrize("method", ["get", "post"])
def test_a_name_that_is_forged(browser: Client, rows: Rows, method: str) -> None:
    for name in ("x", f"{TWO}~{rows.album.pk}", str(rows.album.pk), "404~1", "1~x", "@default~1"):
        response = getattr(browser, method)(url(Album, "delete", name), {"post": "yes"})
        assert response.status_code == 404, name
    assert len(left(Album)) == 3


def test_one_row_without_the_permission(rows: Rows) -> None:
    some = logged_in(user_with("view_album", "delete_album"))
    response = some.get(url(Album, "delete", named(rows.album)))
    assert "your account doesn't have permission to delete" in text(response)
    refused = some.post(url(Album, "delete", named(rows.album)), {"post": "yes"})
    assert refused.status_code == 403
    viewer = logged_in(user_with("view_album"))
    assert viewer.get(url(Album, "delete", named(rows.album))).status_code == 403
    assert len(left(Album)) == 3 and len(left(Photo)) == 3


def test_a_misplaced_row_is_not_deleted(browser: Client, rows: Rows) -> None:
    Placement.objects.using("directory").filter(group="photos", key=str(ONE)).update(shard=7)
    name = f"@{SHARD[ONE]}~{rows.album.pk}"
    assert browser.post(url(Album, "delete", name), {"post": "yes"}).status_code == 403
    assert Album.objects.using(SHARD[ONE]).filter(pk=rows.album.pk).exists()


# -- Rows of several shards --------------------------------------------------------


def asked(browser: Client, *albums: Album, **place: Any) -> Any:
    """The page that asks whether one is sure."""
    return browser.post(url(Album, "changelist", **place), chosen("delete_selected", *albums))


def answer(page: Any) -> dict[str, Any]:
    """What its form sends."""
    fields = re.findall(
        r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.content.decode()
    )
    data: dict[str, Any] = {}
    for name, value in fields:
        data.setdefault(name, []).append(value)
    return data


def test_the_page_says_how_many_rows_on_which_shards(browser: Client, rows: Rows) -> None:
    response = asked(browser, rows.album, rows.near_album, rows.other_album)
    assert response.status_code == 200
    first, second = response.context["deletions"]
    assert first.shard.alias == SHARD[ONE] and second.shard.alias == SHARD[TWO]
    assert first.counts["albums"] == 2 and first.counts["photos"] == 2
    assert first.counts["comments"] == 1
    assert second.counts == {"albums": 1, "photos": 1}
    shown = text(response)
    assert f"{SHARD[TWO]} {node(SHARD[TWO])} albums: 1, photos: 1 2" in shown
    assert "2 shards albums: 3, photos: 3, photo-tag relationships: 1, comments: 1 8" in shown
    assert f'href="{url(Photo, "change", named(rows.photo))}"' in response.content.decode()
    assert len(left(Album)) == 3


def test_rows_of_two_shards(browser: Client, rows: Rows) -> None:
    page = asked(browser, rows.album, rows.other_album)
    response = browser.post(url(Album, "changelist"), answer(page))
    assert response.status_code == 302
    assert (left(Album), left(Photo), left(Comment)) == (["album of 3"], ["photo of 3"], [])
    assert reports(response) == [
        "success: Deleted, with what belonged to them: 6 rows on"
        f" {SHARD[ONE]} (4), {SHARD[TWO]} (2)."
    ]
    entries = LogEntry.objects.filter(action_flag=DELETION)
    assert {entry.object_id for entry in entries} == {named(rows.album), named(rows.other_album)}


def test_all_rows(browser: Client, rows: Rows) -> None:
    here = url(Album, "changelist", q="album of")
    page = browser.post(here, chosen("delete_selected", rows.album, select_across=1))
    browser.post(here, answer(page))
    assert left(Album) == left(Photo) == []


def test_what_has_changed_is_shown_again(browser: Client, rows: Rows) -> None:
    page = asked(browser, rows.album, rows.other_album)
    Comment.objects.create(user_id=TWO, photo=rows.other_photo, text="wait", author_id=ONE)
    again = browser.post(url(Album, "changelist"), answer(page))
    assert again.status_code == 200
    assert "What would be deleted has changed since it was shown." in text(again)
    assert len(left(Album)) == 3
    browser.post(url(Album, "changelist"), answer(again))
    assert left(Album) == ["album of 3"]


def test_as_many_rows_elsewhere_are_something_else(browser: Client, rows: Rows) -> None:
    """The sum is the same."""
    page = asked(browser, rows.album, rows.other_album)
    rows.comment.delete()
    Comment.objects.create(user_id=TWO, photo=rows.other_photo, text="wait", author_id=ONE)
    again = browser.post(url(Album, "changelist"), answer(page))
    assert "What would be deleted has changed since it was shown." in text(again)
    assert len(left(Album)) == 3


def test_a_thousand_rows(browser: Client, rows: Rows, thousands: None) -> None:
    Comment.objects.using(SHARD[ONE]).bulk_create(
        Comment(comment_id=10**6 + n, user_id=ONE, photo=rows.photo, text="x") for n in range(1001)
    )
    page = asked(browser, rows.album)
    assert "1,005" in text(page)
    assert browser.post(url(Album, "changelist"), answer(page)).status_code == 302
    assert left(Album) == ["album of 2", "album of 3"]


def test_a_shard_that_fails(browser: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    page = asked(browser, rows.album, rows.other_album)
    from tests.admin.lists import AlbumAdmin

    delete = AlbumAdmin.delete_queryset

    def fail(self: Any, request: Any, queryset: Any) -> None:
        delete(self, request, queryset)
        if queryset.db == SHARD[TWO]:
            raise ValueError("not here")

    monkeypatch.setattr(AlbumAdmin, "delete_queryset", fail)
    response = browser.post(url(Album, "changelist"), answer(page))
    assert left(Album) == ["album of 2", "album of 3"]
    assert left(Photo) == ["photo of 2", "photo of 3"]
    done, failed = reports(response)
    assert done.startswith("warning: Deleted") and f"4 rows on {SHARD[ONE]} (4)" in done
    assert failed.startswith(f"error: Not done on {SHARD[TWO]}")
    # Nor does the log say so.
    assert [entry.object_id for entry in LogEntry.objects.all()] == [named(rows.album)]


def test_rows_without_the_permission(rows: Rows) -> None:
    some = logged_in(user_with("view_album", "delete_album", "delete_photo"))
    page = asked(some, rows.album, rows.other_album)
    assert "your account doesn't have permission to delete" in text(page)
    data = chosen("delete_selected", rows.album, rows.other_album, post="yes")
    assert some.post(url(Album, "changelist"), data).status_code == 403
    assert len(left(Album)) == 3


def test_many_rows_are_counted_and_some_listed(
    browser: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.admin.delete_views.MAX_LISTED", 2)
    for number in range(4):
        Album.objects.create(owner_id=NEAR, title=f"more {number}")
    page = browser.post(
        url(Album, "changelist", _shard=SHARD[ONE]),
        chosen("delete_selected", rows.album, select_across=1),
    )
    (deletion,) = page.context["deletions"]
    assert deletion.counts["albums"] == 6
    assert len([entry for entry in deletion.listed if not isinstance(entry, list)]) == 2
    assert f"and {deletion.unlisted} more" in text(page) and deletion.unlisted >= 4


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_shard_that_does_not_answer(browser: Client, rows: Rows) -> None:
    table = Comment._meta.db_table
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    try:
        page = asked(browser, rows.album, rows.other_album)
        shown = text(page)
        assert "These did not answer. Nothing will be deleted on them:" in shown
        assert f"{SHARD[TWO]} on {node(SHARD[TWO])}: " in shown
        response = browser.post(url(Album, "changelist"), answer(page))
    finally:
        with connections[SHARD[TWO]].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")
    assert left(Album) == ["album of 2", "album of 3"]
    assert reports(response)[1].startswith(f"error: Not done on {SHARD[TWO]}")
