"""Reads of a node that are sent first, and received when other nodes were read."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError

from sharded_orm.exceptions import SessionStateRefused
from tests.integration.mysql.conftest import Node

_READ = (
    "SELECT shard FROM t_0.item WHERE id = %s UNION ALL SELECT shard FROM t_1.item WHERE id = %s"
)


def _session(cursor: Any) -> int:
    return int(cursor._session.raw.thread_id())


def test_a_session_serves_many_reads(node: Node) -> None:
    for _ in range(3):
        with node[0].node_cursor() as cursor, node[0].node_cursor() as other:
            for each in (cursor, other):
                each.send(_READ, [1, 2])
            for each in (other, cursor):
                each.receive()
                assert list(each.fetchall()) == [(0,), (1,)]
            cursor.execute("SELECT 1")
            assert list(cursor.fetchall()) == [(1,)]
    assert node.pool.size == 2


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_lost_session_is_replaced(node: Node, moment: str) -> None:
    with node[0].node_cursor() as cursor:
        session, retries = _session(cursor), node.pool.stats.retries
        if moment == "before":
            node.kill(session)
            cursor.send(_READ, [1, 2])
        else:
            cursor.send("SELECT SLEEP(0.5)")
            node.kill(session)
        cursor.receive()
        assert len(cursor.fetchall()) == (2 if moment == "before" else 1)
        assert _session(cursor) != session
    assert node.pool.stats.retries == retries + 1


def test_a_write_is_not_repeated(node: Node) -> None:
    with (
        pytest.raises(OperationalError),
        node[0].wrap_database_errors,
        node[0].node_cursor() as cursor,
    ):
        node.kill(_session(cursor))
        cursor.send("UPDATE t_0.item SET value = 'x'")
        cursor.receive()
    assert node.value(0) is None


def test_an_error_of_the_statement_leaves_the_session_usable(node: Node) -> None:
    with node[0].node_cursor() as cursor:
        session = _session(cursor)
        cursor.send("SELECT 1 FROM t_0.nowhere")
        with pytest.raises(ProgrammingError, match="nowhere"), node[0].wrap_database_errors:
            cursor.receive()
        cursor.send(_READ, [1, 2])
        cursor.receive()
        assert list(cursor.fetchall()) == [(0,), (1,)]
        assert _session(cursor) == session
        with pytest.raises(SessionStateRefused, match="plain"):
            cursor.send("USE t_1")


def test_an_answer_that_nobody_reads_ends_with_its_session(node: Node) -> None:
    with node[0].node_cursor() as cursor:
        session = _session(cursor)
        cursor.send(_READ, [1, 2])
    assert node.run(0, "SELECT shard FROM item WHERE id = 1") == [(0,)]
    assert node.session_of(0) != session


def test_a_statement_never_gets_the_answer_to_another(node: Node) -> None:
    with node[0].node_cursor() as cursor:
        with pytest.raises(ProgrammingError, match="no statement"), node[0].wrap_database_errors:
            cursor.receive()
        cursor.send(_READ, [1, 2])
        for run in (cursor.execute, cursor.send):
            with (
                pytest.raises(ProgrammingError, match="not received"),
                node[0].wrap_database_errors,
            ):
                run("SELECT 7")
        cursor.receive()
        assert list(cursor.fetchall()) == [(0,), (1,)]
        cursor.execute("SELECT 7")
        assert list(cursor.fetchall()) == [(7,)]


def test_only_cursors_that_fetch_all_rows_send_ahead(node: Node) -> None:
    with node[0].node_cursor(stream=True) as cursor:
        assert not hasattr(cursor, "send")
