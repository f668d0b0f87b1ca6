"""The photo site, for a visitor and for a logged-in user."""

from __future__ import annotations

import re

import pytest

from tests.acceptance.browser.chrome import Browser
from tests.acceptance.browser.site import Site, log_in

# The browser gets the same pages on each backend, see tests/acceptance/inside.
pytestmark = pytest.mark.long_on("mariadb")

PHOTO = ".photos a.photo"


@pytest.fixture
def stranger(visitor: Browser) -> Browser:
    """A browser without a login."""
    visitor.open("/")
    visitor.driver.delete_all_cookies()
    visitor.open("/")
    return visitor


def test_from_the_front_page_to_a_photo(stranger: Browser) -> None:
    assert len(stranger.all(PHOTO)) == 24
    stranger.wait_for_pictures(".photos img")
    stranger.picture("front")

    stranger.follow(".photos .by a")
    assert re.fullmatch(r"/photos/\w+/", stranger.path)
    stranger.wait_for_pictures(".photos img")
    stranger.picture("stream")

    title = stranger.texts(".photos .title")[0]
    stranger.follow(PHOTO)
    assert re.fullmatch(r"/photos/\w+/\d+/", stranger.path)
    assert stranger.one("h1").text == title
    stranger.picture("photo")


def test_comment(stranger: Browser, site: Site) -> None:
    stranger.follow(PHOTO)
    photo = stranger.path
    stranger.follow("main a[href^='/login/']")
    log_in(stranger, site)
    assert stranger.path == photo

    text = "Is that <b>Tornio</b>?"
    before = len(stranger.all(".comments > li"))
    stranger.fill(text=text)
    stranger.follow("form.stack button")
    assert re.match(rf"{photo}#comment-\d+$", stranger.path)
    assert len(stranger.all(".comments > li")) == before + 1
    assert text in stranger.texts(".comments > li")[-1]
    stranger.picture("commented")

    # What was done just now is the newest activity of the user, and around the owner of the photo.
    owner = photo.split("/")[2]
    for page in (f"/photos/{site.user}/activity/", f"/photos/{owner}/activity/around/"):
        stranger.open(page)
        assert text in stranger.texts(".events > li")[0]
    stranger.wait_for_pictures(".events img")
    stranger.picture("activity")


def test_on_a_phone(stranger: Browser) -> None:
    with stranger.phone():
        stranger.open("/tags/")
        links = {"tags": ".brand", "front": ".photos .by a", "stream": PHOTO, "photo": ".top a"}
        for page, link in links.items():
            stranger.picture(page)
            assert stranger.too_wide() <= 0, page
            stranger.follow(link)


def test_pin_to_a_board(stranger: Browser, site: Site) -> None:
    stranger.follow(".top a[href='/boards/']")
    assert len(stranger.all(PHOTO)) == 8
    stranger.wait_for_pictures(".photos img")
    stranger.picture("boards")
    stranger.follow(PHOTO)
    stranger.wait_for_pictures(".photos img")
    stranger.picture("board")

    stranger.follow(PHOTO)
    photo = stranger.one("h1").text
    stranger.follow("main a[href^='/boards/pin/']")
    log_in(stranger, site)
    stranger.fill(new_board="Mine", note="Look")
    stranger.picture("pin")
    stranger.follow("form.stack button")
    assert stranger.one("h1").text == "Mine"
    assert stranger.texts(".photos .title") == ["Look"]
    stranger.follow(PHOTO)
    assert stranger.one("h1").text == photo
