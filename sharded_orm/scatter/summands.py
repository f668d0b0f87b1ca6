"""Refuses sums and averages that a server computes with more digits than it sends.

Each shard sends the sum of its own rows, and the merge adds these sums. In MariaDB and MySQL, the
type of an expression has a number of decimal places. In some cases, these servers add values with
more places, and round the sum to the places of its type when they send it. Then the sum of the
rounded sums may differ from the rounded sum of all rows, so the query is refused. The cases are:

- Quotients of decimal numbers are added with at least nine decimal places, but their sum is sent
  with only four places more than the dividend has. A ``Cast()`` to a ``FloatField`` does not help:
  Django writes it as ``x + 0.0``, which is a decimal number if ``x`` is one.
- Floats that were rounded to some places, or converted from texts, are added with all their digits.
  But their sum and their average are sent with few places.
- ``COALESCE(AVG(x), 0e0)`` is a float, because the default is one. So the average is sent with all
  its digits, and not with the places of a decimal average.
- The sum of durations is cast to whole microseconds, so parts of microseconds are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models.expressions import (
    Case,
    Col,
    Combinable,
    CombinedExpression,
    Exists,
    ExpressionWrapper,
    Func,
    Subquery,
    Value,
    When,
)
from django.db.models.functions import (
    Abs,
    Cast,
    Ceil,
    Coalesce,
    Floor,
    Greatest,
    Least,
    Length,
    NullIf,
    Ord,
    Round,
)
from django.db.models.functions import math as functions
from django.db.models.lookups import Lookup
from django.db.models.sql.where import WhereNode

from sharded_orm.backends.features import ShardFeatures
from sharded_orm.scatter.arithmetic import QUOTIENT_PLACES, check_places
from sharded_orm.scatter.comparison import column_of, has_field
from sharded_orm.scatter.refusals import parts_of, refuse

_EXACT_FIELDS = (
    models.IntegerField,
    models.AutoField,
    models.DecimalField,
    models.BooleanField,
    models.DurationField,
)
_NUMBERS = (*_EXACT_FIELDS, models.FloatField)
_NO_NUMBERS = (models.BooleanField, models.DurationField)
_TEXTS = (models.CharField, models.TextField, models.JSONField)
_ROUNDED = (Round, Ceil, Floor)
_SAME_PLACES = (Combinable.ADD, Combinable.SUB, Combinable.MUL)
# Expressions whose value is that of one of their operands, or (Abs) the operand's absolute value.
_CHOICES = (ExpressionWrapper, Coalesce, Case, When, Greatest, Least, NullIf, Abs)
# The values of these functions are floats, whatever their arguments are.
_FLOAT_FUNCTIONS = (
    functions.ACos,
    functions.ASin,
    functions.ATan,
    functions.ATan2,
    functions.Cos,
    functions.Cot,
    functions.Degrees,
    functions.Exp,
    functions.Ln,
    functions.Log,
    functions.Pi,
    functions.Power,
    functions.Radians,
    functions.Random,
    functions.Sin,
    functions.Sqrt,
    functions.Tan,
)
# MariaDB and MySQL send a quotient with four decimal places more than its dividend has. With these
# places, the quotient is exact if 10,000 can be divided by its divisor without a remainder. For
# example, 1 / 8 is 0.1250, because 10,000 / 8 is 1250.
_EXACTLY_DIVISIBLE = 10_000
# The largest number of decimal places of a dividend for which a quotient counts as sent exactly. If
# a dividend has more places, the quotient might exceed MySQL's limit of 30 places.
_MOST_DIVIDEND_PLACES = 22


def is_number(expression: Any) -> bool:
    """Whether the values of ``expression`` are numbers, durations or booleans.

    This is decided by the expression's ``output_field``.
    """
    field = column_of(expression).field
    if field is not None:
        return isinstance(field, _NUMBERS)
    # Django cannot infer the type of a computation with numbers of two types. So look at the
    # columns in the computation.
    return all(is_number(part) for part in parts_of(expression) if isinstance(part, Col))


def check(
    aggregate: Any, source: Any, features: type[ShardFeatures], defaults: Sequence[Any] = ()
) -> None:
    """Check that the sums of several shards, added in Python, are the sum of all rows.

    :param aggregate: a ``Sum`` or an ``Avg``.
    :param source: the expression whose values the aggregate adds.
    :param defaults: the other arguments of the ``Coalesce`` around the aggregate, such as the
        default of ``Sum(..., default=0)``.
    :raises ScatterNotSupported: the sum or the average might differ.
    """
    name = type(aggregate).__name__
    if not is_number(source) and (
        aggregate.distinct or (features.computes_beyond_types and isinstance(aggregate, models.Avg))
    ):
        raise refuse(
            f"the {name} of values that are no numbers by their output_field",
            "Cast() them to a DecimalField, an IntegerField or a FloatField",
        )
    if (
        aggregate.distinct
        and features.sums_only_numbers
        and isinstance(column_of(source).field, _NO_NUMBERS)
    ):
        raise refuse(
            f"the {name} of distinct durations or booleans",
            "Cast() booleans to an IntegerField, compute durations in Python",
        )
    if not features.computes_beyond_types:
        return
    _check_digits(name, source)
    _check_coalesce(aggregate, source, defaults)
    is_duration = has_field(aggregate) and isinstance(aggregate.output_field, models.DurationField)
    places = _places_of(source)
    if features.averages_durations_to_integers and is_duration:
        if places or _is_float(source) or any(map(_divides, _added_parts(source))):
            raise refuse(
                f"the {name} of durations with parts of microseconds",
                "Cast() them to a BigIntegerField inside an ExpressionWrapper",
            )
    elif isinstance(aggregate, models.Avg) and places is not None:
        check_places(places, has_places_of_type=has_places_of_type(source))


def _check_digits(name: str, source: Any) -> None:
    """Check that the server sends the sum of ``source`` with all the digits that it computes."""
    for part in _added_parts(source):
        if isinstance(part, _ROUNDED) and not _is_exact(part):
            raise refuse(
                f"the {name} of floating-point numbers that the server has rounded",
                "Cast() them to a DecimalField, or round the result in Python",
            )
        if _divides(part) and not _divides_exactly(part) and not _is_float(part):
            raise refuse(
                f"the {name} of a quotient, which the server adds with more digits than it sends",
                "divide the sum in Python, Cast() the quotient to a DecimalField, or divide by a"
                " float (/ 2.0 with output_field=FloatField())",
            )


def _check_coalesce(aggregate: Any, source: Any, defaults: Sequence[Any]) -> None:
    """Check that ``COALESCE`` around the aggregate does not change the type of its result."""
    if defaults and not is_number(source):
        raise refuse(
            f"the {type(aggregate).__name__} of values that are no numbers, with a default",
            "Cast() them to a DecimalField, an IntegerField or a FloatField",
        )
    if (
        isinstance(aggregate, models.Avg)
        and not _is_float(source)
        and not all(map(_is_exact_default, defaults))
    ):
        raise refuse(
            "an Avg with a default that is a float, which changes the digits of the average",
            "leave the default out, and write 'or 0' in Python",
        )


def _is_exact_default(default: Any) -> bool:
    if isinstance(default, Value) and default.value is None:
        return True
    return isinstance(default, Value | Cast) and isinstance(column_of(default).field, _EXACT_FIELDS)


def has_places_of_type(source: Any) -> bool:
    """Whether the server adds up the values of ``source`` with the decimal places of their type.

    If not, the server may use more or fewer places. For example, it adds quotients with more places
    than the type of a quotient has.
    """
    if isinstance(source, CombinedExpression):
        return source.connector in _SAME_PLACES and all(
            map(has_places_of_type, source.get_source_expressions())
        )
    if isinstance(source, Cast):
        return isinstance(source.output_field, models.DecimalField)
    return isinstance(source, Col | Value)


def depends_on_precision(source: Any, *, is_average: bool) -> bool:
    """Whether the server's setting ``div_precision_increment`` changes the sum or the average of
    ``source``.
    """
    divides = is_average or any(map(_divides, _added_parts(source)))
    return divides and not _is_float(source)


def refuse_narrow(expression: Any) -> None:
    """Refuse functions that return greater values than their type allows, such as ``Ord()``.

    In a UNION, the server would replace such a value by the maximum of the type.

    :raises ScatterNotSupported: there is such a function in ``expression``.
    """
    parts = parts_of(expression, lambda part: isinstance(part, Cast))
    if any(isinstance(part, Ord) for part in parts):
        raise refuse(
            "Ord(), whose values the server cuts off at 2147483647",
            "use Cast(Ord(...), BigIntegerField())",
        )


def _operands(part: Any) -> list[Any]:
    """Return the expressions from which the value of ``part`` is computed.

    Conditions, such as that of ``When()``, are left out.
    """
    if isinstance(part, Lookup | WhereNode | Length | Exists):
        return []
    if isinstance(part, Subquery):
        return [*part.query.annotation_select.values(), *part.query.select]
    if getattr(part, "subquery", False):
        return []
    if isinstance(part, When):
        return [part.result]
    sources: list[Any] = part.get_source_expressions()
    if isinstance(part, NullIf):
        return sources[:1]
    return [source for source in sources if source is not None]


def _added_parts(source: Any) -> list[Any]:
    """Return ``source``, and the expressions in it that determine the digits of its values.

    For example, both operands of ``a * b`` determine the digits of the product. But a ``Cast()`` to
    a decimal number rounds to its own number of digits, so the expressions in it are left out.
    """
    parts, pending = [], [source]
    while pending:
        part = pending.pop()
        parts.append(part)
        if not _has_fixed_places(part):
            pending += _operands(part)
    return parts


def _has_fixed_places(part: Any) -> bool:
    if isinstance(part, Cast):
        return not isinstance(part.output_field, models.FloatField)
    return isinstance(part, _ROUNDED) and _is_exact(part)


def _is_exact(part: Any) -> bool:
    """Whether all values of ``part`` are decimal numbers or integers, and never floats."""
    if isinstance(part, Length | Lookup | WhereNode):
        return True
    if isinstance(part, Value):
        return part.value is None or isinstance(column_of(part).field, _EXACT_FIELDS)
    if isinstance(part, Col | Cast):
        return isinstance(column_of(part).field, _EXACT_FIELDS)
    if isinstance(part, CombinedExpression) and part.connector == Combinable.POW:
        return False
    return isinstance(part, (CombinedExpression, *_ROUNDED, *_CHOICES)) and all(
        map(_is_exact, _operands(part))
    )


def _divides(part: Any) -> bool:
    if isinstance(part, CombinedExpression):
        return part.connector == Combinable.DIV
    if not isinstance(part, Func):
        return False
    texts = (
        part.extra.get("template", part.template),
        part.extra.get("arg_joiner", part.arg_joiner),
    )
    return any("/" in (text or "") for text in texts)


def _divides_exactly(part: Any) -> bool:
    """Whether ``part`` is a quotient with at most four decimal places more than its dividend."""
    if not isinstance(part, CombinedExpression):
        return False
    dividend, divisor = part.get_source_expressions()
    places = _places_of(dividend)
    return (
        places is not None
        and places <= _MOST_DIVIDEND_PLACES
        and isinstance(divisor, Value)
        and type(divisor.value) in (int, Decimal)
        and divisor.value != 0
        and _EXACTLY_DIVISIBLE % divisor.value == 0
        and divisor.value == int(divisor.value)
    )


def _places_of(part: Any) -> int | None:
    """Return the number of decimal places in the type of ``part``; None if it is unknown."""
    if isinstance(part, Lookup | WhereNode | Length | Ceil | Floor):
        return 0
    if isinstance(part, Value):
        return _places_of_value(part)
    if isinstance(part, Col | Cast):
        field = column_of(part).field
        if isinstance(field, models.DecimalField):
            return field.decimal_places
        if isinstance(field, _EXACT_FIELDS):
            return 0
        if isinstance(part, Col) or not isinstance(field, models.FloatField):
            return None
        places = _most_places(part)
        return None if places is None else max(places, 1)
    if isinstance(part, CombinedExpression):
        return _places_of_computation(part)
    return _most_places(part) if isinstance(part, _CHOICES) else None


def _places_of_value(part: Value) -> int | None:
    if type(part.value) is Decimal:
        exponent = part.value.as_tuple().exponent
        return max(0, -exponent) if isinstance(exponent, int) else None
    if part.value is None or type(part.value) is int:
        return None if _is_float(part) else 0
    field = column_of(part).field
    has_no_places = isinstance(field, _EXACT_FIELDS) and not isinstance(field, models.DecimalField)
    return 0 if has_no_places else None


def _places_of_computation(part: CombinedExpression) -> int | None:
    left, right = map(_places_of, part.get_source_expressions())
    if left is None or right is None:
        return None
    if part.connector == Combinable.MUL:
        return left + right
    if part.connector == Combinable.DIV:
        return left + QUOTIENT_PLACES
    if part.connector in (Combinable.ADD, Combinable.SUB, Combinable.MOD):
        return max(left, right)
    return None


def _most_places(part: Any) -> int | None:
    places = [_places_of(operand) for operand in _operands(part)]
    known = [count for count in places if count is not None]
    return max(known, default=0) if len(known) == len(places) else None


def _is_float(part: Any) -> bool:
    """Whether the values of ``part`` are floats, for example because an operand is a float."""
    if isinstance(part, Cast):
        # Django writes ``x + 0.0``.
        (source,) = part.get_source_expressions()
        return isinstance(part.output_field, models.FloatField) and (
            isinstance(column_of(source).field, _TEXTS) or _is_float(source)
        )
    if isinstance(part, Col | Value):
        return isinstance(column_of(part).field, models.FloatField)
    if isinstance(part, CombinedExpression) and part.connector == Combinable.POW:
        return True
    if isinstance(part, (CombinedExpression, Round, *_CHOICES)):
        return any(map(_is_float, _operands(part)))
    return isinstance(part, _FLOAT_FUNCTIONS)
