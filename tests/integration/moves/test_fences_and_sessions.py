"""Fences that another move has left or removed, the sessions of others, and missing privileges."""

from __future__ import annotations

import gc
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import MySQLdb
import pytest
from django.db import OperationalError

from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.exceptions import MoveFailed, MoveRefused
from tests.integration.moves.database import (
    Database,
    database_fixture,
    refuses,
    run,
    sessions_fixture,
)
from tests.integration.moves.test_change_capture import SCHEMA, SERVERS, SHORT, TABLES, all_triggers
from tests.patience import PATIENCE, eventually

MARIADB = pytest.mark.parametrize("database", ["repeatable read"], indirect=True)


database = database_fixture(SCHEMA, ["sqlite", *SERVERS])


@pytest.mark.parametrize("action", ["close", "reopen"])
def test_a_fence_that_is_gone_is_neither_closed_nor_opened(database: Database, action: str) -> None:
    capture = database.capture()
    capture.prepare()
    capture.watch(1, 7)
    capture.unwatch(1)
    with pytest.raises(MoveFailed, match="Fence 1"):
        capture.close(1, PATIENCE) if action == "close" else capture.reopen(1)
    assert capture.fences() == {}


@pytest.mark.parametrize("closed", [False, True])
def test_a_fence_that_an_earlier_move_has_left_is_taken_over(
    database: Database, closed: bool
) -> None:
    capture, session = database.capture(), database.session()
    capture.prepare()
    capture.watch(1, 7)
    capture.install(TABLES, PATIENCE)
    run(session, "INSERT INTO vote VALUES (7, 'old')")
    capture.close(1, PATIENCE)
    capture.watch(2, 7, closed=closed)
    assert capture.fences() == {2: "closed" if closed else "open"}
    assert capture.changes(1) == []
    if closed:
        assert refuses(session, "INSERT INTO vote VALUES (7, 'a')")
    else:
        run(session, "INSERT INTO vote VALUES (7, 'a')")
        assert [change.pk for change in capture.changes(2)] == [("7", "a")]
    # The earlier move can do no more with it.
    capture.unwatch(1)
    with pytest.raises(MoveFailed):
        capture.reopen(1)
    assert list(capture.fences()) == [2]


def test_an_open_fence_of_another_move_is_not_taken_over(database: Database) -> None:
    capture = database.capture()
    capture.prepare()
    capture.watch(1, 7)
    with pytest.raises(MoveFailed, match="Fence 1"):
        capture.watch(2, 7, closed=True)
    assert capture.fences() == {1: "open"}


def test_triggers_are_created_or_dropped_by_one_session_at_a_time(database: Database) -> None:
    first, second = database.capture(), database.capture()
    with first.exclusively(PATIENCE):
        first.prepare()
        with pytest.raises(OperationalError), second.exclusively(SHORT):
            pass
        with pytest.raises(OperationalError):
            second.uninstall(SHORT)
        first.watch(1, 7)
        first.install(TABLES, PATIENCE)
    assert not second.uninstall(PATIENCE)
    assert all_triggers() <= first.triggers()


def test_an_error_ends_the_exclusive_time(database: Database) -> None:
    first, second = database.capture(), database.capture()
    with pytest.raises(ZeroDivisionError), first.exclusively(PATIENCE):
        raise ZeroDivisionError
    with second.exclusively(SHORT):
        pass


def test_nobody_knows_the_sessions_of_a_file(tmp_path: Path, django_db_blocker: Any) -> None:
    settings = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(tmp_path / "x.sqlite3")}
    with django_db_blocker.unblock():
        assert Database(settings).capture().sessions() is None


class Session:
    """A session of its own: those of the library go back to a pool after each statement."""

    def __init__(self, database: Database) -> None:
        settings = database._settings
        self.driver = MySQLdb.connect(
            host=settings["HOST"], port=int(settings["PORT"]), user=settings["USER"],
            password=settings["PASSWORD"], database=settings["NAME"], autocommit=True,
        )  # fmt: skip

    def run(self, sql: str) -> None:
        self.driver.cursor().execute(sql)


sessions = sessions_fixture(Session, 2)


def left(capture: ChangeCapture, marker: dict[str, Any]) -> int:
    (count,) = capture.sessions_left([marker])
    return count


def taken(capture: ChangeCapture) -> tuple[Any, int]:
    """A marker as the journal keeps it, and how many sessions are left of it at once."""
    gc.collect()  # Sessions of connection objects that nobody uses would end at any time.
    marker = json.loads(json.dumps(capture.sessions()))
    return marker, left(capture, marker)


@MARIADB
def test_a_session_counts_until_it_has_ended_a_new_statement(
    database: Database, sessions: list[Session]
) -> None:
    capture, (idle, ended) = database.capture(), sessions
    marker, before = taken(capture)
    assert before >= 2
    later = Session(database)
    later.run("SELECT 1")
    assert left(capture, marker) == before
    # No second has passed: the order of statements counts, and no clock.
    idle.run("SELECT 1")
    assert left(capture, marker) == before - 1
    ended.run("SELECT 1")
    assert left(capture, marker) == before - 2
    later.driver.close()


@MARIADB
def test_a_session_that_has_ended_does_not_count(
    database: Database, sessions: list[Session]
) -> None:
    capture = database.capture()
    marker, before = taken(capture)
    sessions[1].run(f"KILL {sessions[0].driver.thread_id()}")
    eventually(lambda: left(capture, marker) == before - 2)


@MARIADB
def test_a_session_counts_while_a_transaction_of_before_is_open(
    database: Database, sessions: list[Session]
) -> None:
    capture, (writer, _) = database.capture(), sessions
    writer.run("BEGIN")
    writer.run("INSERT INTO vote VALUES (8, 'a')")
    marker, before = taken(capture)
    writer.run("INSERT INTO vote VALUES (8, 'b')")
    assert left(capture, marker) == before
    writer.run("COMMIT")
    assert left(capture, marker) == before - 1


@MARIADB
def test_a_session_counts_while_others_keep_the_list_of_transactions_old(
    database: Database, sessions: list[Session]
) -> None:
    """The server makes its list anew only if nobody has read it for 0.1 seconds."""
    capture, (writer, monitor) = database.capture(), sessions
    reads, is_over = threading.Semaphore(0), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            monitor.run("SELECT COUNT(*) FROM information_schema.innodb_trx")
            reads.release()

    with ThreadPoolExecutor() as executor:
        watching = executor.submit(watch)
        try:
            assert reads.acquire(timeout=PATIENCE)
            writer.run("BEGIN")
            writer.run("INSERT INTO vote VALUES (8, 'a')")
            marker, before = taken(capture)
            writer.run("INSERT INTO vote VALUES (8, 'b')")
            assert left(capture, marker) == before
        finally:
            is_over.set()
        watching.result(PATIENCE)
    assert left(capture, marker) == before - 1  # The monitor's session has ended a new statement.
    writer.run("COMMIT")
    assert left(capture, marker) == before - 2


@MARIADB
def test_a_session_counts_while_its_statement_runs(
    database: Database, sessions: list[Session]
) -> None:
    capture, (holder, waiting) = database.capture(), sessions
    holder.run("SELECT GET_LOCK('held', 0)")
    marker, before = taken(capture)
    waiting.driver.send_query(f"SELECT GET_LOCK('held', {PATIENCE})")
    assert left(capture, marker) == before
    holder.run("DO RELEASE_LOCK('held')")
    waiting.driver.read_query_result()
    waiting.driver.store_result()
    assert left(capture, marker) == before - 2


@MARIADB
def test_after_a_restart_no_session_is_left(database: Database) -> None:
    """The server counts statements from the beginning again, and may give the same ids again."""
    capture, session = database.capture(), database.session()
    run(session, "SELECT 1")
    marker = capture.sessions()
    assert marker is not None
    assert left(capture, marker)
    assert left(capture, {**marker, "statement": 2**62}) == 0


@MARIADB
def test_many_fences_cost_no_more_waits_than_one(
    database: Database, sessions: list[Session]
) -> None:
    """The server's list of transactions may be old, so each look at it costs a wait, or two."""
    capture = database.capture()
    markers = []
    for _ in range(5):
        markers.append(taken(capture)[0])
        sessions[0].run("SELECT 1")
    waits = []

    def count(execute: Any, sql: str, *args: Any) -> Any:
        waits.extend([sql] if "SLEEP" in sql else [])
        return execute(sql, *args)

    with capture._connection.execute_wrapper(count):
        counts = capture.sessions_left(markers)
    assert len(counts) == 5
    assert all(counts)
    assert 1 <= len(waits) <= 2


class Account:
    """An account with every privilege on the schema, and no other."""

    def __init__(self, database: Database, grants: str = "ALL PRIVILEGES") -> None:
        self.admin, self.name = database.session(), f"mover_{secrets.token_hex(4)}"
        self.schema = database._settings["NAME"]
        self._settings = {**database._settings, "USER": self.name, "PASSWORD": "x"}
        run(self.admin, f"CREATE USER {self.name}@'%' IDENTIFIED BY 'x'")
        run(self.admin, f"GRANT {grants} ON {self.schema}.* TO {self.name}@'%'")

    def capture(self) -> Any:
        return Database(self._settings).capture()


@pytest.fixture
def account(database: Database) -> Iterator[Account]:
    account = Account(database)
    yield account
    run(account.admin, f"DROP USER {account.name}@'%'")


@MARIADB
def test_an_account_that_does_not_see_sessions_is_refused(
    database: Database, account: Account
) -> None:
    with account.capture() as capture, pytest.raises(MoveRefused, match="grant it PROCESS"):
        capture.check_privileges()


@MARIADB
def test_sessions_that_nobody_may_see_are_not_taken_for_ended(
    database: Database, account: Account
) -> None:
    marker = database.capture().sessions()
    assert marker is not None
    with account.capture() as capture, pytest.raises(Exception, match="PROCESS"):
        left(capture, marker)


@MARIADB
@pytest.mark.parametrize("by_role", [False, True])
def test_an_account_with_process_may_move(
    database: Database, account: Account, by_role: bool
) -> None:
    user = f"{account.name}@'%'"
    if by_role:
        role = f"role_{account.name}"
        run(account.admin, f"CREATE ROLE {role}")
        run(account.admin, f"GRANT PROCESS ON *.* TO {role}")
        run(account.admin, f"GRANT {role} TO {user}")
        run(account.admin, f"SET DEFAULT ROLE {role} FOR {user}")
    else:
        run(account.admin, f"GRANT PROCESS ON *.* TO {user}")
    with account.capture() as capture:
        capture.check_privileges()
    if by_role:
        run(account.admin, f"DROP ROLE {role}")
    assert run(account.admin, "SHOW TABLES LIKE '%probe%'") == []


@MARIADB
@pytest.mark.parametrize("missing", ["TRIGGER", "LOCK TABLES", "CREATE", "DROP"])
def test_an_account_that_cannot_create_triggers_is_refused(
    database: Database, account: Account, missing: str
) -> None:
    user = f"{account.name}@'%'"
    run(account.admin, f"GRANT PROCESS ON *.* TO {user}")
    run(account.admin, f"REVOKE {missing} ON {account.schema}.* FROM {user}")
    with account.capture() as capture, pytest.raises(MoveRefused, match="cannot create triggers"):
        capture.check_privileges()
    assert run(account.admin, "SHOW TABLES LIKE '%probe%'") == []


@MARIADB
def test_a_check_of_privileges_leaves_nothing_if_it_is_killed_at_any_moment(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    tables: list[object] = []

    def look(capture: ChangeCapture, sql: str, *params: object) -> list[tuple[object, ...]]:
        statements.append(sql)
        try:
            return run_statement(capture, sql, *params)
        finally:
            tables.extend(run_statement(capture, "SHOW TABLES LIKE '%%probe%%'"))

    capture = database.capture()
    run_statement = ChangeCapture._rows
    monkeypatch.setattr(ChangeCapture, "_rows", look)
    capture.check_privileges()
    assert any("CREATE TRIGGER" in sql for sql in statements)
    assert tables == []
