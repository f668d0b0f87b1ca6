"""Which sessions on PostgreSQL may still send what they have prepared before a fence was closed."""

from __future__ import annotations

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.backends.change_capture import ChangeCapture
from tests.integration.moves.database import Database, database_fixture
from tests.integration.moves.postgresql_session import Session, waits
from tests.integration.moves.test_change_capture import SCHEMA
from tests.patience import PATIENCE, eventually

database = database_fixture(SCHEMA, ["postgresql read committed"])


def left(capture: ChangeCapture, marker: dict[str, Any]) -> int:
    (count,) = capture.sessions_left([marker])
    return count


def taken(capture: ChangeCapture) -> tuple[Any, int]:
    """A marker as the journal keeps it, and how many sessions are left of it at once."""
    marker = json.loads(json.dumps(capture.sessions()))
    return marker, left(capture, marker)


def test_a_session_counts_until_it_has_ended_a_new_statement(
    database: Database, sessions: list[Session]
) -> None:
    capture, (first, second, _) = database.capture(), sessions
    marker, before = taken(capture)
    assert before >= 3
    later = Session(database)
    later.run("SELECT 1")
    assert left(capture, marker) == before
    first.run("SELECT 1")
    eventually(lambda: left(capture, marker) == before - 1)
    second.run("BEGIN")
    eventually(lambda: left(capture, marker) == before - 2)
    later.driver.close()


def test_a_session_that_has_ended_does_not_count(
    database: Database, sessions: list[Session]
) -> None:
    capture = database.capture()
    marker, before = taken(capture)
    pid = sessions[0].driver.info.backend_pid
    sessions[1].run(f"SELECT pg_terminate_backend({pid})")
    eventually(lambda: left(capture, marker) == before - 2)


def test_a_session_counts_while_a_transaction_of_before_is_open(
    database: Database, sessions: list[Session]
) -> None:
    capture, (writer, *_) = database.capture(), sessions
    writer.run("BEGIN")
    writer.run("INSERT INTO vote VALUES (8, 'a')")
    marker, before = taken(capture)
    writer.run("INSERT INTO vote VALUES (8, 'b')")
    writer.run("SELECT 1")
    assert left(capture, marker) == before
    writer.run("COMMIT")
    eventually(lambda: left(capture, marker) == before - 1)


@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_session_counts_while_its_statement_runs(
    database: Database, sessions: list[Session], begun: str
) -> None:
    capture, (holder, waiting, observer) = database.capture(), sessions
    holder.run("SELECT pg_advisory_lock(4711)")
    pool = ThreadPoolExecutor()
    if begun == "after":
        marker, before = taken(capture)
    statement = pool.submit(waiting.run, "SELECT pg_advisory_lock(4711)")
    try:
        eventually(lambda: waits(waiting, observer))
        if begun == "before":
            marker, before = taken(capture)
        observer.run("SELECT 1")
        eventually(lambda: left(capture, marker) == before - 1)
    finally:
        holder.run("SELECT pg_advisory_unlock(4711)")
        pool.shutdown()
    statement.result(PATIENCE)
    # A statement of before tells nothing: the session may have read the next one already.
    eventually(lambda: left(capture, marker) == before - (3 if begun == "after" else 2))
    waiting.run("SELECT 1")
    eventually(lambda: left(capture, marker) == before - 3)


def test_sessions_that_nobody_may_see_are_not_taken_for_ended(
    database: Database, sessions: list[Session]
) -> None:
    admin, name, schema = sessions[0], f"mover_{secrets.token_hex(4)}", database._settings["SCHEMA"]
    marker = database.capture().sessions()
    assert marker is not None
    admin.run(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    admin.run(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    settings = {**database._settings, "USER": name, "PASSWORD": "x"}
    try:
        with Database(settings).capture() as capture:
            with pytest.raises(OperationalError, match="pg_read_all_stats"):
                left(capture, marker)
            with pytest.raises(OperationalError, match="pg_read_all_stats"):
                capture.sessions()
            admin.run(f"GRANT pg_read_all_stats TO {name}")
            assert left(capture, marker)
    finally:
        admin.run(f"DROP OWNED BY {name}")
        admin.run(f"DROP ROLE {name}")
