"""Fences and the journal on PostgreSQL, where snapshots, cascades and locks are others than elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from django.db import OperationalError

from sharded_orm.backends.change_capture import FENCES, JOURNAL, CapturedTable, ChangeCapture
from sharded_orm.backends.fence_messages import is_deadlock, is_refusal
from sharded_orm.exceptions import MoveRefused
from tests.integration.moves.database import Database, database_fixture, run
from tests.integration.moves.postgresql_session import Session, waits
from tests.integration.moves.test_change_capture import SCHEMA, SHORT, TABLES, changed
from tests.patience import PATIENCE, eventually

FOREIGN_KEY = (
    "ALTER TABLE label ADD FOREIGN KEY (photo_id) REFERENCES photo (id) ON DELETE CASCADE"
    " ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED"
)

database = database_fixture(SCHEMA, ["postgresql read committed"])


@pytest.fixture
def capture(database: Database) -> ChangeCapture:
    """An open fence of key 7, and all triggers."""
    capture = database.capture()
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    return capture


SNAPSHOTS = pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])


@SNAPSHOTS
def test_a_transaction_that_cannot_see_the_fence_writes_nothing(
    database: Database, sessions: list[Session], level: str
) -> None:
    """The triggers fire, but the rows of its snapshot have no fence."""
    capture, writer = database.capture(), sessions[0]
    capture.prepare()
    writer.begin(level)
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    with pytest.raises(psycopg.errors.SerializationFailure, match="Run the transaction again") as e:
        writer.run("INSERT INTO vote VALUES (7, 'a')")
    assert is_deadlock(e.value)
    writer.run("ROLLBACK")
    writer.begin(level)
    writer.run("INSERT INTO vote VALUES (7, 'a')")
    writer.run("COMMIT")
    assert changed(capture) == [("vote", ("7", "a"))]


@SNAPSHOTS
def test_a_second_fence_that_a_transaction_cannot_see(
    database: Database, capture: ChangeCapture, sessions: list[Session], level: str
) -> None:
    writer = sessions[0]
    writer.begin(level)
    capture.watch(2, 8)
    capture.install(TABLES, PATIENCE)
    with pytest.raises(psycopg.errors.SerializationFailure):
        writer.run("INSERT INTO vote VALUES (8, 'a')")


@SNAPSHOTS
@pytest.mark.parametrize("change", ["close", "take over"])
def test_a_transaction_that_sees_the_former_state_of_the_fence(
    database: Database, capture: ChangeCapture, sessions: list[Session], level: str, change: str
) -> None:
    writer = sessions[0]
    if change == "take over":
        capture.close(1, PATIENCE)
    writer.begin(level)
    if change == "close":
        capture.close(1, PATIENCE)
    else:
        capture.watch(2, 7)
    with pytest.raises(psycopg.errors.SerializationFailure) as caught:
        writer.run("INSERT INTO vote VALUES (7, 'a')")
    assert is_deadlock(caught.value)
    writer.run("ROLLBACK")
    assert writer.run("SELECT count(*) FROM vote") == [(0,)]


def test_a_statement_that_has_begun_before_the_fence_was_closed_is_refused(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    """It waits for a row, with a snapshot in which the fence is open."""
    holder, writer, observer = sessions
    holder.run("BEGIN")
    holder.run("SELECT * FROM photo WHERE id = 1 FOR UPDATE")
    with ThreadPoolExecutor() as executor:
        update = executor.submit(writer.run, "UPDATE photo SET title = 'x' WHERE id = 1")
        eventually(lambda: waits(writer, observer))
        capture.close(1, PATIENCE)
        holder.run("COMMIT")
        with pytest.raises(psycopg.Error) as caught:
            update.result(PATIENCE)
    assert is_refusal(caught.value)


def test_writers_that_overlap_do_not_keep_the_fence_open(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    """A later writer waits behind the one who closes. It would not behind a lock on a row."""
    early, late, observer = sessions
    early.run("BEGIN")
    early.run("INSERT INTO vote VALUES (7, 'early')")
    with ThreadPoolExecutor() as executor:
        closing = executor.submit(capture.close, 1, PATIENCE)
        gate = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: observer.run(gate))
        insert = executor.submit(late.run, "INSERT INTO vote VALUES (7, 'late')")
        eventually(lambda: waits(late, observer))
        early.run("INSERT INTO vote VALUES (7, 'more')")  # It holds the gate, and does not wait.
        early.run("COMMIT")
        closing.result(PATIENCE)
        with pytest.raises(psycopg.Error) as caught:
            insert.result(PATIENCE)
    assert is_refusal(caught.value)
    assert changed(capture) == [("vote", ("7", "early")), ("vote", ("7", "more"))]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_rows_that_cascades_change_are_recorded(
    database: Database, capture: ChangeCapture, sessions: list[Session], level: str
) -> None:
    """When the trigger of such a row fires, the row with its key is gone."""
    session, other, _ = sessions
    session.run(FOREIGN_KEY)
    session.run("INSERT INTO label (id, photo_id) VALUES (5, 1), (6, 2)")
    capture.forget(capture.changes(1))
    session.run(f"BEGIN ISOLATION LEVEL {level}")
    session.run("UPDATE photo SET id = 9 WHERE id = 1")
    session.run("COMMIT")
    assert {("label", ("5",)), ("photo", ("1",)), ("photo", ("9",))} <= set(changed(capture))
    capture.forget(capture.changes(1))
    other.run("DELETE FROM photo WHERE id = 9")
    assert set(changed(capture)) == {("label", ("5",)), ("photo", ("9",))}
    assert other.run("SELECT id FROM label") == [(6,)]


def test_rows_that_come_before_the_row_with_their_key(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    """A foreign key may be checked at the end of the transaction only."""
    session = sessions[0]
    session.run(FOREIGN_KEY)
    session.run("BEGIN")
    session.run("INSERT INTO label (id, photo_id) VALUES (5, 3)")
    session.run("INSERT INTO photo (id, user_id) VALUES (3, 7)")
    session.run("COMMIT")
    assert changed(capture) == [("label", ("5",)), ("photo", ("3",))]
    capture.forget(capture.changes(1))
    session.run("BEGIN")
    session.run("DELETE FROM photo WHERE id = 2")
    session.run("COMMIT")
    assert changed(capture) == []


def test_truncate_is_refused_while_changes_are_recorded(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    session = sessions[0]
    for statement in ("TRUNCATE vote", "TRUNCATE photo, label CASCADE"):
        with pytest.raises(psycopg.Error, match="TRUNCATE is refused") as caught:
            session.run(statement)
        assert not is_refusal(caught.value)  # Waiting for the end of the switch would not help.
    assert session.run("SELECT count(*) FROM photo") == [(2,)]
    capture.unwatch(1)
    assert capture.uninstall(PATIENCE)
    session.run("TRUNCATE photo, vote, label")


def test_a_session_that_applies_replicated_changes_is_recorded(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    session = sessions[0]
    session.run("SET session_replication_role = replica")
    session.run("INSERT INTO vote VALUES (7, 'a')")
    assert changed(capture) == [("vote", ("7", "a"))]


def test_what_is_copied_in_is_recorded(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    with sessions[0].driver.cursor() as cursor, cursor.copy("COPY vote FROM STDIN") as copy:
        copy.write("7\tb\n8\tc\n")
    assert changed(capture) == [("vote", ("7", "b"))]


def test_a_trigger_that_somebody_disables_is_missing_and_made_again(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    before = capture.triggers()
    sessions[0].run("ALTER TABLE vote DISABLE TRIGGER USER")
    assert len(before - capture.triggers()) == 4
    capture.install(TABLES, PATIENCE)
    assert capture.triggers() == before
    sessions[0].run("INSERT INTO vote VALUES (7, 'a')")
    assert changed(capture) == [("vote", ("7", "a"))]


@pytest.fixture
def account(database: Database, sessions: list[Session]) -> Iterator[str]:
    """A role that may change rows of the tables, and has no other privilege."""
    admin, name = sessions[0], f"writer_{secrets.token_hex(4)}"
    schema = database._settings["SCHEMA"]
    admin.run(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    admin.run(f"GRANT USAGE ON SCHEMA {schema} TO {name}")
    admin.run(f"GRANT SELECT, INSERT, UPDATE, DELETE ON photo, vote, label TO {name}")
    yield name
    admin.run(f"DROP OWNED BY {name}")
    admin.run(f"DROP ROLE {name}")


def test_writers_need_no_privilege_for_fences_and_journal(
    database: Database, account: str, sessions: list[Session]
) -> None:
    capture = database.capture()
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    writer = Session(database, user=account, password="x")
    schema = database._settings["SCHEMA"]
    # Nor does it matter what their names mean.
    writer.run(f"CREATE TEMPORARY TABLE {FENCES} (id bigint, value text, state text, gate bigint)")
    writer.run("SET search_path = pg_temp, pg_catalog")
    writer.run(f"INSERT INTO {schema}.vote VALUES (7, 'a')")
    assert changed(capture) == [("vote", ("7", "a"))]
    for table in (FENCES, JOURNAL):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            writer.run(f"SELECT * FROM {schema}.{table}")
    capture.close(1, PATIENCE)
    with pytest.raises(psycopg.Error) as caught:
        writer.run(f"INSERT INTO {schema}.vote VALUES (7, 'b')")
    assert is_refusal(caught.value)
    writer.driver.close()


def test_an_account_that_does_not_own_the_tables_is_refused(
    database: Database, account: str, sessions: list[Session]
) -> None:
    settings = {**database._settings, "USER": account, "PASSWORD": "x"}
    with Database(settings).capture() as capture, pytest.raises(MoveRefused) as caught:
        capture.check_privileges()
    reasons = str(caught.value)
    for remedy in ("grant it CREATE on the schema", "'label' belongs to", "pg_read_all_stats"):
        assert remedy in reasons
    ((owner,),) = sessions[0].run("SELECT current_user")
    sessions[0].run(f"GRANT {owner}, pg_read_all_stats TO {account}")
    with Database(settings).capture() as capture:
        capture.check_privileges()
    sessions[0].run(f"REVOKE {owner}, pg_read_all_stats FROM {account}")


@pytest.mark.parametrize("style", ["SQL, DMY", "German"])
def test_the_journal_does_not_depend_on_the_settings_of_the_writer(
    database: Database, sessions: list[Session], style: str
) -> None:
    session, capture = sessions[0], database.capture()
    session.run("CREATE TABLE day (day date, at timestamptz, size float8, user_id int,"
                " PRIMARY KEY (day, at, size))")  # fmt: skip
    table = CapturedTable("day", ("day", "at", "size"), "user_id")
    capture.prepare()
    capture.watch(1, 7)
    capture.install([table], PATIENCE)
    session.run(f"SET DateStyle = '{style}'")
    session.run("SET TimeZone = 'Asia/Tokyo'")
    session.run("SET extra_float_digits = -10")
    session.run(
        "INSERT INTO day VALUES ('2026-02-01', '2026-02-01T10:00Z', 0.1::float8 + 0.2::float8, 7)"
    )
    (change,) = capture.changes(1)
    assert change.pk == ("2026-02-01", "2026-02-01 10:00:00+00", "0.30000000000000004")
    (row,) = database.copy().read_again(table, 7, [change.pk])
    assert row[:3] == ("2026-02-01 10:00:00+00", "2026-02-01", "0.30000000000000004")


def test_a_prepared_transaction_holds_the_fence_open(
    database: Database, capture: ChangeCapture, sessions: list[Session]
) -> None:
    writer = sessions[0]
    gid = f"{database._settings['SCHEMA']}"
    writer.run("BEGIN")
    writer.run("INSERT INTO vote VALUES (7, 'a')")
    writer.run(f"PREPARE TRANSACTION '{gid}'")
    writer.driver.close()
    try:
        with pytest.raises(OperationalError):
            capture.close(1, SHORT)
        capture.watch(2, 8)
        with pytest.raises(OperationalError):
            capture.install(TABLES, SHORT)
        marker = capture.sessions()
        assert marker is not None
        before = capture.sessions_left([marker])[0]
    finally:
        sessions[1].run(f"COMMIT PREPARED '{gid}'")
    capture.close(1, PATIENCE)
    assert changed(capture) == [("vote", ("7", "a"))]
    assert capture.sessions_left([marker])[0] == before - 2  # And this test's own session.


def test_a_missing_schema_is_no_other_schema(database: Database) -> None:
    settings = {**database._settings, "SCHEMA": "nowhere"}
    with pytest.raises(OperationalError, match="does not exist"):
        Database(settings).capture()
    ((count,),) = run(
        database.session(),
        "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname <> current_schema() AND relname LIKE 'sharded_orm_capture_%'"
        " AND nspname IN ('public', 'extensions')",
    )
    assert count == 0
