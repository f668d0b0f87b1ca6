"""Rows in the admin: lists of one shard, of a key and of all shards; add, change, delete."""

from __future__ import annotations

import re

import pytest

from tests.acceptance.browser.admin import (
    ALBUMS,
    EDITED,
    HERE,
    LINK,
    MESSAGE,
    PHOTOS,
    ROW,
    SHARD,
    TAGS,
    TITLE,
    key_of_first,
)
from tests.acceptance.browser.chrome import Browser
from tests.acceptance.browser.site import Site, log_in

# The pages look alike on each backend.
pytestmark = pytest.mark.long_on("mariadb")


def test_log_in(visitor: Browser, site: Site) -> None:
    visitor.open("/admin/")
    visitor.driver.delete_all_cookies()
    visitor.open(PHOTOS)
    visitor.fill(username=site.user, password="wrong")
    visitor.follow("[type=submit]")
    assert "correct username and password" in visitor.one(".errornote").text
    log_in(visitor, site)
    assert visitor.path == PHOTOS
    visitor.follow("#site-name a")
    applications = visitor.texts("#content .app-photos th a, #content .app-sharded_orm th a")
    assert {"Albums", "Photos", "Shards", "Tickets", "Operations", "Topology"} <= {*applications}
    visitor.picture("index")


def test_all_shards(browser: Browser) -> None:
    browser.open(ALBUMS)
    assert "all 16 shards" in browser.one(HERE).text
    assert re.search(r"16 shards on 2 nodes asked, answered in \d+ ms", browser.text)
    assert len({*browser.texts(SHARD)}) > 1

    browser.open(PHOTOS)
    first = browser.texts(TITLE)
    browser.wait_for_pictures(f"{ROW} img")
    browser.picture("everywhere")
    browser.follow(".sharded-next")
    assert "rows 51 to 100" in browser.one(".sharded-pages").text
    browser.follow(".sharded-previous")
    assert browser.texts(TITLE) == first
    browser.follow(".sharded-count")
    assert re.search(r"rows 1 to 50 of \d{3} photos", browser.one(".sharded-pages").text)


def test_pick_a_shard(browser: Browser) -> None:
    browser.open(PHOTOS)
    alias, title = browser.texts(SHARD)[0], browser.texts(TITLE)[0]
    browser.fill(_shard=alias)
    browser.picture("picker")
    browser.follow("button", "Show shard")
    assert browser.one(".sharded-alias").text == alias
    assert re.search(rf"{alias} on node_[12], open", browser.one(HERE).text)
    assert title in browser.values(EDITED)
    browser.picture("shard")

    # A search, and the way back from a row, keep the scope.
    browser.fill(q=f'"{title}"')
    browser.follow("#changelist-search [type=submit]")
    titles = browser.values(EDITED)
    assert titles
    assert all(title in value for value in titles)
    assert browser.one(".sharded-alias").text == alias
    browser.follow(LINK)
    assert alias in browser.one(".sharded-orm-place").text
    browser.follow("[name=_save]")
    assert "was changed successfully" in browser.one(MESSAGE).text
    assert browser.one(".sharded-alias").text == alias
    assert browser.values(EDITED) == titles


def test_edit_in_the_list(browser: Browser) -> None:
    browser.open(PHOTOS)
    browser.follow(SHARD + " a")
    before = browser.values(EDITED)
    browser.fill(**{"form-0-title": "Renamed in the list"})
    browser.picture("edited")
    browser.follow(".paginator [name=_save], #changelist-form [name=_save]")
    assert "1 photo was changed successfully" in browser.one(MESSAGE).text
    assert browser.values(EDITED) == ["Renamed in the list", *before[1:]]


def test_find_a_key(browser: Browser) -> None:
    browser.open(PHOTOS)
    key, alias = key_of_first(browser), browser.texts(SHARD)[0]
    browser.fill(_key=key)
    browser.follow("button", "Find key")
    assert browser.one(".sharded-alias").text == alias
    assert len({*browser.texts(f"{ROW} .field-owner")}) == 1
    assert key_of_first(browser) == key
    browser.picture("key")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("_shard=photos_00099", "no shard 'photos_00099'"),
        ("_shard=ratings_00003", "no shard 'ratings_00003' in group 'photos'"),
        ("_key=ada", "'ada' cannot be a value of owner"),
    ],
)
def test_no_such_place(browser: Browser, query: str, message: str) -> None:
    browser.open(f"{PHOTOS}?{query}")
    assert message in browser.one(".errornote").text
    browser.picture("nowhere")
    browser.follow(".sharded-all")
    assert "all 16 shards" in browser.one(HERE).text


def test_add_change_delete(browser: Browser) -> None:
    browser.open(ALBUMS)
    owner, alias = browser.texts(f"{ROW} .field-owner")[0], browser.texts(SHARD)[0]
    browser.follow(".addlink")
    browser.complete(".form-row", owner)
    browser.picture("key")
    browser.follow("#content-main [type=submit]")
    assert alias in browser.one(".sharded-orm-place").text
    browser.fill(title="Under the bridges")
    browser.picture("form")
    browser.follow("[name=_save]")
    assert "“Under the bridges” was added successfully" in browser.one(MESSAGE).text
    browser.picture("added")

    browser.follow(f"{MESSAGE} a")
    assert alias in browser.one(".sharded-orm-place").text
    assert "Under the bridges" in browser.one("#content h2").text
    browser.fill(title="Under all the bridges")
    browser.follow("[name=_continue]")
    assert "was changed successfully" in browser.one(MESSAGE).text
    browser.follow(".historylink")
    assert browser.texts("#change-history tbody td:last-child") == ["Added.", "Changed Title."]
    browser.picture("history")

    # A link of the global log leads to the row on its shard.
    browser.open("/admin/")
    browser.follow(".actionlist .changelink a", "Under all the bridges")
    browser.follow(".deletelink")
    assert alias in browser.text
    browser.picture("delete")
    browser.follow("#content [type=submit]")
    assert "was deleted successfully" in browser.one(MESSAGE).text
    assert "Under all the bridges" not in browser.texts(LINK)


def test_pick_in_popups(browser: Browser) -> None:
    browser.open(PHOTOS)
    key, alias = key_of_first(browser), browser.texts(SHARD)[0]
    browser.open(f"{TAGS}add/")
    with browser.popup("#lookup_id__key"):
        users = browser.all(LINK)
        next(user for user in users if f"/{key}/" in str(user.get_attribute("href"))).click()
    assert browser.values("[name=_key]") == [key]
    browser.follow("#content-main [type=submit]")
    with browser.popup("#lookup_id_photo"):
        # Only rows on the shard of the new row.
        assert browser.one(".sharded-alias").text == alias
        browser.picture("photos")
        browser.one(LINK).click()
    browser.fill(text="from a popup")
    browser.follow("[name=_save]")
    assert "“from a popup” was added successfully" in browser.one(MESSAGE).text


def test_edit_inlines(browser: Browser) -> None:
    browser.open(ALBUMS)
    browser.follow(LINK)
    album = browser.path
    before = len(browser.all(".dynamic-photos"))
    browser.fill(**{"photos-0-title": "Renamed here"})
    browser.one("#photos-group .add-row a").click()
    number = len(browser.all(".dynamic-photos")) - 1
    assert number >= before
    browser.fill(**{f"photos-{number}-title": "Added here"})
    browser.picture("inlines")
    browser.follow("[name=_continue]")
    assert "was changed successfully" in browser.one(MESSAGE).text
    titles = [
        field.get_attribute("value")
        for field in browser.all(".dynamic-photos input[name$='-title']")
    ]
    assert {"Renamed here", "Added here"} <= {*titles}

    added = titles.index("Added here")
    browser.one(f"[name='photos-{added}-DELETE']").click()
    browser.follow("[name=_save]")
    browser.open(album)
    assert "Added here" not in browser.driver.page_source


def select_on_two_shards(browser: Browser) -> tuple[str, str]:
    """Select two rows in a list of all shards; return their shards."""
    shards = browser.texts(SHARD)
    other = next(n for n, alias in enumerate(shards) if n > 2 and alias != shards[2])
    boxes = browser.all(f"{ROW} .action-select")
    for number in (2, other):
        boxes[number].click()
    return shards[2], shards[other]


def test_action_on_two_shards(browser: Browser) -> None:
    browser.open(PHOTOS)
    titles, shards = browser.texts(TITLE), {*select_on_two_shards(browser)}
    browser.choose("action", "Show as new: posted now")
    browser.follow(".actions button")
    message = browser.one(MESSAGE).text
    assert "2 rows on" in message
    assert all(f"{alias} (1)" in message for alias in shards)
    browser.picture("done")
    assert {*browser.texts(SHARD)[:2]} == shards
    assert titles[2] in browser.texts(TITLE)[:2]


def test_delete_on_two_shards(browser: Browser) -> None:
    browser.open(ALBUMS)
    before, shards = len(browser.all(ROW)), select_on_two_shards(browser)
    browser.choose("action", "Delete selected albums")
    browser.follow(".actions button")
    browser.picture("delete")
    rows = browser.texts(".sharded-rows tr")
    for alias in shards:
        (row,) = [row for row in rows if row.startswith(alias)]
        assert re.search(r"albums: 1, photos: \d+, ", row)
    browser.follow("#content [type=submit]")
    message = browser.one(MESSAGE).text
    assert all(alias in message for alias in shards)
    browser.picture("deleted")
    assert len(browser.all(ROW)) == before - 2
