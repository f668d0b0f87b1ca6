"""Refuses sums and averages that a server computes with digits that it does not send.

A shard sends the sum of its own rows, and the merge adds the sums of the shards. MariaDB and MySQL
give every expression a type with a number of decimal places. They compute with more places, and
round when they send a value. So the sum of two rounded sums is not the rounded sum of all rows:

- A quotient of decimal numbers has at least nine places while it is added, but only four places
  more than the dividend when it is sent.
- A float that was rounded to some places, or that is made of text, has few places when a sum or an
  average of it is sent.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models.expressions import Col, Combinable, CombinedExpression, Func, Value
from django.db.models.functions import Cast, Ceil, Floor, Ord, Round

from sharded_orm.backends.features import ShardFeatures
from sharded_orm.scatter.comparison import column_of
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
_ROUNDED = (Round, Ceil, Floor)
_SAME_PLACES = (Combinable.ADD, Combinable.SUB, Combinable.MUL)


def is_number(expression: Any) -> bool:
    """Whether the values of ``expression`` are numbers, durations or booleans, by its declared type."""
    field = column_of(expression).field
    if field is not None:
        return isinstance(field, _NUMBERS)
    # Django knows no type for a computation with numbers of two types.
    return all(is_number(part) for part in parts_of(expression) if isinstance(part, Col))


def check(aggregate: Any, source: Any, features: type[ShardFeatures]) -> None:
    """Check that the sums of several shards together are the sum of all rows.

    :param aggregate: a ``Sum`` or an ``Avg``.
    :param source: the expression whose values it adds.
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
    for part in parts_of(source, _has_fixed_places):
        if isinstance(part, _ROUNDED) and not _is_exact(part):
            raise refuse(
                f"the {name} of floating-point numbers that the server has rounded",
                "Cast() them to a DecimalField, or round the result in Python",
            )
        if _divides(part) and not _is_float(part):
            raise refuse(
                f"the {name} of a quotient, which the server adds with more digits than it sends",
                "divide the sum in Python, or Cast() the quotient to a DecimalField or a FloatField",
            )


def has_places_of_type(source: Any) -> bool:
    """Whether all values of ``source`` have the decimal places of its type while they are added."""
    if isinstance(source, CombinedExpression):
        return source.connector in _SAME_PLACES and all(
            map(has_places_of_type, source.get_source_expressions())
        )
    return isinstance(source, Col | Value)


def refuse_narrow(expression: Any) -> None:
    """Refuse functions whose values may be greater than their type, because a union cuts them off.

    :raises ScatterNotSupported: there is such a function in ``expression``.
    """
    if any(isinstance(part, Ord) for part in parts_of(expression, _has_fixed_places)):
        raise refuse(
            "Ord(), whose values the server cuts off at 2147483647",
            "use Cast(Ord(...), BigIntegerField())",
        )


def _has_fixed_places(part: Any) -> bool:
    return isinstance(part, Cast) or (isinstance(part, _ROUNDED) and _is_exact(part))


def _is_exact(rounded: Any) -> bool:
    """Whether the server rounds decimal numbers or integers, and no floats."""
    return all(
        isinstance(part, _ROUNDED)
        or (isinstance(part, Value) and type(part.value) in (int, Decimal))
        or (isinstance(part, Col | Cast) and isinstance(column_of(part).field, _EXACT_FIELDS))
        or (isinstance(part, CombinedExpression) and part.connector != Combinable.POW)
        for part in parts_of(rounded, lambda part: isinstance(part, Cast))
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


def _is_float(part: Any) -> bool:
    """Whether one of the numbers that ``part`` computes with is a float, so that its values are."""
    if isinstance(part, CombinedExpression):
        return any(map(_is_float, part.get_source_expressions()))
    if isinstance(part, Value):
        return type(part.value) is float
    return isinstance(part, Col | Cast) and isinstance(column_of(part).field, models.FloatField)
