"""Pictures: drawn for photos that exist, one at a time."""

from __future__ import annotations

from io import BytesIO
from threading import Event, Thread
from typing import Any

import pytest
from django.test import Client
from PIL import Image

from testproject.photos import pictures
from testproject.photos.models import Photo
from testproject.photos.pictures import WIDTHS
from tests.patience import PATIENCE

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


def address(photo: Photo, width: int = WIDTHS[0]) -> str:
    return f"/pictures/{photo.photo_id}/{width}.webp"


@pytest.mark.parametrize("width", WIDTHS)
def test_picture_needs_one_shard(
    browser: Client, dunes: Photo, lake: Photo, django_assert_num_queries: Any, width: int
) -> None:
    # The lookup, and whether there is such a photo.
    with (
        django_assert_num_queries(1, using="addresses"),
        django_assert_num_queries(1, using="photos"),
        django_assert_num_queries(0, using="default"),
    ):
        answer = browser.get(address(dunes, width))
    assert answer.headers["Content-Type"] == "image/webp"
    with Image.open(BytesIO(answer.content)) as picture:
        assert (picture.format, picture.size) == ("WEBP", (width, width * 3 // 4))
    assert answer.content != browser.get(address(lake, width)).content


def test_picture_is_kept_by_browsers(browser: Client, dunes: Photo, lake: Photo) -> None:
    answer = browser.get(address(dunes))
    assert answer.headers["Cache-Control"] == "public, max-age=86400"
    assert "Cookie" not in answer.headers.get("Vary", "")
    known = {"If-None-Match": answer.headers["ETag"]}
    again = browser.get(address(dunes), headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert browser.get(address(lake), headers=known).status_code == 200


def test_picture_of_no_photo_is_not_drawn(browser: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(pictures, "draw", lambda number, width: drawn.append(number))
    answer = browser.get("/pictures/999999/960.webp")
    assert (answer.status_code, drawn) == (404, [])
    # The picture may exist tomorrow.
    assert "Cache-Control" not in answer.headers


def test_picture_tells_what_it_shows(browser: Client, dunes: Photo) -> None:
    page = browser.get(dunes.get_absolute_url()).content.decode()
    assert f'alt="{dunes.description}"' in page
    assert dunes.description.startswith("Drawing of ")


def test_who_waits_too_long_is_told_to_come_again(
    browser: Client, dunes: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, scene = Event(), Event(), pictures.scene

    def slow(number: int) -> Any:
        begun.set()
        go_on.wait(PATIENCE)
        return scene(number)

    monkeypatch.setattr(pictures, "scene", slow)
    monkeypatch.setattr(pictures, "PATIENCE", 0.01)
    other = Thread(target=pictures.draw, args=(0, WIDTHS[0]))
    other.start()
    try:
        assert begun.wait(PATIENCE)
        answer = browser.get(address(dunes))
    finally:
        go_on.set()
        other.join()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "30")
    assert "Cache-Control" not in answer.headers
    assert browser.get(address(dunes)).status_code == 200
