"""Cursors: pending results, other cursor classes, executemany, the attributes of PEP 249."""

from __future__ import annotations

import gc
from typing import Any

import MySQLdb
import pytest
from django.db import Error, IntegrityError, ProgrammingError, connections, transaction
from MySQLdb import _mysql, cursors

from tests.integration.mysql.conftest import COUNT, Node


def test_rows_stay_readable_while_others_use_the_session(node: Node) -> None:
    cursors_ = []
    for number in range(COUNT):
        cursor = node[number].cursor()
        cursor.execute("SELECT shard, id FROM item ORDER BY id")
        cursors_.append(cursor)
    for number, cursor in enumerate(cursors_):
        assert cursor.fetchone() == (number, 1)
    for number, cursor in enumerate(cursors_):
        assert list(cursor.fetchmany(5)) == [(number, 2)]
        assert not cursor.fetchall()
        assert not cursor.nextset()
        cursor.close()
        cursor.close()
    assert node.pool.size == 1


def test_attributes(node: Node) -> None:
    with node[0].cursor() as cursor:
        cursor.execute("INSERT INTO item (value) VALUES (%s), (%s)", ["a", None])
        assert (cursor.rowcount, cursor.lastrowid, cursor.description) == (2, 3, None)
        assert cursor.execute("UPDATE item SET value = %(value)s", {"value": "b"}) == 4
        cursor.execute("SELECT id, value FROM item WHERE id = %s", [3])
        assert [column[0] for column in cursor.description] == ["id", "value"]
        assert cursor.rowcount == 1
        assert len(cursor.description_flags) == 2
        assert cursor._executed == b"SELECT id, value FROM item WHERE id = 3"
        assert cursor.mogrify("SELECT %s", ["it's"]) == "SELECT 'it\\'s'"
        assert list(cursor) == [(3, "b")]
        cursor.scroll(-1)
        assert cursor.fetchone() == (3, "b")
    with pytest.raises(ProgrammingError):
        cursor.execute("SELECT 1")


def test_the_log_shows_the_statement_alone(node: Node) -> None:
    node.run(0, "SELECT 1")
    node[1].force_debug_cursor = True
    with transaction.atomic(using="t_1"), transaction.atomic(using="t_1"):
        node.run(1, "SELECT %s", [5])
    logged = [entry["sql"] for entry in node[1].queries_log]
    assert logged[0].startswith("SET SESSION TRANSACTION") or logged[0] == "BEGIN"
    logged = logged[logged.index("BEGIN") :]
    assert logged[0] == "BEGIN"
    assert logged[1].startswith("SAVEPOINT `s")
    assert logged[2] == "SELECT 5"
    assert logged[3].startswith("RELEASE SAVEPOINT `s")
    assert logged[4] == "COMMIT"


def test_executemany(node: Node) -> None:
    for in_transaction in (False, True):
        node.run(0, "SELECT 1")
        with transaction.atomic(using="t_1") if in_transaction else node[1].cursor():
            with node[1].cursor() as cursor:
                cursor.executemany("INSERT INTO item (value) VALUES (%s)", [["a"], ["b"], ["c"]])
                assert cursor.rowcount == 3
                cursor.executemany("UPDATE item SET value = %s WHERE id = %s", [["x", 1], ["y", 2]])
                assert cursor.rowcount == 2
                cursor.executemany("UPDATE item SET value = %s WHERE id = %s", [])
                with pytest.raises(IntegrityError), transaction.atomic(using="t_1"):
                    cursor.executemany("INSERT INTO item (id) VALUES (%s)", [[100], [1]])
    assert node[1].is_idle()
    assert node.ask("SELECT DISTINCT shard FROM t_1.item") == [(1,)]
    assert node.ask("SELECT COUNT(*) FROM t_1.item") == [(2 + 3 + 3,)]


def test_executemany_in_multi_statements(node: Node) -> None:
    connections["t_0"].settings_dict["OPTIONS"] = {"executemany_fallback": "multi"}
    for in_transaction in (False, True):
        with transaction.atomic(using="t_0") if in_transaction else node[0].cursor():
            with node[0].cursor() as cursor:
                cursor.executemany("UPDATE item SET value = %s WHERE id = %s", [["x", 1], ["y", 2]])
                assert cursor.rowcount == 2
            assert node.run(0, "SELECT value FROM item ORDER BY id") == [("x",), ("y",)]


@pytest.mark.parametrize("in_transaction", [False, True])
def test_streamed_results_hold_their_session(node: Node, in_transaction: bool) -> None:
    with transaction.atomic(using="t_0") if in_transaction else node[0].cursor():
        node[0].ensure_connection()
        cursor = node[0].connection.cursor(cursors.SSCursor)
        cursor.execute("SELECT id, shard FROM item ORDER BY id")
        assert cursor.fetchone() == (1, 0)
        assert not node[0].is_idle()
        for number in range(1, COUNT):
            assert node.run(number, "SELECT DISTINCT shard FROM item") == [(number,)]
        if in_transaction:
            # As on any connection: commands out of sync.
            with pytest.raises(Error):
                node.run(0, "SELECT 1")
            cursor.close()
            node[0].set_rollback(True)
        else:
            assert node.run(0, "SELECT 1") == [(1,)]
            assert cursor.fetchall() == ((2, 0),)
            cursor.close()
    assert node[0].is_idle()
    assert node.run(0, "SELECT DISTINCT shard FROM item") == [(0,)]


def test_a_streaming_cursor_that_is_dropped(node: Node) -> None:
    node[0].ensure_connection()
    for end in ("drop", "close the connection", "execute again"):
        cursor = node[0].connection.cursor(cursors.SSCursor)
        cursor.execute("SELECT id FROM item")
        cursor.fetchone()
        if end == "close the connection":
            node[0].close()
            with pytest.raises(node[0].Database.Error):
                cursor.fetchone()
            node[0].ensure_connection()
        elif end == "execute again":
            cursor.execute("SELECT shard FROM item")
            assert cursor.fetchall() == ((0,), (0,))
            cursor.close()
        del cursor
        gc.collect()
        assert node[0].is_idle()
        assert node.pool.size == node.pool.idle


@pytest.mark.parametrize("end", ["close", "nextset", "execute again"])
def test_no_result_outlives_its_lease(
    node: Node, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver locks the session when it frees a result, whoever uses the session then."""
    node[0].ensure_connection()
    cursor = node[0].connection.cursor(cursors.SSCursor)
    release = node.pool.release
    results_at_release: list[int] = []

    def count_and_release(session: Any) -> None:
        results_at_release.append(
            sum(type(candidate) is _mysql.result for candidate in gc.get_objects())
        )
        release(session)

    monkeypatch.setattr(node.pool, "release", count_and_release)
    cursor.execute("SELECT id FROM item")
    if end == "execute again":
        cursor.execute("UPDATE item SET value = 'x'")
    elif end == "nextset":
        assert cursor.fetchall() == ((1,), (2,))
        assert cursor.nextset() is None
        assert cursor.fetchone() is None
    else:
        cursor.close()
    assert node[0].is_idle()
    assert results_at_release
    assert not any(results_at_release)


def test_a_session_that_was_given_back_is_not_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may use the session as soon as the pool has it."""
    node.run(0, "SELECT 1")
    (session,) = node.pool._idle
    idle_when_asked: list[bool] = []
    more_results = session.more_results

    def ask() -> bool:
        idle_when_asked.append(session in node.pool._idle)
        return more_results()

    monkeypatch.setattr(session, "more_results", ask)
    with node[0].constraint_checks_disabled():
        node.run(0, "SELECT 1")
    node.run(0, "SAVEPOINT s")
    assert node[0].is_idle()
    assert idle_when_asked
    assert not any(idle_when_asked)


@pytest.mark.parametrize("call", ["more_results", "autocommits"])
@pytest.mark.parametrize("how", ["cursor", "transaction"])
def test_a_driver_that_fails_after_the_statement_keeps_no_session(
    node: Node, call: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise MySQLdb.ProgrammingError("This connection is already in use from another thread.")

    node.run(0, "SELECT 1")
    session = node.pool._idle[-1]
    if how == "cursor":
        monkeypatch.setattr(session, call, fail)
        with pytest.raises(ProgrammingError):
            node.run(0, "SELECT 1")
    else:
        with transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'kept' WHERE id = 1")
            monkeypatch.setattr(session, call, fail)
        # The commit has succeeded, so there is no error.
        assert node.value(0) == "kept"
    assert session.retired
    assert node.pool.size == node.pool.idle
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]


def test_other_cursor_classes(node: Node) -> None:
    node[0].ensure_connection()
    connection = node[0].connection
    with connection.cursor(cursors.DictCursor) as cursor:
        cursor.execute("SELECT id FROM item ORDER BY id")
        assert cursor.fetchone() == {"id": 1}
        assert node[0].is_idle()
    connections["t_1"].settings_dict["OPTIONS"] = {"cursorclass": cursors.SSDictCursor}
    with node[1].cursor() as cursor:
        cursor.execute("SELECT shard FROM item WHERE id = %s", [1])
        assert cursor.fetchall() == ({"shard": 1},)
    assert node[1].is_idle()


def test_several_result_sets(node: Node) -> None:
    with node[0].cursor() as cursor:
        cursor.execute("SELECT 1; SELECT 2; SELECT 3")
        assert cursor.fetchall() == ((1,),)
        assert cursor.nextset()
        assert cursor.fetchall() == ((2,),)
    # The third was never asked for.
    assert node.run(0, "SELECT 4") == [(4,)]
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]


def test_a_procedure_with_results(node: Node) -> None:
    node.run(0, "CREATE PROCEDURE two () BEGIN SELECT 1; SELECT 2; END")
    with node[0].cursor() as cursor:
        cursor.execute("CALL two()")
        assert cursor.fetchall() == ((1,),)
        assert cursor.nextset()
        assert cursor.fetchall() == ((2,),)
        cursor.execute("CALL two()")
        cursor.callproc("two")
        assert cursor.fetchall() == ((1,),)
    assert node.run(1, "SELECT DATABASE()") == [("t_1",)]


def test_a_cursor_that_outlives_its_connection(node: Node) -> None:
    cursor = node[0].cursor()
    cursor.execute("SELECT id FROM item ORDER BY id")
    node[0].close()
    assert cursor.fetchone() == (1,)
    with pytest.raises(Error):
        cursor.execute("SELECT 1")
    cursor.close()
