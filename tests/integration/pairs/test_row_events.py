"""What a server does with row events of the old schema when it has the new one.

These facts are the reasons for the rules of ``schema_compatibility``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.services.replication import (
    LoggingServer,
    MasterPair,
    execute,
    execute_alone,
    replication_status,
)

# The facts change with the server, and not with this library.
pytestmark = pytest.mark.long

TABLE = "CREATE TABLE facts.t (id INT PRIMARY KEY, a VARCHAR(10) NOT NULL, b VARCHAR(10) NOT NULL)"


@pytest.fixture
def facts(pair: MasterPair) -> Iterator[MasterPair]:
    """Both servers have the table ``facts.t``."""
    pair.reset("facts")
    execute(pair.first, "CREATE DATABASE facts")
    execute(pair.first, TABLE)
    pair.settle()
    yield pair
    pair.reset("facts")


def error_of(replica: LoggingServer, source: LoggingServer) -> int:
    """Return the number of the error that stops a replica; 0 if it executes all of its source."""
    ((logged,),) = execute(source, "SELECT @@gtid_binlog_pos")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if number := replication_status(replica)["Last_SQL_Errno"]:
            return int(number)
        if execute(replica, "SELECT MASTER_GTID_WAIT(%s, 0.02)", (logged,)) == [(0,)]:
            return 0
    raise AssertionError("the replica neither stops nor executes all")


def written(pair: MasterPair, *statements: str) -> Any:
    """Return the row on the second server after a row was inserted on the first, in the old schema."""
    execute_alone(pair.second, *statements)
    execute(pair.first, "INSERT INTO facts.t VALUES (1, 'one', 'two')")
    pair.settle()
    (row,) = execute(pair.second, "SELECT * FROM facts.t")
    return row


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("ADD c INT NOT NULL DEFAULT 5", (1, "one", "two", 5)),
        ("ADD c INT NULL", (1, "one", "two", None)),
        ("ADD INDEX (a)", (1, "one", "two")),
        ("MODIFY a VARCHAR(10) NULL", (1, "one", "two")),
    ],
)
def test_what_is_allowed_stores_what_was_written(
    facts: MasterPair, statement: str, row: tuple[Any, ...]
) -> None:
    assert written(facts, f"ALTER TABLE facts.t {statement}") == row
    execute(facts.first, "UPDATE facts.t SET b = 'new'")
    facts.settle()
    assert execute(facts.second, "SELECT id, a, b FROM facts.t") == [(1, "one", "new")]
    execute(facts.first, "DELETE FROM facts.t")
    facts.settle()
    assert execute(facts.second, "SELECT * FROM facts.t") == []


@pytest.mark.parametrize(
    ("statements", "row"),
    [
        # Django's AddField(default=5) ends so.
        (
            ["ALTER TABLE facts.t ADD c INT NOT NULL DEFAULT 5", "ALTER TABLE facts.t ALTER c DROP DEFAULT"],
            (1, "one", "two", 0),
        ),
        (["ALTER TABLE facts.t ADD c VARCHAR(10) NOT NULL DEFAULT '' AFTER id"], (1, "one", "two", "")),
        (["ALTER TABLE facts.t DROP a"], (1, "one")),
        # No replica checks the rows that it gets.
        (["ALTER TABLE facts.t ADD CONSTRAINT c CHECK (a = 'x')"], (1, "one", "two")),
    ],
)  # fmt: skip
def test_what_is_refused_may_store_wrong_values_silently(
    facts: MasterPair, statements: list[str], row: tuple[Any, ...]
) -> None:
    """Columns are matched by position, and a missing value without a default is 0."""
    assert written(facts, *statements) == row


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("ALTER TABLE facts.t MODIFY id BIGINT", 1677),
        ("ALTER TABLE facts.t MODIFY a VARCHAR(20) NOT NULL", 1677),
        ("DROP TABLE facts.t", 1146),
        ("ALTER TABLE facts.t ADD UNIQUE (b)", 1062),
    ],
)
def test_what_is_refused_may_stop_replication(
    facts: MasterPair, statement: str, error: int
) -> None:
    execute_alone(facts.second, statement)
    execute(facts.first, "INSERT INTO facts.t VALUES (1, 'one', 'two'), (2, 'six', 'two')")
    assert error_of(facts.second, facts.first) == error
