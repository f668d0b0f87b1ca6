"""``shards check`` finds rows related to a row of another shard key, or to a missing global row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.shards.conftest import Fleet, check_and_count

SHARD = 3
#: Both keys are on this shard.
ADA, BEN = 7, 8
BOTH_WAYS = pytest.mark.parametrize("how", [["--all"], ["--sample", "50"]], ids=["all", "sample"])


@pytest.fixture
def related(healthy: Fleet) -> Iterator[Fleet]:
    """Two albums, two photos and two tags, for each key one, with global rows for both keys."""
    healthy.place(ADA, SHARD)
    healthy.place(BEN, SHARD)
    healthy.global_sql(
        f"INSERT INTO photos_app_person (id, username) VALUES ({ADA}, 'ada'), ({BEN}, 'ben')"
    )
    healthy.sql("photos", SHARD,
        "INSERT INTO photos_app_album (album_id, owner_id, title)"
        f" VALUES (1, {ADA}, 'x'), (2, {BEN}, 'x')",
        "INSERT INTO photos_app_photo (photo_id, user_id, album_id, title)"
        f" VALUES (11, {ADA}, 1, 'x'), (12, {BEN}, 2, 'x'), (13, {BEN}, NULL, 'x')",
        f"INSERT INTO photos_app_tag (id, user_id, name) VALUES (21, {ADA}, 'x'), (22, {BEN}, 'x')",
        "INSERT INTO photos_app_photo_tags (id, photo_id, tag_id) VALUES (31, 11, 21), (32, 12, 22)",
    )  # fmt: skip
    yield healthy
    healthy.sql("photos", SHARD, *(
        f"DELETE FROM photos_app_{table}"
        for table in ("comment", "photo_tags", "tag", "photo", "album")
    ))  # fmt: skip
    healthy.global_sql("DELETE FROM photos_app_person")
    healthy.forget(ADA)
    healthy.forget(BEN)


@BOTH_WAYS
def test_rows_of_one_key_with_their_global_rows_are_right(related: Fleet, how: list[str]) -> None:
    report = related.json("check", *how)
    assert report["cross_key"] == report["dangling"] == report["problems"] == []


@BOTH_WAYS
def test_foreign_keys_to_rows_of_another_key(related: Fleet, how: list[str]) -> None:
    related.sql("photos", SHARD,
        "UPDATE photos_app_photo SET album_id = 1 WHERE photo_id IN (12, 13)",
        "INSERT INTO photos_app_comment (comment_id, user_id, photo_id, text)"
        f" VALUES (41, {ADA}, 11, 'x'), (42, {ADA}, 12, 'x')",
    )  # fmt: skip
    report = related.json("check", *how, code=1)
    found = {one["model"]: one for one in report["cross_key"]}
    assert found.keys() == {"photos_app.Photo", "photos_app.Comment"}
    photos, comments = found["photos_app.Photo"], found["photos_app.Comment"]
    assert (photos["shard"], photos["field"]) == ("photos_00003", "album")
    assert (photos["related"], photos["rows"]) == ("photos_app.Album", 2)
    assert {"row": 12, "key": BEN, "related": 1, "related_key": ADA} in photos["examples"]
    assert comments["rows"] == 1
    assert comments["examples"] == [{"row": 42, "key": ADA, "related": 12, "related_key": BEN}]
    assert len(report["problems"]) == 2
    failed = related.shards("check", *how, "--group", "photos", code=1)
    assert (
        "1 row of photos_app.Comment on 'photos_00003' is related by 'photo' to rows of"
        " photos_app.Photo with another shard key: row 42 has user_id=7, and row 12 of"
        " photos_app.Photo has user_id=8."
    ) in failed.err
    assert "2 rows of photos_app.Photo on 'photos_00003' are related by 'album'" in failed.err
    assert "owner=7" in failed.err
    assert "same_key = False" in failed.err


REMEDY = """
import django
django.setup()
from tests.photos.models import Photo

photos = Photo.objects.using("photos_00003")
photos.filter(pk__in=[12, 13]).update(album=None)
"""


def test_the_remedy_of_the_manual(related: Fleet) -> None:
    related.sql("photos", SHARD,
        "UPDATE photos_app_photo SET album_id = 1 WHERE photo_id IN (12, 13)",
    )  # fmt: skip
    related.shards("check", "--all", code=1)
    mended = related.python("-c", REMEDY)
    assert mended.code == 0, mended.err
    related.shards("check", "--all")


@BOTH_WAYS
def test_many_to_many_rows_of_two_keys(related: Fleet, how: list[str]) -> None:
    related.sql("photos", SHARD,
        "INSERT INTO photos_app_photo_tags (id, photo_id, tag_id) VALUES (33, 11, 22)",
    )  # fmt: skip
    (only,) = related.json("check", *how, code=1)["cross_key"]
    assert (only["model"], only["field"]) == ("photos_app.Photo", "tags")
    assert (only["related"], only["rows"]) == ("photos_app.Tag", 1)
    assert only["examples"] == [{"row": 11, "key": ADA, "related": 22, "related_key": BEN}]


@BOTH_WAYS
def test_references_to_global_rows_that_do_not_exist(related: Fleet, how: list[str]) -> None:
    related.sql("photos", SHARD,
        "INSERT INTO photos_app_comment (comment_id, user_id, photo_id, author_id, text)"
        f" VALUES (41, {ADA}, 11, {BEN}, 'x'), (42, {ADA}, 11, 99, 'x'), (43, {ADA}, 11, 98, 'x'),"
        f" (44, {ADA}, 11, 99, 'x'), (45, {ADA}, 11, NULL, 'x')",
    )  # fmt: skip
    (only,) = related.json("check", *how, code=1)["dangling"]
    assert (only["model"], only["field"]) == ("photos_app.Comment", "author")
    assert (only["related"], only["shard"]) == ("photos_app.Person", "photos_00003")
    assert (only["values"], only["rows"]) == (2, 3)
    assert sorted(only["examples"]) == [98, 99]
    # The foreign key may be the shard key.
    related.global_sql(f"DELETE FROM photos_app_person WHERE id = {BEN}")
    failed = related.shards("check", *how, code=1)
    assert (
        "1 row of photos_app.Album on 'photos_00003' is related by 'owner' to a row of"
        " photos_app.Person that does not exist: owner=8."
    ) in failed.err
    assert "4 rows of photos_app.Comment on 'photos_00003' are related by 'author' to 3 rows" in (
        failed.err
    )
    assert related.json("check", "--sample", "0")["dangling"] == []


def test_in_a_group_with_embedded_shards_keys_may_differ(healthy: Fleet) -> None:
    first, second = (2 << 46 | local for local in (1, 2))
    healthy.sql("pins", 2,
        f"INSERT INTO photos_app_board (id, name, parent_id) VALUES ({first}, 'x', NULL)",
        f"INSERT INTO photos_app_board (id, name, parent_id) VALUES ({second}, 'x', {first})",
    )  # fmt: skip
    assert healthy.json("check", "--all")["cross_key"] == []
    healthy.sql("pins", 2, f"DELETE FROM photos_app_board WHERE id = {second}",
                "DELETE FROM photos_app_board")  # fmt: skip


def test_a_sample_does_not_read_more_rows_than_it_may(related: Fleet) -> None:
    """All photos but one are broken, and a sample of two rows finds one or two of them."""
    related.sql("photos", SHARD,
        "INSERT INTO photos_app_photo (photo_id, user_id, album_id, title) VALUES "
        + ", ".join(f"({pk}, {ADA}, 2, 'x')" for pk in range(100, 160)),
        "DELETE FROM photos_app_photo_tags",
        "DELETE FROM photos_app_photo WHERE photo_id IN (12, 13)",
    )  # fmt: skip
    (only,) = related.json("check", "--sample", "2", code=1)["cross_key"]
    assert only["rows"] in (1, 2)
    (only,) = related.json("check", "--all", code=1)["cross_key"]
    assert only["rows"] == 60
    assert len(only["examples"]) == 3


def test_a_global_database_that_is_away_is_told(sqlite_fleet: Fleet) -> None:
    sqlite_fleet.place(ADA, SHARD)
    sqlite_fleet.sql("photos", SHARD,
        f"INSERT INTO photos_app_album (album_id, owner_id, title) VALUES (1, {ADA}, 'x')",
    )  # fmt: skip
    sqlite_fleet.global_sql("DROP TABLE photos_app_person")
    failed = sqlite_fleet.shards("check", code=1)
    assert "'photos_app.Person' cannot be looked at to the end: its rows cannot be looked up" in (
        failed.err
    )


def test_global_rows_are_looked_up_in_batches(sqlite_fleet: Fleet) -> None:
    """1200 distinct values take three queries."""
    sqlite_fleet.place(ADA, SHARD)
    rows = ", ".join(f"({n}, {ADA}, 1, {n}, 'x')" for n in range(1, 1201))
    sqlite_fleet.global_sql(f"INSERT INTO photos_app_person (id, username) VALUES ({ADA}, 'ada')")
    sqlite_fleet.sql("photos", SHARD,
        f"INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES (1, {ADA}, 'x')",
        "INSERT INTO photos_app_comment (comment_id, user_id, photo_id, author_id, text)"
        f" VALUES {rows}",
    )  # fmt: skip
    counted = check_and_count(
        sqlite_fleet, SHARD, "*(rows.values for rows in report.dangling)", "photos_app_person"
    )
    assert counted.out.split() == ["1199", "3"], counted.err


def test_relations_of_a_table_whose_key_is_in_the_table_of_its_parent(
    authors_fleet: Fleet,
) -> None:
    fleet = authors_fleet
    fleet.place(ADA, SHARD)
    fleet.place(BEN, SHARD)
    stored = fleet.python("-c", NOVELS)
    assert stored.code == 0, stored.err
    for how in (["--all"], ["--sample", "50"]):
        report = fleet.json("check", *how, code=1)
        pair = {"row": 4, "key": BEN, "related_key": ADA}
        assert {one["field"]: one["examples"] for one in report["cross_key"]} == {
            "first": [{**pair, "related": 1}],
            "similar": [{**pair, "related": 2}],
        }
        assert {one["model"] for one in report["cross_key"]} == {"authors.Novel"}
        (only,) = report["dangling"]
        assert (only["model"], only["field"], only["examples"]) == (
            "authors.Novel", "translator", [99],
        )  # fmt: skip


NOVELS = """
import django
django.setup()
from tests.authors.models import Author, Book, Novel, Page

ada, ben = Author.objects.create(id=7), Author.objects.create(id=8)
book = Book.objects.create(id=1, author=ada)
page = Page.objects.create(id=2, author=ada, book=book)
Novel.objects.create(id=3, author=ada, first=book, translator=ben).similar.add(page)
# Values that are no instances are not looked up when they are written.
Novel.objects.create(id=4, author=ben, first_id=1, translator_id=99)
Novel.similar.through.objects.using("photos_00003").create(novel_id=4, page_id=2)
"""


@pytest.fixture(scope="module")
def relatives(relatives_fleet: Fleet) -> Fleet:
    """A fleet with generic foreign keys that are broken."""
    fleet = relatives_fleet
    fleet.place(ADA, SHARD)
    fleet.place(BEN, SHARD)
    stored = fleet.python("-c", NOTES)
    assert stored.code == 0, stored.err
    return fleet


NOTES = """
import django
django.setup()
from django.contrib.contenttypes.models import ContentType
from tests.photos.models import Board
from tests.relatives.sharded.models import Agent, Label, Note, Stamp

ada, ben = Agent.objects.create(id=7, name="ada"), Agent.objects.create(id=8, name="ben")
label = Label.objects.create(id=1, name="l", owner=ada)
Note.objects.create(id=20, name="n", owner=ada, content_object=label)
Note.objects.create(id=21, name="n", owner=ben, content_object=ada)
Note.objects.create(id=22, name="n", owner=ben)
Note.objects.create(id=23, name="n", owner=ben, content_object=Board.objects.create(name="b"))
Stamp.objects.create(id=1, content_object=ada)
of_labels, of_agents = (ContentType.objects.get_for_model(m) for m in (Label, Agent))
rows = [(30, ben, of_labels, 1), (31, ben, of_labels, 1), (32, ada, of_labels, 404),
        (33, ada, of_labels, 404), (34, ada, of_agents, 99), (35, ada, of_agents, 98)]
Note.objects.bulk_create(Note(id=pk, name="n", owner=owner) for pk, owner, _, _ in rows)
for pk, owner, about, object_id in rows:
    Note.objects.filter(owner=owner, pk=pk).update(content_type=about, object_id=object_id)
# Of a model that is no longer installed.
gone = ContentType.objects.create(app_label="gone", model="gone")
Note.objects.filter(owner=ben, pk=22).update(content_type=gone, object_id=1)
"""


@BOTH_WAYS
def test_generic_foreign_keys(relatives: Fleet, how: list[str]) -> None:
    report = relatives.json("check", *how, code=1)
    (pair,) = report["cross_key"]
    assert (pair["model"], pair["field"]) == ("relatives_sharded.Note", "content_object")
    assert (pair["related"], pair["rows"]) == ("relatives_sharded.Label", 2)
    assert pair["examples"] == [{"row": 30, "key": BEN, "related": 1, "related_key": ADA}]
    missing = {one["related"]: one for one in report["dangling"]}
    assert {
        label: (one["values"], one["rows"], sorted(one["examples"]))
        for label, one in missing.items()
    } == {
        "relatives_sharded.Label": (1, 2, [404]),
        "relatives_sharded.Agent": (2, 2, [98, 99]),
    }
    assert len(report["problems"]) == 3
    assert any(
        "2 rows of relatives_sharded.Note on 'photos_00003' are related by 'content_object' to a row"
        " of relatives_sharded.Label that does not exist: content_object=404." in problem
        for problem in report["problems"]
    )


def test_generic_foreign_keys_are_looked_up_in_batches(relatives: Fleet) -> None:
    """1200 more labels take two more queries of their shard."""

    def statements() -> int:
        figure = "sum(missing.values for missing in report.dangling)"
        counted = check_and_count(relatives, SHARD, figure, "relatives_sharded_label")
        missing, asked = counted.out.split()
        found.append(int(missing))
        return int(asked)

    found: list[int] = []
    before = statements()
    ((of_labels,),) = relatives.sql("photos", SHARD,
        "SELECT content_type_id FROM relatives_sharded_note WHERE id = 20"
    )  # fmt: skip
    rows = ", ".join(f"({n}, 'n', 0, {ADA}, {of_labels}, {n})" for n in range(1001, 2201))
    relatives.sql("photos", SHARD,
        "INSERT INTO relatives_sharded_note (id, name, stars, owner_id, content_type_id, object_id)"
        f" VALUES {rows}",
    )  # fmt: skip
    assert statements() == before + 2
    assert found[1] == found[0] + 1200
