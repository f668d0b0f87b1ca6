"""The statements of a script that share a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.operations.migrate.recorded_sql import RecordedScript, RecordedStatement

ROWS = {"effect": Effect.ROWS}
TABLE = "CREATE TABLE `t` (\n  `a` int(11)\n) ENGINE=InnoDB"


def script(*statements: tuple[str, dict[str, Any]]) -> RecordedScript:
    """Return a script: "a1" is a statement of the second operation of migration a, "a" its record.

    Each statement leads to a schema of its own, if not given otherwise.
    """
    made = []
    for number, (name, details) in enumerate(statements):
        key = ("app", name[0])
        if len(name) == 1:
            made.append(RecordedStatement(key, 9, "", records=[key], **{**ROWS, **details}))
        else:
            after = None if details.get("effect") is Effect.ROWS else f"after {number}"
            made.append(
                RecordedStatement(key, int(name[1]), "", **{"sql": "x", "after": after, **details})
            )
    return RecordedScript("before", SchemaSnapshot({"t": TABLE}), made, units=1)


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
        # Each statement on rows has a marker of its own.
        (["a0", ("a0", ROWS), ("a0", ROWS), "a"], [[0], [1], [2, 3]]),
        # A statement after which the schema is as after an earlier one cannot be told apart from
        # that.
        (["a0", ("a0", {"after": "after 0"}), "a0"], [[0], [1], [2]]),
        (["a0", ("a0", {"after": "before"}), "a0", "a"], [[0], [1, 2, 3]]),
        ([("a0", {"after": "before"}), "a0"], [[0], [1]]),
        ([("a0", {"after": "before", "sql": "ALTER TABLE t COMMENT ''"}), "a"], [[0, 1]]),
        ([("a0", {"after": "before", "sql": "TRUNCATE t"}), "a"], [[0], [1]]),
    ],
)
def test_stretches(statements: list[Any], expected: list[list[int]]) -> None:
    assert stretches(*statements) == expected


def test_rows_that_no_rollback_takes_back_are_told_of_alone() -> None:
    made = script(("a0", ROWS), ("a", {}))
    assert list(made.stretch(0)) == [0, 1]
    myisam = SchemaSnapshot({"t": TABLE.replace("InnoDB", "MyISAM")})
    assert list(replace(made, promise=myisam).stretch(0)) == [0]


@pytest.mark.parametrize(
    ("sql", "alters"),
    [
        ("ALTER TABLE `t` ADD COLUMN `b` int", True),
        ("ALTER TABLE `t` RENAME COLUMN `a` TO `b`", True),
        ("alter table t rename index x to y", True),
        ("CREATE UNIQUE INDEX `x` ON `t` (`a`)", True),
        ("DROP INDEX `x` ON `t`", True),
        ("ALTER TABLE `t` RENAME TO `u`", False),
        ("ALTER TABLE `t` ADD COLUMN b int, RENAME `u`", False),
        ("RENAME TABLE `t` TO `u`", False),
        ("CREATE TABLE `t` (`a` int, INDEX (`a`))", False),
        ("DROP TABLE `t` CASCADE", False),
        ("CREATE VIEW `x` AS SELECT `a` FROM `t`", False),
    ],
)
def test_which_tables_are_only_altered(sql: str, alters: bool) -> None:
    other = TABLE.replace("`t`", "`other`")
    before = SchemaSnapshot({"t": TABLE, "other": other, "v": "CREATE VIEW `v` AS SELECT 't'"})
    promise = SchemaSnapshot({**before.definitions, "t": TABLE.replace("int(11)", "int(10)")})
    made = replace(script(("a0", {"sql": sql}), ("a", {})), promise=promise)
    named = [name for name in ("t", "other") if name in sql]
    assert made.altered_tables(before) == (named if alters else None)


def test_what_is_altered_without_being_named_is_not_only_altered() -> None:
    before = SchemaSnapshot({"t": TABLE, "u": TABLE.replace("`t`", "`u`")})
    promise = SchemaSnapshot({**before.definitions, "u": before.definitions["u"] + " COMMENT 'x'"})
    made = replace(script(("a0", {"sql": "ALTER TABLE `t` ADD b int"})), promise=promise)
    assert made.altered_tables(before) is None
