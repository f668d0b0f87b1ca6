"""Aggregates merged from partial ones have the value and type of one database's."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from sharded_orm.backends.features import SQLiteFeatures
from sharded_orm.scatter.comparison import Column, SQLiteComparison
from sharded_orm.scatter.partial_aggregates import Merger, Partial


def merge(rows: list[list[Any]], *partials: Partial) -> list[Any]:
    width = len(rows[0]) - 1
    comparison = SQLiteComparison([Column(None, None, "plain")] * width, range(width))
    merger = Merger(partials, comparison, SQLiteFeatures)
    whole = list(rows[0])
    for row in rows[1:]:
        merger.add(whole, row)
    merger.finish(whole)
    return whole[:-1]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("count", [1, 2, 0], 3),
        ("sum", [None, 2, None, 5], 7),
        ("sum", [None, None], None),
        ("sum", [Decimal("0.10"), Decimal("0.2")], Decimal("0.30")),
        ("min", [None, 3, 2, None], 2),
        ("max", [None, 3, 9, None], 9),
        ("max", [None, None], None),
    ],
)
def test_merging(kind: str, values: list[Any], expected: Any) -> None:
    rows = [[value, shard] for shard, value in enumerate(values)]
    assert merge(rows, Partial(0, kind, (0,))) == [expected]


def test_avg_is_sum_by_count() -> None:
    rows = [[1.0, 4, 4, 0], [None, None, 0, 1], [9.0, 9, 1, 2]]
    assert merge(rows, Partial(0, "avg", (1, 2)))[0] == 13 / 5


def test_a_default_stands_where_all_is_null() -> None:
    default = Partial(0, "sum", (1,))
    assert merge([[7, None, 0], [7, None, 1]], default)[0] == 7
    assert merge([[7, None, 0], [3, 3, 1]], default)[0] == 3


def test_sums_of_many_digits_are_exact() -> None:
    digits = Decimal("1" * 40)
    rows = [[digits, 0], [Decimal("0.5"), 1]]
    assert merge(rows, Partial(0, "sum", (0,))) == [Decimal("1" * 40 + ".5")]
