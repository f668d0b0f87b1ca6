"""The pages of the map, of ranges and of shards, in good and in bad states."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.admin.fleet.site import MAP, Site
from tests.integration.shards.conftest import Fleet


def shard(alias: str) -> str:
    return f"{MAP}shard/{alias}/"


def test_the_map_has_a_cell_for_each_shard_that_leads_to_it(site: Site) -> None:
    page = site.get(MAP)
    assert page.status == 200
    assert len(page.cells("current")) == 18
    assert "18 current: it has all migrations" in page.text
    assert shard("photos_00003") in page.links
    assert "photos 4-7" in page.text and "closed for new keys" in page.text
    assert "Replica of photos 0-3 , events 0 , archive 0" in page.text
    # States are readable without colours, and without the picture.
    assert any(label.startswith("photos_00003: current, ") for label in page.cells("current"))


def test_sizes_and_groups_can_be_chosen(site: Site) -> None:
    photos = site.get(f"{MAP}?group=photos&size=same")
    assert len(photos.cells("current")) == 8
    assert 'width="60.5" height="26.0"' in photos.body
    assert "SQLite does not tell numbers of rows" in site.get(f"{MAP}?size=rows").text
    unknown = site.get(f"{MAP}?group=nothing")
    assert (unknown.status, unknown.location) == (302, MAP)
    assert unknown.messages == ["There is no group 'nothing'."]


def test_states_are_told_apart(site: Site, fleet: Fleet) -> None:
    (name,) = fleet.sql(
        "photos", 2, "SELECT MAX(id) FROM django_migrations WHERE app = 'photos_app'"
    )
    (row,) = fleet.sql("photos", 2, f"SELECT * FROM django_migrations WHERE id = {name[0]}")
    path, hidden = fleet.path("photos", 3), fleet.folder / "kept"
    broken = fleet.path("photos", 4)
    content = broken.read_bytes()
    fleet.sql("photos", 2, f"DELETE FROM django_migrations WHERE id = {name[0]}")
    path.rename(hidden)
    broken.write_bytes(
        b"no database at all, but long enough to have a header of one hundred bytes" * 3
    )
    try:
        page = site.get(MAP)
        assert [label.partition(":")[0] for label in page.cells("behind")] == ["photos_00002"]
        assert [label.partition(":")[0] for label in page.cells("missing")] == ["photos_00003"]
        assert [label.partition(":")[0] for label in page.cells("error")] == ["photos_00004"]
        assert "behind by 1 migrations" in page.cells("behind")[0]
        # The command that mends it.
        assert "manage.py shards create --group photos --shards 3" in page.text
        spanning = site.get(f"{MAP}range/photos/0-7/")
        assert "photos_00003 one missing" in spanning.text
        assert (
            "manage.py migrate_shards --group photos --shards 2"
            in site.get(shard("photos_00002")).text
        )
        assert site.get(shard("photos_00003")).status == 200
        assert "It cannot be read" in site.get(shard("photos_00004")).text
    finally:
        broken.write_bytes(content)
        hidden.rename(path)
        marks = ", ".join(["?"] * len(row))
        import sqlite3

        with sqlite3.connect(fleet.path("photos", 2)) as connection:
            connection.execute(f"INSERT INTO django_migrations VALUES ({marks})", row)
        connection.close()
    assert len(site.get(MAP).cells("current")) == 18


def test_a_folder_that_is_gone(site: Site, fleet: Fleet) -> None:
    folder, hidden = fleet.folder / "two", fleet.folder / "kept"
    folder.rename(hidden)
    try:
        page = site.get(MAP)
        assert page.status == 200
        assert len(page.cells("missing")) == 9
        assert len(page.cells("current")) == 9
        assert site.get(shard("photos_00007")).status == 200
        assert site.get(f"{MAP}range/photos/4-7/").status == 200
        # Looking has not created the folder.
        assert not folder.exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        hidden.rename(folder)


def test_a_shard_tells_all_about_itself(site: Site, fleet: Fleet) -> None:
    fleet.place(41, 3)
    try:
        page = site.get(shard("photos_00003"))
    finally:
        fleet.forget(41)
    assert "Primary one SQLite files Replica two" in page.text
    assert "Schema photos_003" in page.text
    assert "Migrations all applied" in page.text
    assert "none: it looks like 4 siblings of the same migrations" in page.text
    assert "Keys 1" in page.text
    assert "open: 100 % of new keys Weight 1 " in page.text
    # Links to the rows of its models, on this shard.
    assert "/admin/photos_app/photo/?_shard=photos_00003" in page.links
    assert "photos_app_photo 0" in page.text


def test_a_table_that_was_changed_by_hand_is_told(site: Site, fleet: Fleet) -> None:
    fleet.sql("photos", 5, "ALTER TABLE photos_app_photo ADD COLUMN extra integer")
    try:
        page = site.get(shard("photos_00005"))
        assert "differs from 4 siblings" in page.text
        assert "extra integer is not expected" in page.text
        # The siblings do not differ.
        assert "none: it looks like" in site.get(shard("photos_00000")).text.replace(
            "looks like 3", "looks like"
        )
    finally:
        fleet.sql("photos", 5, "ALTER TABLE photos_app_photo DROP COLUMN extra")


@pytest.mark.parametrize(
    "path",
    [
        "shard/photos_00008/",
        "shard/nothing/",
        "shard/photos_template/",
        "shard/default/",
        "range/photos/0-8/",
        "range/photos/3-2/",
        "range/nothing/0-1/",
        "photos_5F00099/change/",
        "%3Cscript%3E/change/",
    ],
)
def test_what_does_not_exist_is_not_found(site: Site, path: str) -> None:
    assert site.get(MAP + path).status == 404


def test_pages_beyond_the_last_show_the_last(site: Site) -> None:
    assert site.get(f"{MAP}?page=99").status == 200
    assert "photos_00007" in site.get(f"{MAP}range/photos/0-7/?page=-3").text


def test_looking_asks_the_global_database_for_the_user_only(site: Site) -> None:
    # One query for the session, one for the user.
    assert len(site.get(MAP).queries["default"]) == 2
    assert len(site.get(f"{MAP}range/photos/0-7/").queries["default"]) == 2
    # And one for the latest operations of the shard.
    assert len(site.get(shard("photos_00003")).queries["default"]) == 3


@pytest.mark.parametrize("path", [MAP, shard("photos_00003"), f"{MAP}range/photos/0-7/"])
def test_pages_need_nothing_inline(site: Site, path: str) -> None:
    # So a content security policy without 'unsafe-inline' blocks nothing.
    body = site.get(path).body
    assert "style=" not in body
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|javascript:", body)
