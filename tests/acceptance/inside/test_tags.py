"""Tags of a photo, of a user, and of all users."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from testproject.photos.models import Photo, PhotoTag
from testproject.photos.publication import publish
from testproject.photos.tags import parse
from testproject.photos.words import InvalidTags
from tests.acceptance.inside.pages import most_statements, titles

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


@pytest.fixture(autouse=True)
def tagged(ada: Any, bela: Any) -> dict[str, Photo]:
    photos = {}
    for owner, title, tags in (
        (ada, "Dunes", ["sand", "low tide"]),
        (ada, "Moor", ["fog"]),
        (bela, "Shore", ["sand", "fog"]),
        (bela, "Bay", ["sand"]),
    ):
        photos[title] = publish(owner, title, new_album="All", tags=tags)
    return photos


def test_photos_with_a_tag_of_everybody(browser: Client, django_assert_num_queries: Any) -> None:
    with (
        CaptureQueriesContext(connections["photos"]) as queries,
        django_assert_num_queries(1, using="default"),
    ):
        page = browser.get("/tags/sand/")
    assert titles(page) == ["Bay", "Shore", "Dunes"]
    assert len(queries) <= most_statements(2)
    assert titles(browser.get("/tags/%23Low%20%20Tide/")) == ["Dunes"]


def test_all_tags_are_counted_together(browser: Client) -> None:
    with CaptureQueriesContext(connections["photos"]) as queries:
        page = browser.get("/tags/")
    counted = [(tag["text"], tag["photos"]) for tag in page.context["tags"]]
    assert counted == [("fog", 2), ("low tide", 1), ("sand", 3)]
    assert "/tags/low%20tide/" in page.content.decode()
    assert len(queries) <= most_statements(2)


def test_tags_of_a_user(browser: Client) -> None:
    page = browser.get("/photos/bela/")
    assert [(t["text"], t["photos"]) for t in page.context["tags"]] == [("sand", 2), ("fog", 1)]
    assert "/photos/bela/tags/sand/" in page.content.decode()


def test_photos_of_a_user_with_a_tag(browser: Client, django_assert_num_queries: Any) -> None:
    # Their number, and the photos.
    with (
        django_assert_num_queries(2, using="photos"),
        django_assert_num_queries(1, using="default"),
    ):
        page = browser.get("/photos/bela/tags/sand/")
    assert [photo.title for photo in page.context["page"]] == ["Bay", "Shore"]


def test_tags_of_a_photo(browser: Client, tagged: dict[str, Photo]) -> None:
    page = browser.get(tagged["Dunes"].get_absolute_url())
    assert [tag.text for tag in page.context["tags"]] == ["low tide", "sand"]


@pytest.mark.parametrize(
    "path",
    [
        "/tags/nothing/",
        "/tags/%00/",
        f"/tags/{'x' * 500}/",
        "/photos/ada/tags/nothing/",
        "/photos/nobody/tags/sand/",
    ],
)
def test_tag_that_nobody_gave(browser: Client, path: str) -> None:
    assert browser.get(path).status_code == 404


def test_a_photo_that_is_deleted_takes_its_tags_along(
    browser: Client, tagged: dict[str, Photo]
) -> None:
    tagged["Bay"].delete()
    assert titles(browser.get("/tags/sand/")) == ["Shore", "Dunes"]


@pytest.mark.parametrize(
    ("entered", "stored"), [("#Low  Tide", "low tide"), ("a/b", None), ("-", None), ("Fog", None)]
)
def test_a_tag_of_the_admin_is_like_others(
    browser: Client, ada: Any, tagged: dict[str, Photo], entered: str, stored: str | None
) -> None:
    browser.force_login(get_user_model().objects.create_superuser("root"))
    moor = tagged["Moor"]
    form = {"photo": str(moor.pk), "text": entered, "_save": "1"}
    answer = browser.post(f"/admin/photos/phototag/add/?_key={ada.pk}", form)
    tags = {tag.text for tag in PhotoTag.objects.filter(owner=ada, photo=moor)}
    if stored is None:
        assert answer.context["adminform"].errors
        assert tags == {"fog"}
    else:
        assert answer.status_code == 302
        assert tags == {"fog", stored}
    for page in (moor.get_absolute_url(), "/photos/ada/", "/tags/"):
        assert browser.get(page).status_code == 200


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("", []),
        (" , ,", []),
        ("Dunes, dunes ,#DUNES", ["dunes"]),
        ("low   tide,Été 2026,a-b_c", ["low tide", "été 2026", "a-b_c"]),
        ("E\u0301te\u0301", ["été"]),
    ],
)
def test_one_way_of_writing(text: str, tags: list[str]) -> None:
    assert parse(text) == tags


@pytest.mark.parametrize("text", ["a;b", "-", "low/tide", "x" * 41, "a,b,c,d,e,f,g,h,i", "\0"])
def test_what_is_no_list_of_tags(text: str) -> None:
    with pytest.raises(InvalidTags):
        parse(text)
