"""What a statement finds in the schema of its alias, whatever the session has served before."""

from __future__ import annotations

import psycopg
import pytest
from django.db import ProgrammingError, transaction

from sharded_orm.exceptions import SessionStateRefused
from tests.integration.postgresql.conftest import COUNT, Node


@pytest.mark.parametrize("in_transaction", [False, True])
def test_tables_of_public_are_not_seen(node: Node, in_transaction: bool) -> None:
    """A table that is missing in a shard must not be found elsewhere."""
    node.ask("CREATE TABLE public.stray (i int)")
    try:
        with pytest.raises(ProgrammingError, match='"stray" does not exist'):
            if in_transaction:
                with transaction.atomic(using="t_0"):
                    node.run(0, "SELECT 1")
                    node.run(0, "SELECT * FROM stray")
            else:
                node.run(0, "SELECT * FROM stray")
    finally:
        node.ask("DROP TABLE public.stray")


def test_schemas_of_different_shapes(node: Node) -> None:
    """Plans that the server has prepared for another schema would fail, or read a wrong column."""
    node.ask("ALTER TABLE t_1.item DROP COLUMN value")
    node.ask("ALTER TABLE t_2.item ADD COLUMN more int DEFAULT 7")
    node.ask("ALTER TABLE t_3.item ALTER COLUMN shard TYPE text")
    expected = {0: (1, 0, None), 1: (1, 1), 2: (1, 2, None, 7), 3: (1, "3", None)}
    sessions = set()
    for _ in range(6):  # psycopg prepares a statement at its sixth execution.
        for number in range(COUNT):
            sql = "SELECT * FROM item WHERE id = %s"
            assert node.run(number, sql, [1]) == [expected[number]]
            with node[number].cursor() as cursor:
                cursor.cursor.executemany(sql, [[1]], returning=True)
                assert cursor.fetchall() == [expected[number]]
                assert list(cursor.stream(sql, [1])) == [expected[number]]
            with node[number].chunked_cursor() as cursor:
                cursor.execute(sql, [1])
                assert cursor.fetchall() == [expected[number]]
            sessions.add(node.session_of(number))
    assert len(sessions) == 1


def test_a_function_of_a_shared_schema_reads_the_tables_of_each_shard(node: Node) -> None:
    """If a column has another type on another shard, there is an error and no wrong value."""
    node.ask("CREATE SCHEMA IF NOT EXISTS extensions")
    node.ask(
        "CREATE FUNCTION extensions.shard_of_item() RETURNS text LANGUAGE plpgsql AS $$"
        " DECLARE found record; BEGIN SELECT * INTO found FROM item LIMIT 1;"
        " RETURN found.shard; END $$"
    )
    try:
        for _ in range(2):
            for number in range(COUNT):
                assert node.run(number, "SELECT shard_of_item()") == [(str(number),)]
        node.ask("ALTER TABLE t_3.item ALTER COLUMN shard TYPE bigint")
        with pytest.raises(ProgrammingError) as caught:
            node.run(3, "SELECT shard_of_item()")
        assert isinstance(caught.value.__cause__, psycopg.errors.DatatypeMismatch)
        # A function of the shard itself has plans of its own.
        ((definition,),) = node.ask(
            "SELECT pg_get_functiondef('extensions.shard_of_item'::regproc)"
        )
        for number in range(COUNT):
            node.run(number, definition.replace("extensions.", f"t_{number}."))
            assert node.run(number, "SELECT shard_of_item()") == [(str(number),)]
    finally:
        node.ask("DROP FUNCTION extensions.shard_of_item()")


def test_the_version_of_the_server_outlives_its_sessions(node: Node) -> None:
    """The driver says 0 for a dead session, and Django would take the server for an old one."""
    node.kill(node.session_of(0))
    assert node[0].pg_version == node.admin.info.server_version


def test_a_cursor_of_the_node_takes_plain_statements_only(node: Node) -> None:
    """It has no schema, and what it left in a session would reach the shards."""
    pins = node.pool.stats.pins
    with node[0].node_cursor() as cursor:
        for sql in ("SET work_mem = '2MB'", "SELECT pg_advisory_lock(1)", "VACUUM", "COMMIT"):
            with pytest.raises(SessionStateRefused, match="plain statements only"):
                cursor.execute(sql)
        cursor.execute('SELECT count(*) FROM "t_0"."item"')
        assert cursor.fetchone() == (2,)
    assert node.pool.stats.pins == pins
