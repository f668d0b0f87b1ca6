"""The journal of changed rows and the fences, under the writes of other sessions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import Error, OperationalError

from sharded_orm.backends.change_capture import (
    EVENTS,
    FENCES,
    CapturedTable,
    ChangeCapture,
    KeyLink,
    trigger_name,
)
from tests.integration.moves.database import Database, database_fixture, refuses, run
from tests.patience import PATIENCE

# Seconds after which an attempt that must fail gives up. Nothing is asserted about the time.
SHORT = 0.2
# Isolation levels of sessions on MariaDB. SQLite has one writer at a time, and no session reads while
# another writes.
MARIADB = ["read committed", "repeatable read"]
POSTGRESQL = ["postgresql read committed", "postgresql repeatable read"]
SERVERS = [*MARIADB, *POSTGRESQL]
PHOTO = CapturedTable("photo", ("id",), "user_id")
VOTE = CapturedTable("vote", ("user_id", "word"), "user_id")
LABEL = CapturedTable("label", ("id",), "user_id", (KeyLink("photo_id", "photo", "id"),))
TABLES = (PHOTO, VOTE, LABEL)
SCHEMA = (
    "CREATE TABLE photo (id {id}, user_id BIGINT NOT NULL, title VARCHAR(50))",
    "CREATE TABLE vote (user_id BIGINT NOT NULL, word VARCHAR(20) NOT NULL,"
    " PRIMARY KEY (user_id, word))",
    "CREATE TABLE label (id {id}, photo_id BIGINT NOT NULL)",
    "INSERT INTO photo (id, user_id, title) VALUES (1, 7, 'a'), (2, 8, 'b')",
)


database = database_fixture(SCHEMA, ["sqlite", *SERVERS])


@pytest.fixture
def capture(database: Database) -> ChangeCapture:
    """An open fence of key 7, and all triggers."""
    capture = database.capture()
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    return capture


def all_triggers() -> set[str]:
    return {trigger_name(table.name, event) for table in TABLES for event in EVENTS}


def changed(capture: ChangeCapture) -> list[tuple[str, tuple[Any, ...]]]:
    return [(change.table, change.pk) for change in capture.changes(1)]


def test_every_change_of_the_key_is_recorded(database: Database, capture: ChangeCapture) -> None:
    session = database.session()
    run(session, "INSERT INTO photo (id, user_id, title) VALUES (3, 7, 'c')")
    run(session, "UPDATE photo SET title = 'x' WHERE id IN (1, 2)")
    run(session, "INSERT INTO vote VALUES (7, 'a,''b'), (8, 'other')")
    run(session, "INSERT INTO label (id, photo_id) VALUES (5, 3), (6, 2)")
    run(session, "DELETE FROM label WHERE id = 5")
    run(session, "UPDATE photo SET id = 9 WHERE id = 3")
    assert changed(capture) == [
        ("photo", ("3",)),
        *[("photo", ("1",))] * 2,
        ("vote", ("7", "a,'b")),
        *[("label", ("5",))] * 2,
        ("photo", ("3",)),
        ("photo", ("9",)),
    ]


def test_a_row_with_a_generated_id(database: Database, capture: ChangeCapture) -> None:
    session = database.session()
    run(session, "INSERT INTO photo (user_id, title) VALUES (7, 'c')")
    ((pk,),) = run(session, "SELECT id FROM photo WHERE title = 'c'")
    assert changed(capture) == [("photo", (str(pk),))]


def test_what_is_forgotten_is_exactly_what_was_returned(
    database: Database, capture: ChangeCapture
) -> None:
    session, late = database.session(), database.session()
    if not database.isolation:
        late = session  # SQLite has one writer at a time.
    run(late, "BEGIN")
    run(late, "INSERT INTO vote VALUES (7, 'late')")
    if late is session:
        run(late, "COMMIT")
    run(session, "INSERT INTO vote VALUES (7, 'soon')")
    seen = capture.changes(1)
    if late is not session:
        # Its entry has a lower number, and appears after the other was handled.
        assert [change.pk for change in seen] == [("7", "soon")]
        run(late, "COMMIT")
        capture.forget(seen)
        assert changed(capture) == [("vote", ("7", "late"))]
        seen = capture.changes(1)
    capture.forget(seen)
    assert changed(capture) == []


def test_a_closed_fence_refuses_each_change_of_the_key_only(
    database: Database, capture: ChangeCapture
) -> None:
    session = database.session()
    run(session, "INSERT INTO label (id, photo_id) VALUES (5, 1)")
    capture.close(1, PATIENCE)
    for statement in (
        "INSERT INTO photo (user_id, title) VALUES (7, 'c')",
        "UPDATE photo SET title = 'x' WHERE id = 1",
        "UPDATE photo SET user_id = 7 WHERE id = 2",
        "UPDATE photo SET user_id = 8 WHERE id = 1",
        "DELETE FROM label WHERE id = 5",
        "DELETE FROM photo WHERE id = 1",
        "INSERT INTO vote VALUES (7, 'a')",
        "INSERT INTO label (photo_id) VALUES (1)",
    ):
        assert refuses(session, statement)
    run(session, "INSERT INTO photo (id, user_id, title) VALUES (4, 8, 'd')")
    run(session, "INSERT INTO label (photo_id) VALUES (4)")
    assert run(session, "SELECT id, user_id, title FROM photo ORDER BY id") == [
        (1, 7, "a"), (2, 8, "b"), (4, 8, "d"),
    ]  # fmt: skip
    capture.reopen(1)
    run(session, "UPDATE photo SET title = 'x' WHERE id = 1")


def test_a_fence_that_is_closed_from_the_beginning(database: Database) -> None:
    capture, session = database.capture(), database.session()
    capture.prepare()
    capture.watch(1, 7, closed=True)
    capture.install(TABLES, PATIENCE)
    assert refuses(session, "INSERT INTO vote VALUES (7, 'a')")


def test_closing_waits_for_an_open_transaction_of_the_key(
    database: Database, capture: ChangeCapture
) -> None:
    writer = database.session()
    run(writer, "BEGIN")
    run(writer, "INSERT INTO vote VALUES (7, 'open')")
    with pytest.raises(OperationalError):
        capture.close(1, SHORT)
    assert capture.fences() == {1: "open"}
    closer = threading.Thread(target=capture.close, args=(1, PATIENCE))
    capture._connection.inc_thread_sharing()
    closer.start()
    run(writer, "INSERT INTO vote VALUES (7, 'more')")
    run(writer, "COMMIT")
    closer.join(PATIENCE)
    assert capture.fences() == {1: "closed"}
    assert changed(capture) == [("vote", ("7", "open")), ("vote", ("7", "more"))]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_closing_does_not_wait_for_other_keys(database: Database, capture: ChangeCapture) -> None:
    writer = database.session()
    run(writer, "BEGIN")
    run(writer, "INSERT INTO vote VALUES (8, 'other')")
    capture.close(1, PATIENCE)
    run(writer, "INSERT INTO vote VALUES (8, 'more')")
    run(writer, "COMMIT")


@pytest.mark.parametrize("database", [*MARIADB, POSTGRESQL[0]], indirect=True)
def test_a_snapshot_older_than_the_fence_sees_the_fence(
    database: Database, capture: ChangeCapture
) -> None:
    writer = database.session()
    run(writer, "BEGIN")
    run(writer, f"SELECT * FROM {FENCES}")
    capture.close(1, PATIENCE)
    assert refuses(writer, "INSERT INTO vote VALUES (7, 'a')")
    run(writer, "ROLLBACK")


def test_installing_waits_for_transactions_that_have_not_seen_the_fence(
    database: Database,
) -> None:
    capture, writer = database.capture(), database.session()
    capture.prepare()
    run(writer, "BEGIN")
    run(writer, "INSERT INTO vote VALUES (7, 'unseen')")
    if database.isolation:
        capture.watch(1, 7)
        with pytest.raises(OperationalError):
            capture.install(TABLES, SHORT)
    run(writer, "COMMIT")
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    run(writer, "INSERT INTO vote VALUES (7, 'seen')")
    assert changed(capture) == [("vote", ("7", "seen"))]


@pytest.mark.parametrize("database", ["read committed", *POSTGRESQL], indirect=True)
def test_a_second_fence_waits_for_transactions_as_well(
    database: Database, capture: ChangeCapture
) -> None:
    """The triggers exist already, so creating them does not wait.

    With other isolation levels of MariaDB, the new row of the fence waits already.
    """
    writer = database.session()
    run(writer, "BEGIN")
    run(writer, "INSERT INTO vote VALUES (8, 'unseen')")
    capture.watch(2, 8)
    with pytest.raises(OperationalError):
        capture.install(TABLES, SHORT)
    run(writer, "COMMIT")
    capture.install(TABLES, PATIENCE)


def test_triggers_go_with_the_last_fence(database: Database, capture: ChangeCapture) -> None:
    capture.watch(2, 8)
    capture.unwatch(1)
    assert not capture.uninstall(PATIENCE)
    assert all_triggers() <= capture.triggers()
    capture.unwatch(2)
    assert capture.uninstall(PATIENCE)
    assert capture.triggers() == set()
    assert capture.uninstall(PATIENCE)
    run(database.session(), "INSERT INTO vote VALUES (7, 'a')")


def test_each_step_can_be_repeated(database: Database, capture: ChangeCapture) -> None:
    run(database.session(), "INSERT INTO vote VALUES (7, 'a')")
    capture.close(1, PATIENCE)
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    assert capture.fences() == {1: "closed"}
    assert changed(capture) == [("vote", ("7", "a"))]


def test_what_is_on_the_shard_for_a_while_is_no_part_of_its_schema(database: Database) -> None:
    session, capture = database.session(), database.capture()
    before = session.schema_snapshot()
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    assert session.schema_snapshot().differences(before) == []
    assert session.schema_glance(before, ["photo"]).differences(before) == []


@pytest.mark.parametrize("database", ["read committed"], indirect=True)
def test_a_cascade_of_innodb_is_recorded_for_its_root_only(
    database: Database, capture: ChangeCapture
) -> None:
    """InnoDB fires no triggers for rows that it deletes itself. Who copies has to know that."""
    session = database.session()
    run(session, "INSERT INTO label (id, photo_id) VALUES (5, 1)")
    run(
        session,
        "ALTER TABLE label ADD FOREIGN KEY (photo_id) REFERENCES photo (id) ON DELETE CASCADE",
    )
    run(session, "DELETE FROM photo WHERE id = 1")
    assert run(session, "SELECT COUNT(*) FROM label") == [(0,)]
    assert changed(capture) == [("label", ("5",)), ("photo", ("1",))]
    # A closed fence stops it at its root, because rows that are related have the same key.
    run(session, "INSERT INTO photo (id, user_id) VALUES (1, 7)")
    run(session, "INSERT INTO label (id, photo_id) VALUES (5, 1)")
    capture.close(1, PATIENCE)
    assert refuses(session, "DELETE FROM photo WHERE id = 1")
    assert run(session, "SELECT COUNT(*) FROM label") == [(1,)]


def test_a_table_that_is_captured_whole(database: Database) -> None:
    """Every row belongs to one fence. Other columns than those of the primary key are recorded, too."""
    session, capture = database.session(), database.capture()
    whole = [
        CapturedTable("photo", ("id", "user_id"), "user_id", fence="photos"),
        CapturedTable("vote", ("user_id", "word"), "user_id", fence="others"),
    ]
    capture.prepare()
    capture.watch(1, "photos")
    capture.install(whole, PATIENCE)
    run(session, "INSERT INTO photo (id, user_id, title) VALUES (3, 9, 'c')")
    run(session, "UPDATE photo SET user_id = 10 WHERE id = 3")
    run(session, "DELETE FROM photo WHERE id = 2")
    run(session, "INSERT INTO vote VALUES (7, 'of another fence')")
    assert changed(capture) == [
        *[("photo", ("3", "9"))] * 2,
        ("photo", ("3", "10")),
        ("photo", ("2", "8")),
    ]
    capture.close(1, PATIENCE)
    with pytest.raises(Error, match="this table has moved to shards and is closed for writes"):
        run(session, "UPDATE photo SET title = 'x'")
    run(session, "INSERT INTO vote VALUES (7, 'more')")


@pytest.mark.parametrize("database", ["read committed"], indirect=True)
def test_tables_that_cascades_of_innodb_change(database: Database) -> None:
    session = database.session()
    run(
        session,
        "ALTER TABLE label ADD FOREIGN KEY (photo_id) REFERENCES photo (id) ON DELETE CASCADE",
    )
    assert database.capture().tables_with_silent_changes(TABLES) == ["label"]


@pytest.mark.parametrize("database", MARIADB[:1], indirect=True)
def test_triggers_come_and_go_on_a_table_that_takes_long_to_open(database: Database) -> None:
    """A session that is stopped while it opens a table leaves a wrong form of its triggers to all others."""
    session, capture = database.session(), database.capture()
    statements = "SET @a = 1; " * 30_000
    run(
        session,
        f"CREATE TRIGGER slow BEFORE INSERT ON photo FOR EACH ROW IF 0 THEN {statements} END IF",
    )
    capture.prepare()
    capture.watch(1, 7)
    for present in (all_triggers(), set()):
        if present:
            capture.install(TABLES, PATIENCE)
        else:
            capture.unwatch(1)
            assert capture.uninstall(PATIENCE)
        assert capture.triggers() == present
        for statement in (
            "INSERT INTO photo (id, user_id) VALUES (3, 7)",
            "UPDATE photo SET title = 'x' WHERE id = 3",
            "DELETE FROM photo WHERE id = 3",
        ):
            run(session, statement)
        if present:
            assert changed(capture) == [("photo", ("3",))] * 4
