"""The page that finds a key."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from tests.admin.fleet.site import FIND, Answer, Site, serving
from tests.integration.shards.conftest import Fleet


def find(site: Site, **query: str) -> Answer:
    return site.get(f"{FIND}?{urlencode(query)}")


def test_a_key_that_is_placed(site: Site, fleet: Fleet) -> None:
    fleet.place(51, 6)
    try:
        page = find(site, model="photos_app.Photo", value="51")
    finally:
        fleet.forget(51)
    assert "Shard photos_00006 Why the directory places 51 on shard 6" in page.text
    assert "Range 4-7, closed for new keys" in page.text
    assert "Directory shard 6, placed at" in page.text
    assert "/admin/sharded_orm/shardmap/shard/photos_00006/" in page.links
    assert "/admin/photos_app/photo/?_key=51" in page.links
    # One query for the placement, one for its row in the directory.
    assert len(page.queries["directory"]) == 0  # in a thread with connections of its own


def test_a_key_that_was_moved_is_told(site: Site, fleet: Fleet) -> None:
    fleet.place(52, 6)
    try:
        assert "differs" not in find(site, model="photos_app.Photo", value="52").text
        fleet.forget(52)
        fleet.place(52, 1)
        page = find(site, model="photos_app.Photo", value="52")
        assert "the directory places 52 on shard 6" in page.text
        assert "Directory shard 1" in page.text
        assert "differs from what this process remembers" in page.text
    finally:
        fleet.forget(52)
        site.run("from sharded_orm import runtime; runtime.strategy('photos').forget()")


def test_the_command_that_moves_a_key(fleet: Fleet) -> None:
    fleet.place(53, 6)
    try:
        with serving(fleet, FLEET_SETTING='{"PLACEMENT_LEASE": 1}') as site:
            page = find(site, model="photos_app.Photo", value="53")
            assert "manage.py keys move photos 53 --to auto" in page.text
            page = find(site, model="photos_app.Photo", value="404")
            assert "keys move" not in page.text, "it has no shard"
            assert "keys move" not in find(site, model="Event", value="shop").text
    finally:
        fleet.forget(53)


def test_without_a_lease_no_key_can_be_moved(site: Site, fleet: Fleet) -> None:
    fleet.place(54, 6)
    try:
        assert "keys move" not in find(site, model="photos_app.Photo", value="54").text
    finally:
        fleet.forget(54)


def test_a_key_without_rows(site: Site) -> None:
    page = find(site, by="photos_app.Photo:user_id", value="404")
    assert "Shard none" in page.text
    assert "no entry: its first row will place it" in page.text


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"model": "Event", "value": "shop"}, "Group events, by modulo"),
        ({"model": "Reading", "field": "sensor", "value": "1500"}, "Shard archive_00001"),
        ({"model": "Board", "field": "id", "value": "1"}, "Group pins, by embedded"),
        ({"model": "Board", "field": "id", "value": "many"}, "'many' cannot be Board.id"),
        ({"model": "Nothing", "value": "1"}, "There is no model 'Nothing'"),
        ({"model": "User", "value": "1"}, "is not sharded"),
        ({"model": "Photo", "field": "title", "value": "1"}, "does not tell the shard of Photo"),
        ({"model": "Reading", "value": "99999"}, "takes keys from 0 up to 2000"),
        ({"by": "<script>:x", "value": "<b>"}, "There is no model '<script>'"),
        ({"model": "Event", "value": "\ud83d\ude00" * 50}, "Group events"),
        ({"model": "Event", "value": "\ud83d\ude00" * 101}, "has at most 100 characters"),
    ],
)
def test_keys_of_all_kinds(site: Site, query: dict[str, str], text: str) -> None:
    query = {k: v.encode("utf-16", "surrogatepass").decode("utf-16") for k, v in query.items()}
    page = find(site, **query)
    assert page.status == 200
    assert text in page.text
    assert "<script>:x" not in page.body


def test_the_form_offers_what_tells_a_shard(site: Site) -> None:
    body = site.get(FIND).body
    assert 'value="photos_app.Photo:user_id"' in body
    assert 'value="photos_app.Album:owner_id"' in body
    assert "photos_app.Photo:title" not in body
