"""A server's process keeps what it has read about each table, so sessions are closed in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connections

from sharded_orm.backends.postgresql.node import TABLES_OF_A_SCHEMA
from tests.integration.postgresql.conftest import COUNT, Node

#: Schemas of the long test, and the tables of each.
SCHEMAS, TABLES = 4096, 10
#: The limit for the memory that a process has for itself, in kB.
LIMIT = 64 * 1024


def test_a_session_is_closed_after_so_many_schemas(node: Node) -> None:
    for alias in node.aliases:
        connections[alias].close()
        connections.settings[alias]["POOL"] = {"MAX_SCHEMAS": COUNT - 1}
        del connections[alias]
    sessions = [node.session_of(number) for number in range(COUNT - 1)]
    # The same schemas again cost nothing.
    sessions += [node.session_of(number) for number in range(COUNT - 1)]
    assert len(set(sessions)) == 1
    assert node.session_of(COUNT - 1) == sessions[0]
    assert node.pool.size == 0
    assert node.session_of(0) != sessions[0]


def test_queries_over_many_schemas_count_their_tables(node: Node) -> None:
    node.pool.max_schemas = 2
    try:
        most = node.pool.max_schemas * TABLES_OF_A_SCHEMA
        for number, stays in ((most, True), (most + 2 * TABLES_OF_A_SCHEMA, False)):
            with node[0].node_cursor() as cursor:
                names = ", ".join(f'\'"s{n}"."item"\'' for n in range(number))
                cursor.execute(f"SELECT {names}")
            assert (node.pool.size == 1) is stays
    finally:
        node.pool.max_schemas = 200


def memory_of(pid: int) -> int:
    """Return the memory that a process shares with no other, in kB. Shared buffers are left out."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    total, is_private = 0, False
    for line in lines:
        word = line.split(maxsplit=1)[0]
        if not word.endswith(":"):
            # A mapping without a file, or of a file that the process may change for itself.
            is_private = line.split()[1].endswith("p")
        elif is_private and word in ("Private_Dirty:", "Private_Clean:"):
            total += int(line.split()[1])
    return total


@pytest.mark.long
def test_the_memory_of_a_process_with_thousands_of_schemas(node: Node) -> None:
    largest = 0
    try:
        for number in range(SCHEMAS):
            node.ask(
                f"CREATE SCHEMA m_{number};"
                + "".join(
                    f"CREATE TABLE m_{number}.t{n} (id bigserial PRIMARY KEY, a int, b text);"
                    f"CREATE INDEX ON m_{number}.t{n} (a);"
                    for n in range(TABLES)
                )
            )
        for number in range(SCHEMAS):
            alias = f"m_{number}"
            connections.settings[alias] = {**node.settings, "SCHEMA": alias}
            with connections[alias].cursor() as cursor:
                for n in range(TABLES):
                    cursor.execute(f"INSERT INTO t{n} (a) VALUES (1) RETURNING id")
                    cursor.execute(f"SELECT * FROM t{n} WHERE a = 1")
                    cursor.execute(f"UPDATE t{n} SET b = 'x' WHERE a = 1")
            connections[alias].close()
            for session in node.pool._open_sessions():
                if number % 10 == 0 or len(session.schemas) >= node.pool.max_schemas - 1:
                    largest = max(largest, memory_of(session.pgconn.backend_pid))
            del connections[alias], connections.settings[alias]
        assert 0 < largest < LIMIT
    finally:
        for number in range(SCHEMAS):
            node.ask(f"DROP SCHEMA IF EXISTS m_{number} CASCADE")
