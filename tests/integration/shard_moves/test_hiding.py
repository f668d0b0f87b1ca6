"""Hiding the tables of a schema beside sessions that use them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError

from sharded_orm.backends.mysql.schema_move import may_rename_again
from sharded_orm.backends.schema_move import SchemaMove
from sharded_orm.exceptions import MoveFailed
from tests.integration.moves.database import Database, database_on, run
from tests.patience import PATIENCE

TABLES = (
    "CREATE TABLE album (id INT PRIMARY KEY, name VARCHAR(9) DEFAULT 'a \"b\"')",
    "CREATE TABLE photo (id INT PRIMARY KEY, album_id INT, FOREIGN KEY (album_id) REFERENCES album (id))",
    "CREATE INDEX photo_album ON photo (album_id)",
)


MARIADB, POSTGRESQL = "read committed", "postgresql read committed"
SERVERS = pytest.mark.parametrize("database", [MARIADB, POSTGRESQL], indirect=True)
#: The beginning or end of the statement that hides the tables or fails at once.
ATTEMPTS = ("RENAME", "NOWAIT")


@pytest.fixture(params=["sqlite", MARIADB, POSTGRESQL])
def database(
    request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any
) -> Iterator[Database]:
    with (
        django_db_blocker.unblock(),
        database_on(request.param, request, tmp_path / "1.sqlite3", TABLES) as database,
    ):
        yield database


def schema_of(database: Database) -> SchemaMove:
    schema: SchemaMove = database.session().schema_move(lambda: None)
    schema._connection.inc_thread_sharing()
    database._sessions.append(schema._connection)
    return schema


def test_the_layout_is_the_same_while_the_tables_are_hidden(database: Database) -> None:
    schema = schema_of(database)
    before, identities = schema.layout(), schema.identities()
    assert {"album", "photo"} <= set(before)
    schema.hide(schema.tables(), "tag", 1.0)
    assert [table.name for table in schema.tables()] == []
    assert (schema.layout(), schema.identities()) == (before, identities)
    schema.show(1.0)
    assert (schema.layout(), schema.identities()) == (before, identities)
    run(database.session(), "INSERT INTO album (id) VALUES (1)")


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE album ADD COLUMN other INT DEFAULT 1",
        "CREATE INDEX album_name ON album (name)",
        "ALTER TABLE album RENAME COLUMN name TO title",
    ],
)
def test_the_layout_tells_of_every_change(database: Database, change: str) -> None:
    schema = schema_of(database)
    before = schema.layout()
    run(database.session(), change)
    assert schema.layout() != before
    schema.hide(schema.tables(), "tag", 1.0)
    assert schema.layout() != before


def test_a_schema_without_tables_is_hidden_and_shown(database: Database) -> None:
    session, schema = database.session(), schema_of(database)
    run(session, "DROP TABLE photo")
    run(session, "DROP TABLE album")
    schema.hide(schema.tables(), "tag", 1.0)
    schema.show(1.0)
    assert schema.hidden() == {}


def test_tables_that_came_meanwhile_are_not_overwritten(database: Database) -> None:
    schema = schema_of(database)
    schema.hide(schema.tables(), "tag", 1.0)
    run(database.session(), "CREATE TABLE album (id INT PRIMARY KEY)")
    with pytest.raises(MoveFailed, match=r"\(album\)\. Drop or rename"):
        schema.show(1.0)
    run(database.session(), "DROP TABLE album")
    schema.show(1.0)


@SERVERS
def test_no_statement_waits_for_a_hiding_that_waits(database: Database) -> None:
    """Otherwise transactions on several tables end in deadlocks, which they do not on their own."""
    schema, one, other = schema_of(database), database.session(), database.session()
    attempts = threading.Semaphore(0)
    is_postgresql = one.vendor == "postgresql"
    rows = schema._rows

    def counted(sql: str, *params: Any) -> Any:
        try:
            return rows(sql, *params)
        finally:
            if sql.startswith(ATTEMPTS) or sql.endswith(ATTEMPTS):
                attempts.release()

    schema._rows = counted  # type: ignore[method-assign]
    run(one, "START TRANSACTION")
    run(one, "SELECT * FROM photo")
    run(other, "SET lock_timeout = '1s'" if is_postgresql else "SET lock_wait_timeout = 1")
    with ThreadPoolExecutor() as executor:
        hiding = executor.submit(schema.hide, schema.tables(), "tag", PATIENCE)
        for _ in range(100):
            assert attempts.acquire(timeout=PATIENCE)
            run(one, "SELECT * FROM album FOR UPDATE")
            run(other, "SELECT * FROM photo")
        run(one, "COMMIT")
        hiding.result(PATIENCE)
    with pytest.raises(ProgrammingError, match=r"does(n't| not) exist"):
        run(other, "SELECT * FROM photo")


@pytest.mark.parametrize(("text", "is_repeated"), [("Deadlock", True), ("No such file", False)])
def test_a_deadlock_of_a_rename_is_recognised(text: str, is_repeated: bool) -> None:
    """InnoDB renames its statistics as well, so a RENAME TABLE may meet others that compute them."""
    number = 149 if is_repeated else 2
    message = f"Error on rename of './s/photo' to './s/hidden' (errno: {number} \"{text}\")"
    assert may_rename_again(OperationalError(1025, message)) is is_repeated


@SERVERS
def test_a_transaction_that_does_not_end_leaves_the_tables_as_they_are(database: Database) -> None:
    schema, one = schema_of(database), database.session()
    run(one, "START TRANSACTION")
    run(one, "SELECT * FROM photo")
    with pytest.raises(OperationalError):
        schema.hide(schema.tables(), "tag", 0.05)
    assert schema.hidden() == {}
    run(one, "SELECT * FROM album")
    run(one, "COMMIT")
