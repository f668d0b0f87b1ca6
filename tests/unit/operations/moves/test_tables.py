"""The tables in which a shard key has rows."""

from __future__ import annotations

import pytest
from django.apps import apps

from sharded_orm.backends.change_capture import CapturedTable, KeyLink
from sharded_orm.models.sharding.options import group_of
from sharded_orm.operations.moves.tables import tables_of_group


def test_tables_have_their_key_or_a_link_to_it() -> None:
    tables = {table.name: table for table in tables_of_group("photos")}
    assert tables["photos_app_album"] == CapturedTable(
        "photos_app_album", ("album_id",), "owner_id"
    )
    assert tables["photos_app_vote"] == CapturedTable(
        "photos_app_vote", ("user_id", "number"), "user_id"
    )
    assert tables["photos_app_photo_tags"] == CapturedTable(
        "photos_app_photo_tags",
        ("id",),
        "user_id",
        (KeyLink("photo_id", "photos_app_photo", "photo_id"),),
        fresh_ids=True,
    )


@pytest.mark.parametrize("group", ["photos", "events", "pins", "visits", "archive"])
def test_every_table_of_the_group_is_there_once_after_those_it_links(group: str) -> None:
    names = [table.name for table in tables_of_group(group)]
    assert len(names) == len(set(names))
    assert set(names) == {
        model._meta.db_table
        for model in apps.get_models(include_auto_created=True)
        if group_of(model) == group
    }
    for table in tables_of_group(group):
        for link in table.links:
            assert names.index(link.table) < names.index(table.name)


def test_the_links_of_a_childs_relation_lead_over_its_parent() -> None:
    tables = {table.name: table for table in tables_of_group("photos")}
    assert tables["authors_novel_similar"] == CapturedTable(
        "authors_novel_similar",
        ("id",),
        "author_id",
        (
            KeyLink("novel_id", "authors_novel", "book_ptr_id"),
            KeyLink("book_ptr_id", "authors_book", "id"),
        ),
        fresh_ids=True,
    )
