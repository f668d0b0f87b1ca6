"""Values compare as PostgreSQL compares them."""

from __future__ import annotations

import datetime
import uuid
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.postgres.fields import ArrayField
from django.db import models

from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.scatter.comparison import Column, OrderKey
from sharded_orm.scatter.ranked_comparison import RankedComparison

NAN = float("nan")


def comparison(field: Any, *, summed: bool = False, reads_utc: bool = True) -> RankedComparison:
    plain = isinstance(field, models.IntegerField | models.FloatField | models.DurationField)
    column = Column("t", "c", "plain" if plain else "text", None, field)
    return RankedComparison([column], [0], [0] if summed else [], reads_utc=reads_utc)


@pytest.mark.parametrize(
    "rising",
    [
        [float("-inf"), -1.5, 0.0, 2.0, float("inf"), NAN],
        [Decimal("-Infinity"), Decimal(-1), Decimal("0.5"), Decimal("Infinity"), Decimal("NaN")],
        [False, True],
        [datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)],
        [uuid.UUID(int=1), uuid.UUID(int=2**100)],
        [b"", b"a", memoryview(b"b")],
    ],
)
def test_values_that_python_compares(rising: list[Any]) -> None:
    compared = comparison(models.FloatField())
    for low, high in pairwise(rising):
        low_row, high_row = [low, 0, True], [high, 0, True]
        assert compared.ordered(low_row, 0) < compared.ordered(high_row, 0)
        assert not compared.ordered(high_row, 0) < compared.ordered(low_row, 0)


def test_equal_numbers_are_one_group() -> None:
    identity = comparison(models.FloatField()).identity([0])
    assert len({identity([value, 0, True]) for value in (NAN, float("nan"), 0.0, -0.0)}) == 2


def test_floats_without_their_last_digits_are_refused() -> None:
    compared = comparison(models.FloatField())
    with pytest.raises(ScatterNotSupported, match="extra_float_digits"):
        compared.ordered([1.5, 0, False], 0)


def test_values_of_other_types_than_declared_are_refused() -> None:
    aware = datetime.time(1, tzinfo=datetime.UTC)
    for value in ("text", [1], {}, aware, datetime.timedelta(1)):
        with pytest.raises(ScatterNotSupported, match="output_field"):
            comparison(models.IntegerField()).normal([value, 0], 0)
    with pytest.raises(ScatterNotSupported, match="output_field"):
        comparison(models.TextField()).text([[1], 0], 0)


def test_ranks_decide() -> None:
    compared = comparison(models.TextField())
    assert compared.weights == ()
    compared.equality_ranks[0] = compared.order_ranks[0] = {"a": 1, "A": 1, "b": 2}
    identity, key = compared.identity([0]), compared.order([OrderKey(0, False, False)])
    assert identity(["a", 0]) == identity(["A", 1])
    assert [row[0] for row in sorted([("b", 0), (None, 1), ("A", 2)], key=key)] == ["A", "b", None]


def test_values_that_the_driver_converts_are_selected_as_text() -> None:
    compared = comparison(ArrayField(models.TextField()))
    assert compared.weights == ("CAST(c0 AS text) AS w0",)
    assert compared.text([["x"], 0, "{x}"], 0) == "{x}"
    whole = [["x"], 0, "{x}"]
    compared.carry(0, [["y"], 1, "{y}"], whole)
    assert whole == [["y"], 0, "{y}"]


def test_times_of_other_zones_are_ranked() -> None:
    assert not comparison(models.DateTimeField(), reads_utc=True).ranked
    assert comparison(models.DateTimeField(), reads_utc=False).ranked


def test_durations_are_compared_and_added_by_their_parts() -> None:
    compared = comparison(models.DurationField(), summed=True)
    month, days = [datetime.timedelta(30), 0, [1, 0, 0]], [datetime.timedelta(30), 0, [0, 30, 0]]
    assert compared.normal(month, 0) == compared.normal(days, 0)
    whole: list[Any] = [None, 0, None]
    compared.add(0, days, whole)
    compared.add(0, [None, 1, None], whole)
    compared.add(0, [datetime.timedelta(0, 0, 1), 2, [0, 0, 1]], whole)
    assert whole == [datetime.timedelta(30, 0, 1), 0, [0, 30, 1]]
    with pytest.raises(ScatterNotSupported, match="months"):
        compared.add(0, month, whole)
