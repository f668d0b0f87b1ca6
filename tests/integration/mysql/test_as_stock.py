"""A program on two aliases sees the same results as with Django's own backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import Error, connections, transaction
from django.db.transaction import TransactionManagementError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharded_orm.exceptions import SessionStateRefused
from tests.integration.mysql.conftest import Node

STATEMENTS = [
    "SELECT id, shard, value FROM item ORDER BY id",
    "INSERT INTO item (value) VALUES ('a')",
    "INSERT INTO item (id, value) VALUES (1, 'duplicate')",
    "INSERT INTO item (shard) VALUES (NULL)",
    "UPDATE item SET value = 'b' WHERE id = 1",
    "UPDATE item SET value = concat(coalesce(value, ''), '+') WHERE id = 2",
    "DELETE FROM item WHERE id > 2",
    "SELECT value FROM item WHERE id = 1 FOR UPDATE",
    "SELECT * FROM missing",
    "SELEKT",
    "CREATE TABLE IF NOT EXISTS extra (id int)",
    "DROP TABLE IF EXISTS extra",
    "INSERT INTO extra VALUES (1)",
    "SET @mine = DATABASE()",
    "SELECT @mine",
    "SELECT DATABASE()",
    "SELECT @@autocommit",
    "SET foreign_key_checks = 0",
    "SELECT @@foreign_key_checks",
    "SET foreign_key_checks = 1",
    "CREATE TEMPORARY TABLE temporary_one (id int)",
    "SELECT * FROM temporary_one",
    "SELECT GET_LOCK(CONCAT(DATABASE(), '_lock'), 0)",
    "SELECT 1; SELECT 2",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT mine",
    "ROLLBACK TO SAVEPOINT mine",
    "RELEASE SAVEPOINT mine",
    "SAVEPOINT yours",
    "RELEASE SAVEPOINT yours",
    "SELECT LAST_INSERT_ID()",
    "TRUNCATE item",
]
ACTIONS = ["enter", "leave", "fail", "autocommit_off", "autocommit_on", "commit", "rollback",
           "close", "request_end"]  # fmt: skip

steps = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.sampled_from(STATEMENTS), st.sampled_from(ACTIONS), st.just("enter")),
    ),
    max_size=25,
)


class Program:
    """Runs steps on two aliases and records all visible results."""

    def __init__(self, aliases: list[str]) -> None:
        self.aliases = aliases
        self.blocks: list[list[Any]] = [[], []]

    def run(self, program: list[tuple[int, str]]) -> list[Any]:
        seen = [self.observe(number, step) for number, step in program]
        for number in (0, 1):
            while self.blocks[number]:
                seen.append(self.observe(number, "leave"))
            connections[self.aliases[number]].close()
            seen.append(self.observe(number, STATEMENTS[0]))
            connections[self.aliases[number]].close()
        return seen

    def observe(self, number: int, step: str) -> Any:
        try:
            return self.step(number, step)
        except SessionStateRefused:
            return "refused"
        except Error as exc:
            return type(exc).__name__, exc.args[0] if exc.args else None
        except TransactionManagementError as exc:
            return type(exc).__name__, str(exc)

    def step(self, number: int, step: str) -> Any:
        alias = self.aliases[number]
        connection = connections[alias]
        blocks = self.blocks[number]
        if step == "enter":
            block = transaction.atomic(using=alias)
            block.__enter__()
            blocks.append(block)
        elif step in ("leave", "fail"):
            if blocks:
                exc = ZeroDivisionError() if step == "fail" else None
                blocks.pop().__exit__(type(exc) if exc else None, exc, None)
        elif step == "autocommit_off":
            connection.set_autocommit(False)
        elif step == "autocommit_on":
            connection.set_autocommit(True)
        elif step == "commit":
            connection.commit()
        elif step == "rollback":
            connection.rollback()
        elif step == "close":
            connection.close()
        elif step == "request_end":
            connection.close_if_unusable_or_obsolete()
        else:
            with connection.cursor() as cursor:
                cursor.execute(step)
                rows = cursor.fetchall() if cursor.description else None
                return rows, cursor.rowcount
        return None


@pytest.fixture
def stock(node: Node) -> Iterator[list[str]]:
    aliases = ["s_2", "s_3"]
    for alias in aliases:
        connections.settings[alias] = {
            **node.settings, "ENGINE": "django.db.backends.mysql", "NAME": f"t_{alias[-1]}",
        }  # fmt: skip
    yield aliases
    for alias in aliases:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


def reset(node: Node, shift: int) -> None:
    for number in (0, 1):
        schema = f"t_{number + shift}"
        node.ask(f"DROP TABLE IF EXISTS {schema}.extra")
        node.ask(f"TRUNCATE {schema}.item")
        node.ask(f"INSERT INTO {schema}.item (id, shard) VALUES (1, {number}), (2, {number})")
        node.ask(f"ALTER TABLE {schema}.item ALTER shard SET DEFAULT {number}")


def comparable(value: Any) -> Any:
    """Names of the schemas differ by two."""
    text = repr(value)
    return text.replace("t_2", "t_0").replace("t_3", "t_1")


def test_every_program_sees_the_same(
    node: Node, stock: list[str], pytestconfig: pytest.Config
) -> None:
    many = pytestconfig.getoption("--long")

    @settings(
        max_examples=600 if many else 60,
        deadline=None,
        derandomize=not many,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps)
    def same(program: list[tuple[int, str]]) -> None:
        for alias in (*node.aliases, *stock):
            # New connections, as programs may leave Django's state in disorder.
            connections[alias].close()
            del connections[alias]
        reset(node, 0)
        reset(node, 2)
        ours = Program(["t_0", "t_1"]).run(program)
        theirs = Program(stock).run(program)
        for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            if mine == "refused":
                # A documented difference; later steps may differ as well.
                break
            assert comparable(mine) == comparable(its), (index, program[index : index + 1])
        assert node.pool.size == node.pool.idle
        # The idle sessions are in no transaction: their writes are visible at once.
        for session in node.pool._idle[:]:
            assert session.fetch_one(b"SELECT @@in_transaction, @@autocommit") == (0, 1)
            session.drain()
        with contextlib.suppress(IndexError):
            assert all(row[1] == 0 for row in node.ask("SELECT * FROM t_0.item"))

    same()
