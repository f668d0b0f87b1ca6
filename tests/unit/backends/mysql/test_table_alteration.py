from __future__ import annotations

import pytest

from sharded_orm.backends.mysql.table_alteration import alteration, demands

TAIL = "ENGINE=InnoDB DEFAULT CHARSET=utf8mb4"
OLD = ["`id` bigint(20) NOT NULL", "`a` varchar(5) NOT NULL", "PRIMARY KEY (`id`)"]


def table(*parts: str, tail: str = TAIL) -> str:
    return "CREATE TABLE `t` (\n  " + ",\n  ".join(parts) + f"\n) {tail}"


@pytest.mark.parametrize(
    ("present", "changes"),
    [
        ([*OLD[:2], "`b` int(11) NOT NULL DEFAULT 5", OLD[2]], "DROP COLUMN `b`"),
        ([*OLD, "KEY `by_a` (`a`)"], "DROP INDEX `by_a`"),
        ([*OLD, "CONSTRAINT `some` CHECK (`id` > 1)"], "DROP CONSTRAINT `some`"),
        ([OLD[0], "`a` varchar(5) DEFAULT NULL", OLD[2]], "MODIFY COLUMN `a` varchar(5) NOT NULL"),
        ([OLD[0], "`a` varchar(5) NOT NULL COMMENT 'x, y'", OLD[2]], "MODIFY COLUMN `a` varchar(5) NOT NULL"),
    ],
)  # fmt: skip
def test_what_was_added_is_dropped(present: list[str], changes: str) -> None:
    assert alteration("`t`", table(*present), table(*OLD)) == f"ALTER TABLE `t` {changes}"


def test_what_was_dropped_is_added() -> None:
    wanted = table(*OLD, "UNIQUE KEY `one` (`a`)", tail=f"{TAIL} COMMENT='old'")
    assert alteration("`t`", table(*OLD), wanted) == (
        "ALTER TABLE `t` ADD UNIQUE KEY `one` (`a`), COMMENT = '' " + f"{TAIL} COMMENT='old'"
    )


@pytest.mark.parametrize(
    "present",
    [
        [OLD[0], OLD[2]],  # a column is missing
        [OLD[0], "`a` varchar(3) NOT NULL", OLD[2]],
        [OLD[0], "`b` varchar(5) NOT NULL", OLD[2]],
        [OLD[1], OLD[0], OLD[2]],
        [OLD[0], "`new` int(11) DEFAULT NULL", *OLD[1:]],
    ],
)
def test_no_values_are_made_up(present: list[str]) -> None:
    assert alteration("`t`", table(*present), table(*OLD)) is None


def test_null_may_have_become_another_value() -> None:
    wanted = table(OLD[0], "`a` varchar(5) DEFAULT NULL", OLD[2])
    assert alteration("`t`", table(*OLD), wanted) is None


def test_demands_are_what_only_one_definition_refuses() -> None:
    other = table(OLD[0], "`a` varchar(5) DEFAULT NULL", OLD[2])
    mine = table(
        *OLD, "UNIQUE KEY `one` (`a`)", "CONSTRAINT `some` CHECK (`id` > 1)", "KEY `x` (`a`)"
    )
    assert demands(mine, other) == ["column 'a'", "unique key 'one'", "constraint 'some'"]
    assert demands(mine, mine) == []
