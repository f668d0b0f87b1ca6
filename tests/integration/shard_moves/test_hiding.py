"""Hiding the tables of a schema beside sessions that use them."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import MySQLdb
import pytest
from django.db import OperationalError, ProgrammingError

from sharded_orm.backends.schema_move import SchemaMove
from sharded_orm.exceptions import MoveFailed
from tests.integration.moves.database import Database, database_fixture, run
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


database = database_fixture(TABLES, ["sqlite", MARIADB, POSTGRESQL])


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


@pytest.mark.parametrize("database", [MARIADB], indirect=True)
def test_a_hiding_that_ends_in_a_deadlock_is_repeated(database: Database) -> None:
    """InnoDB renames its statistics as well, so it may wait for others that compute them."""
    schema, other, observer = schema_of(database), database.session(), database.session()
    errors: list[Any] = []
    rows, is_locked = schema._rows, False

    def noted(sql: str, *params: Any) -> Any:
        nonlocal is_locked
        if sql.startswith("RENAME") and not is_locked:
            is_locked = True
            run(other, "START TRANSACTION")
            # The server ends the transaction that has done less.
            run(other, "UPDATE mysql.innodb_index_stats SET stat_value = stat_value + 1")
        try:
            return rows(sql, *params)
        except OperationalError as exc:
            errors.append(exc.args[0])
            raise

    schema._rows = noted  # type: ignore[method-assign]
    with ThreadPoolExecutor() as executor:
        hiding = executor.submit(schema.hide, schema.tables(), "tag", PATIENCE)
        while not rename_waits(observer):
            assert not hiding.done()
        run(other, "UPDATE mysql.innodb_table_stats SET n_rows = n_rows + 1")
        run(other, "ROLLBACK")
        hiding.result(PATIENCE)
    assert 1025 in errors  # ER_ERROR_ON_RENAME; its message says that there was a deadlock.
    assert set(schema.hidden()) == {"album", "photo"}


@pytest.mark.parametrize("database", [MARIADB], indirect=True)
def test_tables_are_not_hidden_while_a_branch_is_prepared(database: Database) -> None:
    """Nobody holds the tables after its session has ended, but InnoDB still locks what it has changed."""
    schema, observer = schema_of(database), database.session()
    branch, settings = f"'{secrets.token_hex(4)}'", database._settings
    session = MySQLdb.connect(
        host=settings["HOST"], port=int(settings["PORT"]), user=settings["USER"],
        password=settings["PASSWORD"], database=settings["NAME"], autocommit=True,
    )  # fmt: skip
    for statement in (
        f"XA START {branch}",
        "INSERT INTO album (id) VALUES (1)",
        f"XA END {branch}",
        f"XA PREPARE {branch}",
    ):
        session.cursor().execute(statement)
    session.close()
    with ThreadPoolExecutor() as executor:
        hiding = executor.submit(schema.hide, schema.tables(), "tag", PATIENCE)
        while not rename_waits(observer):
            assert not hiding.done()
        run(observer, f"XA COMMIT {branch}")
        hiding.result(PATIENCE)
    hidden = schema.hidden()
    assert set(hidden) == {"album", "photo"}
    assert run(observer, f"SELECT id FROM {hidden['album']}") == [(1,)]


def rename_waits(observer: Any) -> bool:
    """Whether a RENAME TABLE waits for a lock of InnoDB.

    This is not read from innodb_trx: the server makes that list anew only if nobody has read it for 0.1
    seconds.
    """
    ((_, _, status),) = run(observer, "SHOW ENGINE INNODB STATUS")
    _, *transactions = status.split("---TRANSACTION ")
    return any("LOCK WAIT" in each and "\nRENAME TABLE " in each for each in transactions)


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
