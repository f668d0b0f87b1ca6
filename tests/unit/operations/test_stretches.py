"""Which statements of a script the journal is told of at once."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.operations.migrate.script import Script, Statement

ROWS = {"effect": Effect.ROWS}


def script(*statements: tuple[str, dict[str, Any]]) -> Script:
    """Statements by their operation, such as "a1" for the second operation of migration a; "a" for its record.

    Each leaves a schema of its own, unless told otherwise.
    """
    made = []
    for number, (name, details) in enumerate(statements):
        key = ("app", name[0])
        if len(name) == 1:
            made.append(Statement(key, 9, "", records=[key], **{**ROWS, **details}))
        else:
            after = None if details.get("effect") is Effect.ROWS else f"after {number}"
            made.append(Statement(key, int(name[1]), "", **{"sql": "x", "after": after, **details}))
    return Script("before", SchemaSnapshot({}), made, units=1)


def stretches(*statements: Any) -> list[list[int]]:
    made = script(*((one, {}) if isinstance(one, str) else one for one in statements))
    found, index = [], 0
    while index < len(made.statements):
        found.append(list(made.stretch(index)))
        index = found[-1][-1] + 1
    return found


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        # An operation, and the record after the last one of a migration.
        (["a0", "a0", "a"], [[0, 1, 2]]),
        (["a0", "a1", "a1", "a"], [[0], [1, 2, 3]]),
        (["a0", "a", "b0", "b"], [[0, 1], [2, 3]]),
        (["a", "b0"], [[0], [1]]),
        # Rows are told of by a marker, each for itself.
        (["a0", ("a0", ROWS), ("a0", ROWS), "a"], [[0], [1], [2, 3]]),
        # What leaves no other schema than some statement before it cannot be told from that.
        (["a0", ("a0", {"after": "after 0"}), "a0"], [[0], [1], [2]]),
        (["a0", ("a0", {"after": "before"}), "a0", "a"], [[0], [1, 2, 3]]),
        ([("a0", {"after": "before"}), "a0"], [[0], [1]]),
        ([("a0", {"after": "before"}), "a"], [[0, 1]]),
    ],
)
def test_stretches(statements: list[Any], expected: list[list[int]]) -> None:
    assert stretches(*statements) == expected
