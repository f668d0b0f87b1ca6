"""After an error in a transaction, a shard's alias is where Django's own backend would be."""

from __future__ import annotations

import pytest
from django.db import Error, InternalError, OperationalError, ProgrammingError, transaction

from tests.integration.postgresql.conftest import Node

BROKEN = ["SELEC 1", "SELECT 'open", "SELECT * FROM missing", "SELECT 1 / 0"]


@pytest.mark.parametrize("statement", BROKEN)
def test_an_error_in_a_savepoint_loses_nothing_of_the_outer_block(
    node: Node, statement: str
) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "INSERT INTO item (id, value) VALUES (10, 'outer')")
        with pytest.raises(Error), transaction.atomic(using="t_0"):
            node.run(0, statement)
        node.run(0, "INSERT INTO item (id, value) VALUES (11, 'later')")
    assert node.run(0, "SELECT id FROM item WHERE id >= 10 ORDER BY id") == [(10,), (11,)]


def test_a_connection_is_not_usable_while_its_transaction_has_failed(node: Node) -> None:
    """Django's TestCase asks before it checks constraints."""
    with transaction.atomic(using="t_0"):
        assert node[0].is_usable()
        with pytest.raises(Error), transaction.atomic(using="t_0"):
            with pytest.raises(Error):
                node.run(0, "SELECT * FROM missing")
            assert not node[0].is_usable()
            raise Error
        assert node[0].is_usable()
        node.run(0, "UPDATE item SET value = 'later' WHERE id = 1")
    assert node.value(0) == "later"


@pytest.mark.parametrize("statement", BROKEN)
def test_an_error_in_a_savepoint_that_comes_first(node: Node, statement: str) -> None:
    with transaction.atomic(using="t_0"):
        with pytest.raises(Error), transaction.atomic(using="t_0"):
            node.run(0, statement)
        node.run(0, "INSERT INTO item (id, value) VALUES (10, 'later')")
    assert node.run(0, "SELECT id FROM item WHERE id >= 10") == [(10,)]


# A text that ends inside of a literal is refused before it is sent.
@pytest.mark.parametrize("statement", [text for text in BROKEN if "open" not in text])
def test_after_an_error_that_comes_first_the_transaction_has_failed(
    node: Node, statement: str
) -> None:
    with transaction.atomic(using="t_0"):
        with pytest.raises(Error):
            node.run(0, statement)
        with pytest.raises(InternalError, match="transaction is aborted"):
            node.run(0, "INSERT INTO item (id) VALUES (10)")
    assert node.run(0, "SELECT id FROM item WHERE id >= 10") == []


def test_a_released_savepoint_that_waits_is_forgotten_after_an_error(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "INSERT INTO item (id) VALUES (10)")
        with pytest.raises(ProgrammingError), transaction.atomic(using="t_0"):
            with transaction.atomic(using="t_0"):
                node.run(0, "INSERT INTO item (id) VALUES (11)")
            node.run(0, "SELEC 1")
        node.run(0, "INSERT INTO item (id) VALUES (12)")
    assert node.run(0, "SELECT id FROM item WHERE id >= 10 ORDER BY id") == [(10,), (12,)]


def test_a_fetch_that_fails_in_a_savepoint_loses_nothing(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "INSERT INTO item (id) VALUES (10)")
        with node[0].chunked_cursor() as cursor:
            cursor.execute("SELECT 1 / (3 - n) FROM generate_series(1, 5) n")
            with pytest.raises(Error), transaction.atomic(using="t_0"):
                cursor.fetchmany(5)
    assert node.run(0, "SELECT id FROM item WHERE id >= 10") == [(10,)]


def test_a_statement_alone_does_not_run_on_another_session_after_a_loss(node: Node) -> None:
    node.run(0, "SET search_path TO t_1")
    ((pid,),) = node.run(0, "SELECT pg_backend_pid()")
    node.ask(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(Error):
        node.run(0, "SELECT 1")
    with pytest.raises(OperationalError, match="was lost"):
        node.run(0, "VACUUM item")


@pytest.mark.parametrize(
    "body",
    [
        "BEGIN PERFORM 1; -- note\n SET statement_timeout = '7s'; END",
        "BEGIN /* x */ SET statement_timeout = '7s'; END",
        "BEGIN EXECUTE $q$SET statement_timeout = '7s'$q$; END",
    ],
)
def test_a_setting_made_by_do_does_not_reach_other_aliases(node: Node, body: str) -> None:
    node.run(0, f"DO $$ {body} $$")
    assert node.run(1, "SHOW statement_timeout") == [("0",)]
