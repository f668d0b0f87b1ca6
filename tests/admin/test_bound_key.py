"""While a key is bound for a request, the pages of the admin are about the rows of that key."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from sharded_orm import bound
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    Rows,
    form_of,
    inline,
    logged_in,
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]

NEW = {"title": "new", "album": "", "posted_at_0": "", "posted_at_1": "", "stars": "", "price": ""}


class Bound:
    """A browser of a superuser. Each of its requests is bound to ONE, as by the middleware."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def get(self, address: str, data: Any = None) -> Any:
        with bound(user_id=ONE, owner=ONE):
            return self._client.get(address, data)

    def post(self, address: str, data: Any) -> Any:
        with bound(user_id=ONE, owner=ONE):
            return self._client.post(address, data, follow=True)


@pytest.fixture
def browser(rows: Rows) -> Bound:
    return Bound(logged_in(User.objects.create_superuser("boss")))


def shows(page: HttpResponse) -> set[int]:
    """The keys whose rows the page shows."""
    text = page.content.decode()
    return {
        key
        for key in (ONE, NEAR, TWO)
        if any(f"{name} of {key}" in text for name in ("photo", "album", "tag"))
    }


def titles() -> list[tuple[int, str, int | None]]:
    return sorted(Photo.objects.scatter().values_list("user_id", "title", "stars"))


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}, {"_key": ONE}, {"q": "photo"}])
def test_lists(browser: Bound, scope: dict[str, Any]) -> None:
    page = browser.get(url(Photo, "changelist", **scope))
    assert (page.status_code, shows(page)) == (200, {ONE})


@pytest.mark.parametrize(
    ("scope", "text"),
    [
        ({"_key": NEAR}, f"rows of one user id, which is not {NEAR}"),
        ({"_key": TWO}, f"rows of one user id, which is not {TWO}"),
        ({"_shard": SHARD[TWO]}, f"rows of user id {ONE} are not on {SHARD[TWO]}"),
    ],
)
def test_a_list_or_form_for_another_key_says_why_not(
    browser: Bound, scope: dict[str, Any], text: str
) -> None:
    for name in ("changelist", "add"):
        page = browser.get(url(Photo, name, **scope))
        assert text in page.content.decode()
        assert not shows(page)
    page = browser.post(url(Photo, "add", **scope), {**NEW, **inline("comments")})
    assert text in page.content.decode()
    assert len(titles()) == 3


def test_pages_of_a_row(browser: Bound, rows: Rows) -> None:
    before = titles()
    for name in ("change", "history", "delete"):
        page = browser.get(url(Photo, name, object_id_by_hand(rows.photo)))
        assert page.status_code == 200
        assert shows(page) <= {ONE}
        for row in (rows.near_photo, rows.other_photo):
            address = url(Photo, name, object_id_by_hand(row))
            assert browser.get(address).status_code == 404
            for data in (form_of(row, title="new"), {"post": "yes"}, {"_saveasnew": "1"}):
                assert browser.post(address, data).status_code == 404
    assert titles() == before
    browser.post(
        url(Photo, "change", object_id_by_hand(rows.photo)), form_of(rows.photo, title="new")
    )
    assert Photo.objects.get(user_id=ONE).title == "new"
    browser.post(url(Photo, "delete", object_id_by_hand(rows.photo)), {"post": "yes"})
    assert titles() == [row for row in before if row[0] != ONE]


def test_a_row_of_another_key_that_its_primary_key_names(browser: Bound, rows: Rows) -> None:
    misplaced = f"@{SHARD[NEAR]}~{rows.near_photo.pk}"
    for object_id in (misplaced, str(rows.near_photo.pk)):
        page = browser.get(url(Photo, "change", object_id, _shard=SHARD[ONE]))
        assert page.status_code == 404


def test_a_new_row_gets_the_key(browser: Bound) -> None:
    page = browser.get(url(Photo, "add"))
    assert shows(page) == {ONE}
    browser.post(url(Photo, "add"), {**NEW, **inline("comments")})
    browser.post(url(Tag, "add"), {"name": "new"})
    refused = browser.post(url(Tag, "add"), {"name": "x", "user_id": TWO})
    assert "cannot be changed here" in refused.content.decode()
    assert Photo.objects.get(user_id=ONE, title="new")._state.db == SHARD[ONE]
    assert Tag.objects.scatter().get(name="new").user_id == ONE
    assert not Tag.objects.scatter().filter(name="x").exists()


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}])
def test_actions(browser: Bound, rows: Rows, scope: dict[str, Any]) -> None:
    photos = (rows.photo, rows.near_photo, rows.other_photo)

    def run(action: str, *selected: Photo, **data: Any) -> str:
        ids = [object_id_by_hand(photo) for photo in selected]
        data |= {"action": action, "_selected_action": ids, "index": 0}
        return browser.post(url(Photo, "changelist", **scope), data).content.decode()

    before = titles()
    for action in ("star", "delete_selected"):
        page = run(action, *photos, select_across=0, post="yes")
        assert "2 of 3 selected rows are not here" in page
    assert titles() == before
    run("star", rows.photo, select_across=1)
    assert [row[2] for row in titles()] == [5, None, None]
    run("delete_selected", rows.photo, select_across=1, post="yes")
    assert {row[0] for row in titles()} == {NEAR, TWO}


def test_editing_in_the_list(browser: Bound, rows: Rows) -> None:
    address = url(Photo, "changelist", _key=ONE)
    data = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "_save": "Save", "form-0-stars": 3}
    browser.post(address, {**data, "form-0-photo_id": rows.near_photo.pk})
    assert {row[2] for row in titles()} == {None}
    browser.post(address, {**data, "form-0-photo_id": rows.photo.pk})
    assert [row[2] for row in titles()] == [3, None, None]


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}, {"_key": NEAR}])
def test_autocomplete(browser: Bound, scope: dict[str, Any]) -> None:
    field = {"app_label": "photos_app", "model_name": "photo", "field_name": "album"}
    page = browser.get(reverse("admin:autocomplete"), {**field, "term": "album", **scope})
    assert shows(page) == ({ONE} if scope != {"_key": NEAR} else set())


def test_a_model_whose_key_is_not_bound(browser: Bound, rows: Rows) -> None:
    with bound(user_id=ONE):
        page = logged_in(User.objects.get()).get(url(Album, "changelist"))
    assert shows(page) == {ONE, NEAR, TWO}
