"""Sums and quotients have the values and types of the database."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pytest

from sharded_orm.backends.features import MySQLFeatures, PostgreSQLFeatures, SQLiteFeatures
from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.scatter.arithmetic import (
    add,
    add_limited,
    computed_quotient,
    divider,
    duration_quotient,
    quotient,
    rounded_quotient,
    significant_quotient,
    total_of,
)


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [
        (Decimal(2), 3, "0.6667"),
        (Decimal(-2), 3, "-0.6667"),
        (Decimal(1), 8, "0.1250"),
        (Decimal("0.01"), 3, "0.003333"),
        (Decimal(1), 32000, "0.0000"),
        # Nine digits are computed, and none is left to round by.
        (Decimal("2.00000"), 3, "0.666666666"),
        (Decimal("-2.00000"), 3, "-0.666666666"),
        (Decimal("2.0000"), 3, "0.66666667"),
        (Decimal("2.000000"), 3, "0.6666666667"),
        (Decimal(2).quantize(Decimal("1E-14")), 3, "0.666666666666666666"),
        (Decimal(2).quantize(Decimal("1E-15")), 3, "0.6666666666666666667"),
    ],
)
def test_quotients_have_four_places_more(total: Decimal, count: int, expected: str) -> None:
    assert str(quotient(total, count)) == expected


def test_quotients_whose_places_are_unknown_are_refused() -> None:
    assert str(computed_quotient(Decimal("2.0000"), 3)) == "0.66666667"
    assert str(computed_quotient(2, 3)) == "0.6667"
    for refused in (
        lambda: computed_quotient(Decimal("2.00000"), 3),
        lambda: quotient(Decimal("1E-27"), 3),
        lambda: add_limited(Decimal("9" * 65), None),
        lambda: add_limited(Decimal("9" * 64), Decimal("1")),
    ):
        with pytest.raises(ScatterNotSupported):
            refused()


def test_averages_of_durations_are_rounded_once() -> None:
    assert rounded_quotient(Decimal(49999), 100000) == 0
    assert rounded_quotient(1, 2) == 1


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    # As "SELECT total::numeric / count" of PostgreSQL 15 writes them.
    [
        (Decimal(2), 3, "0.66666666666666666667"),
        (Decimal(-2), 3, "-0.66666666666666666667"),
        (Decimal(10), 3, "3.3333333333333333"),
        (7, 2, "3.5000000000000000"),
        (Decimal("0.00"), 3, "0.00000000000000000000"),
        (Decimal("0.01"), 3, "0.00333333333333333333"),
        (Decimal("123456789012345678.12"), 7, "17636684144620811.16"),
        (Decimal("1E-20"), 3, "0.0000000000000000000033333333333333333333"),
        (Decimal(20000), 10001, "1.9998000199980002"),
    ],
)
def test_quotients_have_sixteen_digits(total: Any, count: int, expected: str) -> None:
    assert format(significant_quotient(total, count), "f") == expected


def test_quotients_of_what_is_no_finite_number() -> None:
    assert significant_quotient(Decimal("NaN"), 3).is_nan()
    assert significant_quotient(Decimal("Infinity"), 3) == Decimal("Infinity")
    assert math.isnan(significant_quotient(float("nan"), 3))


def test_averages_of_days_go_over_into_seconds() -> None:
    assert duration_quotient(3, 0, 2) == datetime.timedelta(days=1, hours=12)
    assert duration_quotient(-1, 0, 7) == datetime.timedelta(seconds=-12342, microseconds=-857143)
    assert duration_quotient(1, 1, 3) == datetime.timedelta(hours=8)


def test_each_database_has_its_averages() -> None:
    assert divider(SQLiteFeatures)(10, 4) == 2.5
    assert repr(divider(MySQLFeatures)(10, 4)) == "Decimal('2.5000')"
    assert divider(MySQLFeatures, duration=True)(Decimal(10), 4) == 3
    assert repr(divider(PostgreSQLFeatures)(10, 4)) == "Decimal('2.5000000000000000')"


def test_sums() -> None:
    assert add(None, 3) == 3
    assert add(Decimal("1e100"), Decimal("1e-100")) == Decimal(
        "1" + "0" * 100 + "." + "0" * 99 + "1"
    )
    assert add(Decimal("Infinity"), Decimal("-Infinity")).is_nan()
    assert math.isnan(add(float("inf"), float("-inf")))


@pytest.mark.parametrize(("left", "right"), [("$1", "$2"), (1e308, 1e308), ([1], [2])])
def test_sums_that_are_not_those_of_the_database_are_refused(left: Any, right: Any) -> None:
    with pytest.raises(ScatterNotSupported):
        add(left, right)


def test_totals_of_distinct_values() -> None:
    assert total_of([1, 2, Decimal(4)]) == (7, 3)
    assert total_of([]) == (None, 0)
    assert repr(total_of([True])) == "(1, 1)"


@pytest.mark.parametrize("value", ["a", [1], datetime.date(2026, 1, 1)])
def test_only_numbers_have_a_total(value: Any) -> None:
    with pytest.raises(ScatterNotSupported, match="Cast"):
        total_of([value])
