"""Computes sums and quotients in Python as the databases do: with the same values and types."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from sharded_orm.backends.features import ShardFeatures
from sharded_orm.scatter.refusals import refuse

#: The number of decimal places that MariaDB and MySQL add to a quotient (the default of their
#: setting div_precision_increment).
QUOTIENT_PLACES = 4
# MariaDB and MySQL store the decimal places of a number in groups of nine digits.
_GROUP = 9
# If a sum has at most this many decimal places, its average does not depend on the number of
# decimal places that the single values have. If a sum has five decimal places, it does: the last
# digit of the average depends on whether the values have more than nine decimal places.
_SURE_PLACES = 4
# An average has four decimal places more than the sum, as far as the server allows: a number has at
# most 30 places on MySQL, and at most 38 on MariaDB. So if a sum has at most this number of places,
# both return the same average.
_MOST_PLACES = 26
# The maximum number of digits of a decimal number of MariaDB and MySQL. The servers replace a
# greater number by the greatest number that has 65 digits.
_MOST_DIGITS = 65
# PostgreSQL computes a quotient with at least 16 significant digits and at most 1000 decimal
# places. Its source calls these limits NUMERIC_MIN_SIG_DIGITS and NUMERIC_MAX_DISPLAY_SCALE.
_SIGNIFICANT = 16
_LARGEST_SCALE = 1000
# PostgreSQL stores a number in base 10000, so it counts its digits in groups of four.
_DIGITS = 4

_EXACT = decimal.Context(prec=200, rounding=decimal.ROUND_HALF_UP)
# The integers of SQLite are from minus this number up to this number minus 1.
_INTEGERS = 1 << 63
# A context that can compute every sum exactly: a number of PostgreSQL has up to 131072 digits before
# the decimal point and 16383 after it.
_SUMS = decimal.Context(prec=150_000, rounding=decimal.ROUND_HALF_UP)

Divide = Callable[[Any, int], Any]
"""A function that returns a sum divided by a number of values."""


def add(left: Any, right: Any) -> Any:
    """Return the sum of two partial sums, such as the sums of the rows on two shards.

    A partial sum is None if it is the sum of no values.

    :raises ScatterNotSupported: the values are not numbers, or the database would raise an error
        for their sum.
    """
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        if left.is_infinite() and right.is_infinite() and left != right:
            return Decimal("NaN")
        return _SUMS.add(left, right)
    if not all(isinstance(value, int | float | Decimal) for value in (left, right)):
        raise refuse(
            f"a sum of values of type {type(left).__name__!r}",
            "name the expression's output_field, or ask one shard",
        )
    total = left + right
    if isinstance(total, float) and math.isinf(total) and all(map(math.isfinite, (left, right))):
        raise refuse("a sum of floating-point numbers that overflows", "sum smaller numbers")
    return total


def total_of(values: Iterable[Any]) -> tuple[Any, int]:
    """Return the sum of ``values`` and the number of values. The sum is None if there are no values.

    :raises ScatterNotSupported: a value is not a number.
    """
    total, count = None, 0
    for value in values:
        if not isinstance(value, int | float | Decimal):
            raise refuse(
                f"Sum or Avg of different values of type {type(value).__name__!r}",
                "convert them to numbers (Cast), or ask one shard",
            )
        count += 1
        total = add(total, int(value) if type(value) is bool else value)
    return total, count


def add_limited(left: Any, right: Any) -> Any:
    """Return the sum of two partial sums, as :func:`add` does, for a query on MariaDB or MySQL.

    :raises ScatterNotSupported: a sum has so many digits that the server may have cut it off.
    """
    total = add(left, right)
    for value in (left, right, total):
        if isinstance(value, Decimal) and len(value.as_tuple().digits) >= _MOST_DIGITS:
            raise refuse(
                f"a sum of {_MOST_DIGITS} digits or more, which the server may cut off",
                "sum smaller numbers, or numbers with fewer decimal places",
            )
    return total


def check_sum(total: Any, features: type[ShardFeatures]) -> None:
    """Check that one database could return the sum ``total``.

    SQLite adds integers as integers of 64 bits, and raises an error if the sum is greater.

    :raises ScatterNotSupported: the sum is greater.
    """
    if (
        features.limits_sums_of_integers
        and isinstance(total, int)
        and not -_INTEGERS <= total < _INTEGERS
    ):
        raise refuse(
            "a Sum of integers that has more than 64 bits",
            "convert them to floats: Sum(Cast(…, FloatField()))",
        )


def check_quotient_places(places: int) -> None:
    """Check that a server of MariaDB or MySQL divides as this module does.

    :param places: the value of ``div_precision_increment`` in the session.
    :raises ScatterNotSupported: the server adds another number of decimal places to a quotient.
    """
    if places != QUOTIENT_PLACES:
        raise refuse(
            f"averages or quotients of a server whose div_precision_increment is {places}",
            f"set div_precision_increment to {QUOTIENT_PLACES}, its default, on all servers; or use"
            " Sum and Count, and divide in Python",
        )


def check_places(places: int, *, has_places_of_type: bool) -> None:
    """Check that the values have so few decimal places that Python can compute their average.

    The result must be the same as that of MariaDB and MySQL.

    :param places: the number of decimal places of the sum. The type of the values has as many.
    :param has_places_of_type: whether each value has as many decimal places as the type. This may
        be false for computed values.
    :raises ScatterNotSupported: the numbers have too many decimal places.
    """
    most = _MOST_PLACES if has_places_of_type else _SURE_PLACES
    if places > most:
        raise refuse(
            f"an average of {'' if has_places_of_type else 'computed '}numbers with more than"
            f" {most} decimal places",
            "use Sum and Count, and divide in Python",
        )


def quotient(total: Any, count: int) -> Any:
    """Return ``total / count`` as MariaDB and MySQL compute ``AVG``.

    If ``total`` is a Decimal, the result is a Decimal with four more decimal places. All other
    results are floats.

    :raises ScatterNotSupported: the number of decimal places depends on the server.
    """
    if not isinstance(total, Decimal):
        return float(total) / count
    places = max(0, -int(total.as_tuple().exponent))
    check_places(places, has_places_of_type=True)
    # Compute as do_div_mod() does in decimal.c of the servers. It computes the decimal places of a
    # quotient in whole groups of nine digits, and cuts off the places after the last group. Then
    # the servers round the quotient to the number of places that the result has.
    padded = places + -places % _GROUP
    computed = padded + max(0, QUOTIENT_PLACES - (padded - places))
    computed += -computed % _GROUP
    exact = Decimal(1).scaleb(-computed)
    value = _EXACT.divide(total, count).quantize(exact, decimal.ROUND_DOWN, _SUMS)
    return _SUMS.quantize(value, Decimal(1).scaleb(-places - QUOTIENT_PLACES))


def computed_quotient(total: Any, count: int) -> Any:
    """Return ``total / count`` like :func:`quotient`, as an average of computed values.

    Computed values may have a different number of decimal places than their sum, ``total``.

    :raises ScatterNotSupported: the result depends on the decimal places of the values, which are
        unknown.
    """
    if isinstance(total, Decimal):
        check_places(-int(total.as_tuple().exponent), has_places_of_type=False)
    return exact_quotient(total, count)


def exact_quotient(total: Any, count: int) -> Any:
    """Return ``total / count`` like :func:`quotient`, but as a Decimal if ``total`` is an integer."""
    return quotient(Decimal(total) if type(total) is int else total, count)


def rounded_quotient(total: Any, count: int) -> int:
    """Return ``total / count``, rounded to the nearest integer."""
    value = _EXACT.divide(Decimal(total), count)
    return int(value.to_integral_value(decimal.ROUND_HALF_UP))


def significant_quotient(total: Any, count: int) -> Any:
    """Return ``total / count`` as PostgreSQL computes ``AVG``.

    For an integer or a Decimal, the result is a Decimal with at least 16 significant digits.
    PostgreSQL counts digits in groups of four, so there may be more. All other results are floats.
    """
    if isinstance(total, float):
        return total / count
    if not isinstance(total, int | Decimal):
        # The sum is not a number. For example, it is a sum of durations, whose average PostgreSQL
        # rounds in a different way.
        raise refuse(
            f"an average of values of type {type(total).__name__!r}",
            "name the expression's output_field, or ask one shard",
        )
    total = Decimal(total)
    if not total.is_finite():
        return total
    # Do the same as select_div_scale() and div_var() in PostgreSQL's numeric.c, to get the same
    # digits as PostgreSQL.
    scale = max(0, -int(total.as_tuple().exponent))
    weight, first = _leading_group(abs(int(total.scaleb(scale, _SUMS))), scale)
    count_weight, count_first = _leading_group(count, 0)
    quotient_weight = weight - count_weight - (first <= count_first)
    places = min(max(_SIGNIFICANT - quotient_weight * _DIGITS, scale, 0), _LARGEST_SCALE)
    numerator = abs(int(total.scaleb(scale, _SUMS))) * 10**places
    denominator = count * 10**scale
    digits, remainder = divmod(numerator, denominator)
    digits += 2 * remainder >= denominator
    return Decimal(-digits if total < 0 else digits).scaleb(-places, _SUMS)


def _leading_group(number: int, scale: int) -> tuple[int, int]:
    """Return the position and the value of the first group of digits of ``number / 10**scale``.

    Digits are grouped by four, starting at the decimal point. The group before the point has
    position 0, and the group after it has position -1.
    """
    # Append zeros until the digits after the decimal point can be divided into groups of four.
    padding = -scale % _DIGITS
    number *= 10**padding
    if number == 0:
        return 0, 0
    groups = (len(str(number)) - 1) // _DIGITS
    return groups - (scale + padding) // _DIGITS, number // 10 ** (groups * _DIGITS)


def duration_quotient(days: int, microseconds: int, count: int) -> datetime.timedelta:
    """Return the average of durations as PostgreSQL computes it.

    PostgreSQL stores the days and the microseconds of a duration separately.

    :param days: the sum of the days.
    :param microseconds: the sum of the microseconds, without the days.
    :param count: the number of durations.
    """
    # To get the same result, round as interval_div() in PostgreSQL's timestamp.c does.
    whole = int(days / count)
    rest = round((days / count - whole) * 86400 * 1e6) / 1e6
    return datetime.timedelta(days=whole, microseconds=round(microseconds / count + rest * 1e6))


def divider(
    features: type[ShardFeatures], *, duration: bool = False, has_places_of_type: bool = True
) -> Divide:
    """Return a function that divides a sum by a count, as the database does to compute ``AVG``.

    :param features: the features of the database.
    :param duration: whether the values are durations.
    :param has_places_of_type: whether all values have as many decimal places as their type.
    """
    if features.exact_averages == "significant":
        return significant_quotient
    # MySQL and MariaDB have no type for durations. Django stores microseconds there, and casts their
    # average to an integer.
    if duration and features.averages_durations_to_integers:
        return rounded_quotient
    if features.computes_beyond_types and not has_places_of_type:
        return computed_quotient
    return exact_quotient if features.exact_averages == "fixed" else quotient
