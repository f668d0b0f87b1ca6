"""A node goes down while a user browses, and comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By

from tests.acceptance.browser.admin import HERE, LINK, MAP, MESSAGE, PHOTOS, ROW, SHARD
from tests.acceptance.browser.chrome import Browser
from tests.acceptance.browser.site import FRAGILE, Site, log_in

LOST = "photos_00008"  # The first shard on the node.


def test_node_killed_while_browsing(browser: Browser, site: Site) -> None:
    browser.open(PHOTOS)
    everywhere = {*browser.texts(SHARD)}
    with site.node_down():
        list_of_the_others(browser)
        only_pictures_are_missing(browser)
        list_of_a_lost_shard(browser)
        fleet(browser, site)
        front_page(browser)
    only_pictures_are_missing(browser)
    browser.open(PHOTOS)
    assert not browser.all(".sharded-failed")
    assert {*browser.texts(SHARD)} == everywhere
    browser.open(f"{PHOTOS}?_shard={LOST}")
    assert f"{LOST} on {FRAGILE}, open" in browser.one(HERE).text
    assert not browser.all(".errornote")
    browser.open(MAP)
    assert browser.texts(".fleet-node header .fleet-state") == ["answers"] * 2
    browser.picture("back")


def only_pictures_are_missing(browser: Browser) -> None:
    """A picture of a photo that answers may be on the node, and the browser may not have it yet."""
    missing = browser.complaints()
    assert all("/pictures/" in complaint and "503" in complaint for complaint in missing), missing


def list_of_the_others(browser: Browser) -> None:
    browser.open(PHOTOS)
    (failure,) = browser.texts(".sharded-failed li")
    assert FRAGILE in failure
    assert all(alias < LOST for alias in browser.texts(SHARD))
    browser.picture("everywhere")


def list_of_a_lost_shard(browser: Browser) -> None:
    browser.open(f"{PHOTOS}?_shard={LOST}")
    assert f"{LOST} on {FRAGILE} does not answer" in browser.one(".errornote").text
    browser.picture("shard")
    # The browser logs each response that is an error.
    (complaint,) = browser.complaints()
    assert "503" in complaint


def fleet(browser: Browser, site: Site) -> None:
    browser.open(MAP)
    if site.backend == "mariadb":
        (down,) = browser.all(".fleet-node.is-down")
        assert down.find_element(By.TAG_NAME, "h2").text == FRAGILE
    # Files have no server: a node is down if its folder is gone.
    state = "down" if site.backend == "mariadb" else "missing"
    assert len(browser.all(f".fleet-map .cell.{state} rect")) == 18
    browser.picture("map")
    with browser.next_page():
        browser.one(f".fleet-map a[href$='/{LOST}/'] rect").click()
    assert state in browser.texts(".fleet-state")
    browser.picture("lost")


def front_page(browser: Browser) -> None:
    browser.open("/")
    assert "Some photos cannot be shown" in browser.one(".notice").text
    assert browser.all(".photos a.photo")
    browser.picture("front")


def test_node_killed_before_an_action(browser: Browser, site: Site) -> None:
    browser.open(PHOTOS)
    shards = browser.texts(SHARD)
    alive = next(n for n, alias in enumerate(shards) if alias < LOST)
    lost = next(n for n, alias in enumerate(shards) if alias >= LOST)
    boxes = browser.all(f"{ROW} .action-select")
    for number in (alive, lost):
        browser.click(boxes[number])
    browser.choose("action", "Show as new: posted now")
    with site.node_down():
        browser.follow(".actions button")
        success, failure = browser.texts(MESSAGE)
    only_pictures_are_missing(browser)
    assert f"1 row on {shards[alive]} (1)" in success
    assert f"Not done on {shards[lost]} on {FRAGILE}" in failure
    browser.picture("half")
    browser.open(PHOTOS)
    assert browser.texts(SHARD)[0] == shards[alive]


def test_node_killed_before_saving(browser: Browser, site: Site) -> None:
    browser.open(PHOTOS)
    lost = next(alias for alias in browser.texts(SHARD) if alias >= LOST)
    browser.follow(f"{SHARD} a", lost)
    browser.follow(LINK)
    row, title = browser.path, browser.values("[name=title]")
    browser.fill(title="Never saved")
    with site.node_down():
        browser.follow("[name=_continue]")
        assert f"on {FRAGILE} does not answer" in browser.text
        browser.picture("not-saved")
    assert all("503" in complaint for complaint in browser.complaints())
    browser.open(row)
    assert browser.values("[name=title]") == title


# Prints a user whose shard is on the fragile node, and the path of a photo on the other one.
_AUTHOR = f"""
from django.contrib.auth import get_user_model
from sharded_orm import runtime
from testproject.photos.models import Photo
def node(user):
    shard = runtime.locate("photos", user.pk)
    return shard and shard.node
users = list(get_user_model().objects.filter(is_active=True, is_staff=False).order_by("pk"))
author = next(user for user in users if node(user) == "{FRAGILE}")
author.set_password("a password")
author.save()
owner = next(user for user in users if node(user) not in (None, "{FRAGILE}"))
print("said", author.username, Photo.objects.filter(owner=owner).first().get_absolute_url())
"""


@pytest.mark.long_on("mariadb", "postgresql")
def test_a_comment_whose_author_is_on_a_lost_shard_arrives_later(
    visitor: Browser, site: Site
) -> None:
    output = site.project.manage("shell", "--no-imports", "-c", _AUTHOR)
    (said,) = (line for line in output.splitlines() if line.startswith("said "))
    _, author, photo = said.split()
    text, mine = "Written while my shard was away", f"/photos/{author}/comments/"
    visitor.open(photo)
    visitor.driver.delete_all_cookies()
    visitor.open(photo)
    visitor.follow("main a[href^='/login/']")
    log_in(visitor, replace(site, user=author, password="a password"))
    with site.node_down():
        visitor.fill(text=text)
        visitor.follow("form.stack button")
        assert text in visitor.texts(".comments > li")[-1]
        visitor.picture("accepted")
    only_pictures_are_missing(visitor)
    visitor.open(mine)
    assert text not in visitor.text
    site.project.manage("mirrors", "relay", "--once")
    visitor.open(mine)
    assert text in visitor.text
    visitor.picture("arrived")
    visitor.driver.delete_all_cookies()
