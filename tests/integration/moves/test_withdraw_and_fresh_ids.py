"""Copies that are withdrawn, rows that get new primary keys, and values that the target has already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.backends.change_capture import CapturedTable, KeyLink
from sharded_orm.exceptions import MoveFailed
from tests.integration.moves.database import Database, copy_digests, copy_rows, database_on, run
from tests.patience import PATIENCE

PHOTO = CapturedTable("photo", ("id",), "user_id")
TAG = CapturedTable("tag", ("id",), "user_id", (KeyLink("photo_id", "photo", "id"),), True)
TABLES = (PHOTO, TAG)
SCHEMA = (
    "CREATE TABLE photo (id {id}, user_id BIGINT NOT NULL, slug VARCHAR(20), email VARCHAR(50),"
    " UNIQUE (user_id, slug), UNIQUE (email))",
    "CREATE TABLE tag (id {id}, photo_id BIGINT NOT NULL, word VARCHAR(20) NOT NULL)",
)
ROWS = (
    "INSERT INTO photo (id, user_id, slug, email) VALUES (1, 7, 'a', 'ada@x'), (2, 7, NULL, NULL)",
    "INSERT INTO tag (id, photo_id, word) VALUES (1, 1, 'sea'), (2, 2, 'sun')",
)


@pytest.fixture(params=["sqlite", "read committed"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any
) -> Iterator[tuple[Database, Database]]:
    """The source with rows of key 7, and a target with another key's rows, whose fence of 7 is closed."""
    with (
        django_db_blocker.unblock(),
        database_on(request.param, request, tmp_path / "1.sqlite3", SCHEMA) as source,
        database_on(request.param, request, tmp_path / "2.sqlite3", SCHEMA) as target,
    ):
        for statement in ROWS:
            run(source.session(), statement)
        other = target.session()
        run(other, "INSERT INTO photo (id, user_id, slug, email) VALUES (5, 8, 'a', 'bob@x')")
        run(other, "INSERT INTO tag (id, photo_id, word) VALUES (1, 5, 'other')")
        capture = target.capture()
        capture.prepare()
        capture.watch(1, 7, closed=True)
        capture.install(TABLES, PATIENCE)
        copy(source, target)
        yield source, target


def copy(source: Database, target: Database) -> None:
    reader, writer = source.copy(), target.copy()
    writer.prepare(TABLES)
    for table in TABLES:
        writer.put(table, 1, reader.read(table, 7, 100))


def counts(database: Database) -> list[int]:
    session = database.session()
    return [run(session, f"SELECT COUNT(*) FROM {table.name}")[0][0] for table in TABLES]


def test_rows_with_fresh_ids_are_published_beside_others(pair: tuple[Database, Database]) -> None:
    source, target = pair
    reader, writer = source.copy(), target.copy()
    writer.publish(TABLES, 1)
    assert run(target.session(), "SELECT photo_id, word FROM tag ORDER BY photo_id") == [
        (1, "sea"), (2, "sun"), (5, "other"),
    ]  # fmt: skip
    assert reader.key_digests(TAG, 7) == copy_digests(writer, TAG, 1) == writer.key_digests(TAG, 7)
    assert reader.key_rows(TAG, 7) == copy_rows(writer, TAG, 1) == writer.key_rows(TAG, 7)
    assert reader.key_digests(replace(TAG, fresh_ids=False), 7) != writer.key_digests(
        replace(TAG, fresh_ids=False), 7
    )


def test_equal_rows_with_fresh_ids_do_not_cancel_each_other(
    pair: tuple[Database, Database],
) -> None:
    """Without the primary key, the same row may be there twice."""
    source, target = pair
    reader, writer, here = source.copy(), target.copy(), source.session()
    run(here, "UPDATE tag SET photo_id = 1, word = 'sea'")
    writer.discard([TAG], 1)
    writer.put(TAG, 1, reader.read(TAG, 7, 100))
    assert reader.key_digests(TAG, 7) == copy_digests(writer, TAG, 1)
    run(here, "UPDATE tag SET word = 'sun'")
    assert reader.key_digests(TAG, 7).count == 2
    assert reader.key_digests(TAG, 7) != copy_digests(writer, TAG, 1)


def test_a_withdrawn_copy_cannot_be_published_any_more(pair: tuple[Database, Database]) -> None:
    _, target = pair
    writer, paused = target.copy(), target.copy()
    writer.publish(TABLES, 1)
    assert counts(target) == [3, 3]
    assert writer.withdraw(TABLES, 1, 7)
    assert counts(target) == [1, 1]
    assert target.capture().fences() == {}
    with pytest.raises(MoveFailed):
        paused.publish(TABLES, 1)
    assert counts(target) == [1, 1]


def test_withdrawing_waits_for_a_publication_under_way(pair: tuple[Database, Database]) -> None:
    _, target = pair
    publisher, writer = target.copy(), target.copy()
    publisher._connection.inc_thread_sharing()
    inside, go_on = threading.Event(), threading.Event()

    def publish() -> None:
        with publisher._passing(1):
            publisher._rows("INSERT INTO photo (id, user_id) VALUES (1, 7)")
            inside.set()
            assert go_on.wait(PATIENCE)

    publishing = threading.Thread(target=publish)
    publishing.start()
    assert inside.wait(PATIENCE)
    if not target.isolation:
        writer._rows(f"PRAGMA busy_timeout = {int(PATIENCE * 1000)}")
    writer._connection.inc_thread_sharing()
    withdrawing = threading.Thread(target=writer.withdraw, args=(TABLES, 1, 7))
    withdrawing.start()
    assert counts(target) == [1, 1]
    go_on.set()
    publishing.join(PATIENCE)
    withdrawing.join(PATIENCE)
    assert counts(target) == [1, 1]
    assert target.capture().fences() == {}


def test_withdrawing_without_a_fence_deletes_nothing(pair: tuple[Database, Database]) -> None:
    """The rows may be no copies: the move was switched, and its fence removed."""
    _, target = pair
    writer = target.copy()
    writer.publish(TABLES, 1)
    target.capture().unwatch(1)
    assert not writer.withdraw(TABLES, 1, 7)
    assert counts(target) == [3, 3]


def test_withdrawing_needs_a_closed_fence(pair: tuple[Database, Database]) -> None:
    _, target = pair
    writer = target.copy()
    writer.publish(TABLES, 1)
    target.capture().reopen(1)
    with pytest.raises(MoveFailed, match="is not closed"):
        writer.withdraw(TABLES, 1, 7)
    assert counts(target) == [3, 3]


def test_a_fence_that_was_taken_over_is_there_again(pair: tuple[Database, Database]) -> None:
    _, target = pair
    capture = target.capture()
    capture.watch(2, 7, closed=True)
    assert target.copy().withdraw(TABLES, 2, 7, former=1)
    assert capture.fences() == {1: "closed"}


def test_one_table_of_a_copy_can_be_emptied(pair: tuple[Database, Database]) -> None:
    writer = pair[1].copy()
    writer.discard([TAG], 1)
    assert [copy_digests(writer, table, 1).count for table in TABLES] == [2, 0]


def test_taken_values_are_named_without_personal_data(pair: tuple[Database, Database]) -> None:
    source, target = pair
    reader, writer, there = source.copy(), target.copy(), target.session()
    photos, tags = reader.read(PHOTO, 7, 100), reader.read(TAG, 7, 100)
    assert writer.taken(PHOTO, photos) == []
    # The id of a tag exists, but the target gives another one.
    assert writer.taken(TAG, tags) == []
    assert len(writer.taken(replace(TAG, fresh_ids=False), tags)) == 1
    run(there, "UPDATE photo SET email = 'ada@x'")
    run(there, "INSERT INTO photo (id, user_id) VALUES (2, 8)")
    taken = writer.taken(PHOTO, photos)
    assert len(taken) == 2
    assert any("photo" in text and "id" in text and "2" in text for text in taken)
    assert any("email" in text and "5" in text for text in taken)
    assert not any("ada" in text for text in taken)


@pytest.mark.parametrize("pair", ["read committed"], indirect=True)
def test_a_value_is_taken_as_the_columns_collation_compares(
    pair: tuple[Database, Database],
) -> None:
    source, target = pair
    photos = source.copy().read(PHOTO, 7, 100)
    run(target.session(), "UPDATE photo SET email = 'ADA@X'")
    assert len(target.copy().taken(PHOTO, photos)) == 1


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL", "NO ACTION"])
@pytest.mark.parametrize("event", ["DELETE", "UPDATE"])
def test_tables_that_foreign_keys_change(
    pair: tuple[Database, Database], action: str, event: str
) -> None:
    target = pair[1]
    kind = "BIGINT" if target.isolation else "INTEGER"
    run(
        target.session(),
        "CREATE TABLE note (id BIGINT NOT NULL PRIMARY KEY,"
        f" photo_id {kind} REFERENCES photo (id) ON {event} {action})",
    )
    note = CapturedTable("note", ("id",), "user_id", (KeyLink("photo_id", "photo", "id"),))
    expected = set() if action == "NO ACTION" else {"note"}
    assert target.copy().cascading([*TABLES, note]) == expected
    assert target.copy().cascading(TABLES) == set()
