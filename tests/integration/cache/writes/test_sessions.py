"""Markers name database sessions: their ids, and how their end is detected. On MariaDB."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import MySQLdb
import pytest
from django.db import DatabaseError, OperationalError, connections, transaction

from sharded_orm.backends.mysql.identity import session_id
from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.cache.closings import closing_queue
from tests.cached.models import CachedTag
from tests.queries.conftest import DATABASES
from tests.services.mariadb import Address

from .conftest import NEAR, ONE, SHARD
from .recording import Recorded
from .test_scopes import scope
from .test_transactions import committed, guard_of, only, start_of_commit

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


@pytest.fixture
def wrapper(local: Recorded) -> Any:
    return connections[SHARD[ONE]]


@pytest.fixture
def admin(mariadb_nodes: list[Address], wrapper: Any) -> Iterator[Any]:
    (address,) = [a for a in mariadb_nodes if a.port == int(wrapper.settings_dict["PORT"])]
    connection = MySQLdb.connect(**address.mysqldb(), autocommit=True)
    yield connection
    connection.close()


def run(admin: Any, sql: str, *params: Any) -> list[Any]:
    cursor = admin.cursor()
    cursor.execute(sql, params or None)
    return list(cursor.fetchall())


def exists(admin: Any, session: int) -> bool:
    sql = "SELECT COUNT(*) FROM information_schema.processlist WHERE id = %s"
    return bool(run(admin, sql, session)[0][0])


def own_session(wrapper: Any) -> int:
    with wrapper.cursor() as cursor:
        cursor.execute("SELECT CONNECTION_ID()")
        (number,) = cursor.fetchone()
    return int(number)


def test_marker_names_the_session_that_commits(local: Recorded, wrapper: Any) -> None:
    markers: list[Any] = []
    only(local).at["finish"] = lambda: markers.extend(guard_of(local, ONE).open)
    with transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        session = own_session(wrapper)
        session_id = wrapper.session_id()
    (marker,) = markers
    assert marker.writer.connection == session == session_id.connection
    assert marker.writer.account == session_id.account
    # The cache does not learn the account.
    assert "tester" not in repr(marker)
    assert marker.writer.server == session_id.server != ""
    # No session outside of a transaction.
    assert wrapper.session_id() == SessionID()


def test_session_behind_a_proxy_is_nobody(local: Recorded, wrapper: Any) -> None:
    """The driver then knows the proxy's id, which may be another session's on the server."""

    class OfProxy:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def thread_id(self) -> int:
            return int(self.raw.thread_id()) + 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.raw, name)

    pool = wrapper.node_pool
    session = pool.lease_new()
    session.raw = OfProxy(session.raw)
    try:
        assert session_id(session, pool) == SessionID()
    finally:
        pool.discard(session)
    assert not wrapper.judges(SessionID())


def test_identity_is_asked_once_per_session(local: Recorded, wrapper: Any) -> None:
    CachedTag.objects.create(user_id=ONE, name="a")
    session = wrapper.node_pool.lease()
    assert session.identity is not None
    wrapper.node_pool.release(session)


def test_sessions_that_are_gone(wrapper: Any, admin: Any) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        alive = wrapper.session_id()
        other = run(admin, "SELECT CONNECTION_ID()")[0][0]
        there = SessionID(alive.server, alive.account, other)
        gone = SessionID(alive.server, alive.account, 2**31)
        elsewhere = SessionID("another", alive.account, 2**31)
        assert wrapper.judges(gone)
        assert not wrapper.judges(elsewhere)
        assert not wrapper.judges(SessionID())
        assert wrapper.sessions_gone([alive, there, gone, elsewhere]) == {gone}


def test_account_that_sees_its_own_sessions_only(wrapper: Any, admin: Any) -> None:
    run(admin, "CREATE USER 'narrow'@'%' IDENTIFIED BY 'narrow'")
    run(admin, "GRANT SELECT ON *.* TO 'narrow'@'%'")
    settings = {**wrapper.settings_dict, "USER": "narrow", "PASSWORD": "narrow", "NAME": None}
    settings.pop("SHARD")
    try:
        narrow = type(wrapper)(settings, "narrow")
        with transaction.atomic(using=SHARD[ONE]):
            CachedTag.objects.create(user_id=ONE, name="a")
            writer = wrapper.session_id()
            # It cannot see the living session, so it must not say that it is dead.
            assert not narrow.judges(writer)
            _, account, _ = narrow.node_pool.last_answer
            own = SessionID(writer.server, account, 2**31)
            assert narrow.judges(own)
            assert narrow.sessions_gone([writer, own]) == {own}
        narrow.node_pool.dispose()
    finally:
        run(admin, "DROP USER 'narrow'@'%'")


def test_nobody_is_dead_while_the_server_does_not_answer(wrapper: Any) -> None:
    settings = {**wrapper.settings_dict, "HOST": "127.0.0.1", "PORT": "1", "NAME": None}
    settings.pop("SHARD")
    down = type(wrapper)(settings, "down")
    writer = SessionID("server", "tester@%", 1)
    assert down.judges(writer)
    assert down.sessions_gone([writer]) == set()


def test_server_behind_the_address_has_changed(wrapper: Any) -> None:
    """After a promotion its sessions can be judged at once, not after QUARANTINE."""
    with transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        writer = wrapper.session_id()
        wrapper.node_pool.last_answer = ("the one before", writer.account, True)
        assert wrapper.judges(writer)


def test_session_whose_end_cannot_be_told_is_closed(
    local: Recorded, wrapper: Any, admin: Any
) -> None:
    server = only(local)
    server.fail = {"finish"}
    CachedTag.objects.create(user_id=ONE, name="a")
    (marker,) = guard_of(local, ONE).open
    while exists(admin, marker.writer.connection):
        pass  # the server takes a moment to notice
    assert wrapper.sessions_gone([marker.writer]) == {marker.writer}
    # The alias goes on with another session.
    server.fail = set()
    CachedTag.objects.create(user_id=ONE, name="b")
    assert guard_of(local, ONE).open == ()


def test_session_is_shared_again_after_a_good_end(local: Recorded, wrapper: Any) -> None:
    CachedTag.objects.create(user_id=ONE, name="a")
    before = wrapper.node_pool.stats.opened
    for number in range(3):
        CachedTag.objects.create(user_id=NEAR, name=str(number))
    assert wrapper.node_pool.stats.opened == before
    assert wrapper.connection.is_idle


def test_refused_transaction_closes_its_session_too(
    local: Recorded, wrapper: Any, admin: Any
) -> None:
    server = only(local)
    server.fail = {"mark+", "finish"}
    with pytest.raises(OperationalError):
        CachedTag.objects.create(user_id=ONE, name="a")
    (marker,) = guard_of(local, ONE).open
    while exists(admin, marker.writer.connection):
        pass
    server.fail = set()
    closing_queue.flush(server)
    assert guard_of(local, ONE).open == ()


def test_connection_lost_in_commit(
    local: Recorded, wrapper: Any, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill() -> None:
        session = wrapper.session_id().connection
        run(admin, f"KILL {session}")
        while exists(admin, session):
            pass

    start_of_commit(monkeypatch, wrapper, kill)
    with pytest.raises(OperationalError):
        CachedTag.objects.create(user_id=ONE, name="a")
    # Only the database knows whether it was committed, so readers ask it.
    (marker,) = guard_of(local, ONE).open
    assert not closing_queue.waiting
    assert wrapper.sessions_gone([marker.writer]) == {marker.writer}
    assert not CachedTag.objects.uncached().filter(user_id=ONE).exists()


def test_killed_session_is_listed_until_its_transaction_is_over(
    local: Recorded, wrapper: Any, admin: Any
) -> None:
    """Otherwise a reader would repair a marker while the transaction can still take effect."""
    table = f"`{wrapper.settings_dict['NAME']}`.`{CachedTag._meta.db_table}`"
    with transaction.atomic(using=SHARD[ONE]):
        tag = CachedTag.objects.create(user_id=ONE, name="a")
    other = MySQLdb.connect(
        host=wrapper.settings_dict["HOST"], port=int(wrapper.settings_dict["PORT"]),
        user=wrapper.settings_dict["USER"], passwd=wrapper.settings_dict["PASSWORD"],
    )  # fmt: skip
    # Many rows, so that rolling them back takes a while.
    run(other, "BEGIN")
    run(other, f"UPDATE {table} SET uses = 1 WHERE id = %s", tag.pk)
    rows = "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 200000)"
    run(other, "SET max_recursive_iterations = 1000000")
    run(
        other,
        f"INSERT INTO {table} (user_id, name, uses) {rows} SELECT 77, CONCAT('n', i), 0 FROM n",
    )
    session = other.thread_id()
    run(admin, f"KILL {session}")
    seen = 0
    while exists(admin, session):
        seen += 1
    # When the session leaves the list, none of its locks is left: it was rolled back before.
    run(admin, "SET innodb_lock_wait_timeout = 1")
    assert run(admin, f"SELECT uses FROM {table} WHERE id = %s FOR UPDATE NOWAIT", tag.pk) == [(0,)]
    assert run(admin, f"SELECT COUNT(*) FROM {table} WHERE user_id = 77") == [(0,)]
    assert seen > 0


@pytest.fixture
def by_the_way(wrapper: Any) -> Iterator[None]:
    """A table for rows that the tests write in addition."""
    yield
    wrapper.close()
    with wrapper.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS written_by_the_way")
        cursor.execute("DROP PROCEDURE IF EXISTS commit_by_the_way")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE written_by_the_way (id INT)",
        f"LOCK TABLES {CachedTag._meta.db_table} WRITE",
        "START TRANSACTION",
        "COMMIT",
        "SET autocommit = 1",
    ],
)
def test_statement_that_commits_is_announced(
    local: Recorded, wrapper: Any, by_the_way: None, sql: str, tied: bool
) -> None:
    with wrapper.cursor() as cursor:
        if tied:
            cursor.execute("SET @state = 1")
        with transaction.atomic(using=SHARD[ONE]):
            CachedTag.objects.create(user_id=ONE, name="a")
            cursor.execute(sql)
            assert local.what == ["mark"]
            assert len(guard_of(local, ONE).open) == 1
            cursor.execute("UNLOCK TABLES")
            assert committed(ONE) == 1
    assert local.what == ["mark", "finish"]
    assert guard_of(local, ONE).open == ()


def test_connection_lost_in_a_statement_that_commits(
    local: Recorded, wrapper: Any, admin: Any
) -> None:
    """The server may still be executing it: only the server can say when it is over."""

    def kill() -> None:
        run(admin, f"KILL {wrapper.session_id().connection}")

    only(local).at["mark"] = kill
    with pytest.raises(OperationalError), transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        with wrapper.cursor() as cursor:
            cursor.execute("COMMIT")
    assert local.what == ["mark"]
    assert len(guard_of(local, ONE).open) == 1
    # The alias goes on.
    wrapper.close()
    only(local).at.clear()
    CachedTag.objects.create(user_id=ONE, name="b")
    assert committed(ONE) == 1


def test_procedure_that_commits_is_announced(
    local: Recorded, wrapper: Any, by_the_way: None
) -> None:
    with wrapper.cursor() as cursor:
        cursor.execute("CREATE PROCEDURE commit_by_the_way() COMMIT")
        with transaction.atomic(using=SHARD[ONE]):
            CachedTag.objects.create(user_id=ONE, name="a")
            cursor.callproc("commit_by_the_way")
            assert local.what == ["mark"]
            assert committed(ONE) == 1
    assert local.what == ["mark", "finish"]


def test_statement_of_the_driver_that_commits_is_announced(
    local: Recorded, wrapper: Any, by_the_way: None
) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        wrapper.connection.query(b"COMMIT")
        assert local.what == ["mark"]
        assert committed(ONE) == 1
    assert local.what == ["mark", "finish"]


@pytest.mark.parametrize(
    "sql", ["SAVEPOINT mine", "SELECT @@autocommit", "SET @state = 1", "CREATE TABLE ("]
)
def test_statement_that_might_have_committed_commits_nothing(
    local: Recorded, wrapper: Any, sql: str
) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        with contextlib.suppress(DatabaseError), wrapper.cursor() as cursor:
            cursor.execute(sql)
        raise ZeroDivisionError
    assert committed(ONE) == 0
    assert guard_of(local, ONE).open == ()
    wrapper.close()


def test_row_that_appears_between_reading_and_writing(local: Recorded, wrapper: Any) -> None:
    """An UPDATE changes exactly the rows that were locked and marked."""
    tag = CachedTag.objects.create(user_id=ONE, name="a")
    CachedTag.objects.create(user_id=NEAR, name="other")
    done = threading.Event()

    def insert() -> None:
        try:
            CachedTag.objects.create(user_id=ONE, name="b")
        finally:
            connections["photos"].close()
            done.set()

    added: list[threading.Thread] = []

    def between(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and not added:
            added.append(threading.Thread(target=insert))
            added[0].start()
            done.wait()
        return execute(sql, *rest)

    local.clear()
    with wrapper.execute_wrapper(between):
        assert CachedTag.objects.filter(user_id=ONE).update(uses=5) == 1
    added[0].join()
    found = CachedTag.objects.uncached().filter(user_id=ONE).order_by("name")
    assert [row.uses for row in found] == [5, 0]
    finished = {name for what, _, names in local.events if what == "finish" for name in names}
    assert scope(CachedTag, ONE).object_name(str(tag.pk)) in finished
