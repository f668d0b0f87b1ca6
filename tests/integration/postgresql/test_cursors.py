"""Cursors: chunks, COPY, streams, executemany, several results, errors, interruptions."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import psycopg
import pytest
from django.db import (
    DatabaseError,
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from psycopg import sql

from sharded_orm.backends.postgresql.server_cursor import PostgreSQLServerCursor
from sharded_orm.exceptions import SessionStateRefused, ShardDatabaseMissing
from tests.integration.postgresql.conftest import COUNT, Node

SHARD = "SELECT DISTINCT shard FROM item"
MANY = "SELECT shard, n FROM item, generate_series(1, 500) n WHERE id = 1 ORDER BY n"


def all_sessions_are_back(node: Node) -> bool:
    return node.pool.size == node.pool.idle


def test_rows_stay_readable_while_others_use_the_session(node: Node) -> None:
    cursors = []
    for number in range(COUNT):
        cursor = node[number].cursor()
        cursor.execute("SELECT shard, id FROM item ORDER BY id")
        cursors.append(cursor)
    for number, cursor in enumerate(cursors):
        assert cursor.fetchone() == (number, 1)
    for number, cursor in enumerate(cursors):
        assert cursor.fetchmany(5) == [(number, 2)]
        assert not cursor.fetchall()
        assert not cursor.nextset()
        cursor.close()
        cursor.close()
    assert node.pool.size == 1


def test_attributes(node: Node) -> None:
    with node[0].cursor() as cursor:
        cursor.execute("INSERT INTO item (value) VALUES (%s), (%s) RETURNING id", ["a", None])
        assert (cursor.rowcount, cursor.fetchall()) == (2, [(3,), (4,)])
        cursor.execute("UPDATE item SET value = %(value)s", {"value": "b"})
        assert (cursor.rowcount, cursor.description) == (4, None)
        assert cursor.statusmessage == "UPDATE 4"
        cursor.execute("SELECT id, value FROM item WHERE id = %s", [3])
        assert [column.name for column in cursor.description] == ["id", "value"]
        assert cursor.rowcount == 1
        assert cursor.mogrify("SELECT %s", ["it's"]) == "SELECT 'it''s'"
        assert list(cursor) == [(3, "b")]
        assert cursor.connection is node[0].connection
    with pytest.raises(InterfaceError):
        cursor.execute("SELECT 1")


@pytest.mark.parametrize("text", ["", "  ", ";", "-- nothing", "/* nothing */"])
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_text_without_a_statement(node: Node, text: str, in_transaction: bool) -> None:
    with transaction.atomic(using="t_0") if in_transaction else node[0].cursor():
        with node[0].cursor() as cursor:
            cursor.execute(text)
            assert cursor.description is None
            with pytest.raises(ProgrammingError):
                cursor.fetchone()
    assert node[0].is_idle()


def test_several_results(node: Node) -> None:
    for in_transaction in (False, True):
        with transaction.atomic(using="t_1") if in_transaction else node[1].cursor():
            with node[1].cursor() as cursor:
                cursor.execute("SELECT 1; SELECT 'two'::text, now(); UPDATE item SET value = 'x'")
                assert cursor.fetchall() == [(1,)]
                # Another alias uses the session, and the pool may even close it meanwhile.
                assert node.run(0, SHARD) == [(0,)]
                node.pool.dispose()
                assert cursor.nextset()
                assert cursor.fetchone()[0] == "two"
                assert cursor.nextset()
                assert cursor.rowcount == 2
                assert not cursor.nextset()
    assert node[1].is_idle()


def test_the_same_text_again_after_its_session_was_closed(node: Node) -> None:
    query = "SELECT %s, shard FROM item"
    with node[0].cursor() as cursor:
        for _ in range(3):
            cursor.execute(query, ["it's"])
            assert cursor.fetchone() == ("it's", 0)
            node.pool.dispose()


def test_composed_statements(node: Node) -> None:
    with node[0].cursor() as cursor:
        cursor.execute(
            sql.SQL("SELECT {} FROM {} WHERE id = {}").format(
                sql.Identifier("shard"), sql.Identifier("item"), sql.Literal(1)
            )
        )
        assert cursor.fetchone() == (0,)
        cursor.execute(b"SELECT shard FROM item WHERE id = %s", [1])
        assert cursor.fetchone() == (0,)
        assert node[0].ops.compose_sql("SELECT %s", ["it's"]) == "SELECT 'it''s'"
        with pytest.raises(SessionStateRefused, match="'int'"):
            cursor.execute(5)
    pins = node.pool.stats.pins
    node.run(0, sql.SQL("SET work_mem = {}").format(sql.Literal("2MB")))
    assert node.pool.stats.pins == pins + 1


def test_executemany(node: Node) -> None:
    for in_transaction in (False, True):
        with transaction.atomic(using="t_1") if in_transaction else node[1].cursor():
            with node[1].cursor() as cursor:
                cursor.executemany("INSERT INTO item (value) VALUES (%s)", [["a"], ["b"], ["c"]])
                assert cursor.rowcount == 3
                cursor.executemany("UPDATE item SET value = %s WHERE id = %s", [])
                # An error in the middle undoes all of it.
                with pytest.raises(IntegrityError), transaction.atomic(using="t_1"):
                    cursor.executemany("INSERT INTO item (id) VALUES (%s)", [[100], [1], [101]])
                with pytest.raises(SessionStateRefused):
                    cursor.executemany("SELECT set_config('a.b', %s, false)", [["x"]])
    with pytest.raises(IntegrityError), node[1].cursor() as cursor:
        cursor.executemany("INSERT INTO item (id) VALUES (%s)", [[100], [1], [101]])
    assert node[1].is_idle()
    assert node.ask("SELECT DISTINCT shard FROM t_1.item") == [(1,)]
    assert node.ask("SELECT count(*) FROM t_1.item") == [(2 + 3 + 3,)]
    assert all_sessions_are_back(node)


def test_chunks_in_autocommit(node: Node) -> None:
    with node[0].chunked_cursor() as cursor:
        cursor.execute(MANY)
        assert cursor.fetchmany(100)[0] == (0, 1)
        for number in range(COUNT):
            assert node.run(number, SHARD) == [(number,)]
        # Transactions of the same alias begin and end meanwhile.
        for end in ("commit", "roll back"):
            with transaction.atomic(using="t_0"):
                node.run(0, "UPDATE item SET value = 'x'")
                transaction.set_rollback(end == "roll back", using="t_0")
            assert len(cursor.fetchmany(100)) == 100
        assert len(cursor.fetchall()) == 200
        # The same cursor again.
        cursor.execute("SELECT shard FROM item")
        assert cursor.fetchall() == [(0,), (0,)]
    assert node[0].is_idle()
    assert node.ask("SELECT count(*) FROM pg_cursors") == [(0,)]
    assert all_sessions_are_back(node)


def test_chunks_in_a_transaction(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'mine'")
        with node[0].chunked_cursor() as cursor:
            cursor.execute("SELECT value FROM item")
            assert cursor.fetchone() == ("mine",)
            assert node.run(0, SHARD) == [(0,)]
            assert cursor.fetchall() == [("mine",)]
        open_cursor = node[0].chunked_cursor()
        open_cursor.execute(MANY)
        assert len(open_cursor.fetchmany(10)) == 10
    # The cursor has ended with its transaction.
    with pytest.raises(Error):
        open_cursor.fetchone()
    open_cursor.close()
    assert node.value(0) == "mine"
    assert node[0].is_idle()
    with pytest.raises(Error), transaction.atomic(using="t_0"):
        cursor = node[0].chunked_cursor()
        cursor.execute("SELECT 1 / (n - 3) FROM generate_series(1, 5) n")
        try:
            cursor.fetchall()
        finally:
            cursor.close()
    assert all_sessions_are_back(node)


@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
@pytest.mark.parametrize("end", ["drop", "close the connection", "execute again", "fail"])
def test_chunks_that_are_abandoned(node: Node, end: str) -> None:
    cursor: Any = node[0].chunked_cursor()
    cursor.execute(MANY)
    cursor.fetchone()
    assert not node[0].is_idle()
    if end == "close the connection":
        node[0].close()
        with pytest.raises(Error):
            cursor.fetchone()
    elif end == "execute again":
        cursor.execute("SELECT shard FROM item")
        assert cursor.fetchall() == [(0,), (0,)]
        cursor.close()
    elif end == "fail":
        with pytest.raises(ProgrammingError):
            cursor.execute("SELECT * FROM missing")
        cursor.close()
    del cursor
    gc.collect()
    assert node[0].is_idle()
    assert all_sessions_are_back(node)
    assert node.run(0, SHARD) == [(0,)]


def test_errors_of_chunks_are_those_of_the_statement(node: Node) -> None:
    for statement in ("SELECT 1 / 0", "SELECT 'nowhere'::regnamespace"):
        for in_transaction in (False, True):
            with pytest.raises(DatabaseError, match=r"division by zero|nowhere") as caught:
                with transaction.atomic(using="t_0") if in_transaction else node[0].cursor():
                    with node[0].chunked_cursor() as cursor:
                        cursor.execute(statement)
                        cursor.fetchall()
            assert not isinstance(caught.value, ShardDatabaseMissing)
    assert node[0].is_idle()


def test_named_cursors_of_the_driver(node: Node) -> None:
    node[0].ensure_connection()
    connection = node[0].connection
    with connection.cursor("mine") as cursor, pytest.raises(psycopg.Error, match="transaction"):
        cursor.execute("SELECT 1")
    with transaction.atomic(using="t_0"):
        cursor = connection.cursor("mine", withhold=True)
        assert isinstance(cursor, PostgreSQLServerCursor)
        cursor.execute(MANY)
        assert cursor.fetchone() == (0, 1)
    # WITH HOLD outlives the transaction, so its session is kept.
    assert cursor.fetchone() == (0, 2)
    cursor.close()
    assert node.pool.stats.pin_reasons["a cursor WITH HOLD"] == 1
    with pytest.raises(SessionStateRefused), connection.cursor("mine", withhold=True) as cursor:
        cursor.execute("SELECT set_config('a.b', 'c', false)")
    connection.close()
    node[0].close()
    with node[0].cursor() as plain, pytest.raises(NotSupportedError):
        plain.connection.cursor(binary=True).execute("SELECT 1")
        raise NotSupportedError
    assert node.run(1, SHARD) == [(1,)]


def test_copy_in_both_directions(node: Node) -> None:
    for in_transaction in (False, True):
        with transaction.atomic(using="t_2") if in_transaction else node[2].cursor():
            with node[2].cursor() as cursor:
                with cursor.copy("COPY item (value) FROM STDIN") as copy:
                    copy.write_row(["a"])
                    copy.write_row([None])
                assert cursor.rowcount == 2
                with cursor.copy("COPY (SELECT shard FROM item LIMIT %s) TO STDOUT", [2]) as copy:
                    assert [row[0] for row in copy.rows()] == ["2", "2"]
    assert node.ask("SELECT count(*) FROM t_2.item") == [(2 + 2 + 2,)]
    assert node[2].is_idle()
    assert all_sessions_are_back(node)


@pytest.mark.parametrize("how", ["copy", "stream"])
@pytest.mark.parametrize("second", ["execute", "savepoint", "state", "copy", "many", "chunks"])
def test_a_second_statement_while_a_session_is_busy(node: Node, how: str, second: str) -> None:
    """It is refused, as on a connection of Django's own backend, and the transaction goes on."""

    def run_second() -> None:
        with node[0].cursor() as other:
            if second == "execute":
                other.execute(SHARD)
            elif second == "savepoint":
                other.execute("SAVEPOINT mine")
            elif second == "state":
                other.execute("SET work_mem = '2MB'")
            elif second == "copy":
                with other.copy("COPY item TO STDOUT"):
                    pass
            elif second == "many":
                other.executemany("INSERT INTO item (value) VALUES (%s)", [["y"]])
            else:
                chunks.fetchone()

    # Django does not translate errors of copy().
    refusal = (OperationalError, psycopg.OperationalError)
    with transaction.atomic(using="t_0"):
        chunks = node[0].chunked_cursor()
        chunks.execute(MANY)
        node.run(0, "UPDATE item SET value = 'kept' WHERE id = 1")
        with node[0].cursor() as cursor:
            if how == "copy":
                with cursor.copy("COPY item (value) FROM STDIN") as copy:
                    copy.write_row(["copied"])
                    with pytest.raises(refusal, match="in progress"):
                        run_second()
                    copy.write_row(["copied"])
            else:
                rows = cursor.stream(MANY)
                assert next(rows) == (0, 1)
                with pytest.raises(refusal, match="in progress"):
                    run_second()
                assert len(list(rows)) == 499
        if second != "chunks":
            assert chunks.fetchone() == (0, 1)
        assert node.run(0, SHARD) == [(0,)]
    assert node.value(0) == "kept"
    assert node.ask("SELECT count(*) FROM t_0.item WHERE value = 'copied'") == [
        (2 if how == "copy" else 0,)
    ]
    assert all_sessions_are_back(node)


def test_a_copy_that_is_not_read_to_its_end(node: Node) -> None:
    """It makes a connection of the driver unusable, which is noticed here."""
    with node[0].cursor() as cursor:
        with cursor.copy("COPY item TO STDOUT") as copy:
            assert next(copy.rows())[1] == "0"
        assert node.run(0, SHARD) == [(0,)]
    with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x'")
        with node[0].cursor() as cursor, cursor.copy("COPY item TO STDOUT") as copy:
            next(copy.rows())
    assert node.value(0) is None
    assert node.run(0, SHARD) == [(0,)]
    assert all_sessions_are_back(node)


def test_a_copy_that_fails_half_way(node: Node) -> None:
    with pytest.raises(ZeroDivisionError), node[0].cursor() as cursor:
        with cursor.copy("COPY item (value) FROM STDIN") as copy:
            copy.write_row(["a"])
            raise ZeroDivisionError
    with pytest.raises(DataError), node[0].cursor() as cursor:
        with node[0].wrap_database_errors, cursor.copy("COPY item (id) FROM STDIN") as copy:
            copy.write_row(["no number"])
    with pytest.raises(SessionStateRefused), node[0].cursor() as cursor:
        with cursor.copy("COPY (SELECT set_config('a.b', 'c', false)) TO STDOUT"):
            pass
    assert node[0].is_idle()
    with pytest.raises(ZeroDivisionError), transaction.atomic(using="t_0"):
        with node[0].cursor() as cursor, cursor.copy("COPY item (value) FROM STDIN") as copy:
            copy.write_row(["a"])
            raise ZeroDivisionError
    assert node.ask("SELECT count(*) FROM t_0.item") == [(2,)]
    assert node.run(0, SHARD) == [(0,)]
    assert all_sessions_are_back(node)


def test_copy_by_execute(node: Node) -> None:
    for statement in ("COPY item TO STDOUT", "COPY item FROM STDIN"):
        with pytest.raises(ProgrammingError, match="COPY"):
            node.run(0, statement)
        assert node[0].is_idle()
        assert node.run(0, SHARD) == [(0,)]
        with pytest.raises(Error), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'x'")
            with pytest.raises(ProgrammingError, match="COPY"):
                node.run(0, statement)
        assert node.value(0) is None
    assert all_sessions_are_back(node)


def test_streams(node: Node) -> None:
    with node[0].cursor() as cursor:
        rows = cursor.stream(MANY)
        assert next(rows) == (0, 1)
        assert node.run(1, SHARD) == [(1,)]
        assert node.run(0, SHARD) == [(0,)]
        rows.close()
        assert len(list(cursor.stream(MANY))) == 500
        with pytest.raises(psycopg.Error):
            list(cursor.stream("SELECT * FROM missing"))
        with pytest.raises(SessionStateRefused):
            list(cursor.stream("SELECT set_config('a.b', 'c', false)"))
        rows = cursor.stream(MANY)
        next(rows)
        del rows
        gc.collect()
    assert node[0].is_idle()
    assert all_sessions_are_back(node)
    with transaction.atomic(using="t_0"), node[0].cursor() as cursor:
        node.run(0, "UPDATE item SET value = 'x'")
        assert list(cursor.stream("SELECT value FROM item")) == [("x",), ("x",)]
    assert node.value(0) == "x"


@pytest.mark.parametrize("in_transaction", [False, True])
def test_positions_of_errors_count_from_the_statement(node: Node, in_transaction: bool) -> None:
    statement = "SELECT shard,\n  nowhere FROM item -- ü"
    stock = psycopg.connect(**node.server.psycopg("site"), options="-c search_path=t_0")
    with stock, pytest.raises(psycopg.Error) as expected:
        stock.execute(statement)
    with pytest.raises(ProgrammingError) as caught:
        with transaction.atomic(using="t_0") if in_transaction else node[0].cursor():
            node.run(0, statement)
    cause: Any = caught.value.__cause__
    assert str(cause) == str(expected.value)
    assert cause.diag.statement_position == expected.value.diag.statement_position
    assert cause.diag.sqlstate == "42703"
    assert cause.sqlstate == "42703"


def test_statement_timeout(node: Node) -> None:
    connections["t_0"].settings_dict["OPTIONS"] = {"options": "-c statement_timeout=50"}
    with pytest.raises(OperationalError, match="statement timeout"):
        node.run(0, "SELECT pg_sleep(60)")
    assert node.run(0, SHARD) == [(0,)]
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'kept' WHERE id = 1")
        with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
            node.run(0, "SELECT pg_sleep(60)")
        node.run(0, "UPDATE item SET value = 'kept' WHERE id = 2")
    assert (node.value(0, 1), node.value(0, 2)) == ("kept", "kept")
    assert all_sessions_are_back(node)


def interrupt_when_asleep(node: Node) -> threading.Thread:
    def interrupt() -> None:
        with node.connect() as connection:
            while not connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE state = 'active'"
                " AND query LIKE '%pg_sleep(1234)' AND pid <> pg_backend_pid()"
            ).fetchall():
                pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_an_interruption_by_the_keyboard(node: Node) -> None:
    thread = interrupt_when_asleep(node)
    with pytest.raises(KeyboardInterrupt):
        node.run(0, "SELECT pg_sleep(1234)")
    thread.join()
    assert node[0].is_idle()
    assert node.run(0, SHARD) == [(0,)]
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'kept' WHERE id = 1")
        thread = interrupt_when_asleep(node)
        with pytest.raises(KeyboardInterrupt), transaction.atomic(using="t_0"):
            node.run(0, "SELECT pg_sleep(1234)")
        thread.join()
        node.run(0, "UPDATE item SET value = 'kept' WHERE id = 2")
    assert (node.value(0, 1), node.value(0, 2)) == ("kept", "kept")
    assert all_sessions_are_back(node)


def test_a_canceled_statement(node: Node) -> None:
    def cancel() -> None:
        with node.connect() as connection:
            while not connection.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE state = 'active'"
                " AND query LIKE '%pg_sleep(1235)' AND pid <> pg_backend_pid()"
            ).fetchall():
                pass

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(OperationalError, match="user request"):
        node.run(0, "SELECT pg_sleep(1235)")
    thread.join()
    assert node.run(0, SHARD) == [(0,)]
    assert all_sessions_are_back(node)


def test_a_cursor_that_outlives_its_connection(node: Node) -> None:
    cursor = node[0].cursor()
    cursor.execute("SELECT id FROM item ORDER BY id")
    node[0].close()
    assert cursor.fetchone() == (1,)
    with pytest.raises(Error):
        cursor.execute("SELECT 1")
    cursor.close()


def test_the_log_shows_the_statement_alone(node: Node) -> None:
    node.run(0, "SELECT 1")
    node[1].force_debug_cursor = True
    with transaction.atomic(using="t_1"), transaction.atomic(using="t_1"):
        node.run(1, "SELECT %s", [5])
    logged = [entry["sql"] for entry in node[1].queries_log]
    assert logged[0] == "BEGIN"
    assert logged[1].startswith('SAVEPOINT "s')
    assert logged[2] == "SELECT 5"
    assert logged[3].startswith('RELEASE SAVEPOINT "s')
    assert logged[4] == "COMMIT"
