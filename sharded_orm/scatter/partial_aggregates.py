"""Partial aggregates: what each shard computes for an aggregate, and how the results are merged."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.db.models import Avg, Count, Max, Min, Sum
from django.db.models.fields import DurationField
from django.db.models.functions import Coalesce

from sharded_orm import compat
from sharded_orm.backends.features import ShardFeatures
from sharded_orm.scatter.comparison import Comparison, Row
from sharded_orm.scatter.refusals import refuse

# The number of decimal places that MariaDB and MySQL add to a quotient: the default of their
# setting div_precision_increment.
_QUOTIENT_SCALE = 4
_EXACT = decimal.Context(prec=200, rounding=decimal.ROUND_HALF_UP)


@dataclass(frozen=True, slots=True)
class Partial:
    """An aggregate in column number ``column`` of the select list, and how to merge its values.

    ``kind`` is "count", "sum", "min", "max" or "avg". ``parts`` are the numbers of the columns to
    merge over the shards. For avg, these are a column with the sum and one with the count;
    otherwise, one column with the aggregate itself. If the merged value is NULL, the result is the
    value that a shard sent in ``column``, such as the default of ``Sum(..., default=0)``.
    """

    column: int
    kind: str
    parts: tuple[int, ...]
    duration: bool = False

    @property
    def compared(self) -> tuple[int, ...]:
        return self.parts if self.kind in ("min", "max") else ()


def partial_of(
    column: int, expression: Any, add_column: Callable[[Any], int], features: type[ShardFeatures]
) -> Partial:
    """Return the partial aggregate for ``expression``, which is column ``column`` of the select list.

    :param add_column: a function that adds an expression to the select list and returns the number of
        its column.
    :raises ScatterNotSupported: such an aggregate cannot be merged.
    """
    aggregate = expression
    if type(aggregate) is Coalesce:
        aggregate, *defaults = aggregate.get_source_expressions()
        if any(d.contains_aggregate or d.contains_column_references for d in defaults):
            raise _refuse(expression)
    kind = type(aggregate)
    if kind not in (Count, Sum, Min, Max, Avg):
        raise _refuse(expression)
    if aggregate.distinct:
        raise refuse(
            f"{kind.__name__}(distinct=True) over groups that span shards",
            "group by the shard key, or aggregate values(...).distinct() in Python",
        )
    is_whole = aggregate is expression
    if kind is not Avg:
        part = column if is_whole else add_column(aggregate)
        return Partial(column, kind.__name__.lower(), (part,))
    (source,), condition = compat.arguments_of(aggregate)
    total = Sum(source, filter=condition)
    count = Count(source, filter=condition)
    # On databases with averages_durations_to_integers, Django casts the average of durations to an
    # integer. The merge must do the same.
    duration = features.averages_durations_to_integers and isinstance(
        aggregate.output_field, DurationField
    )
    return Partial(column, "avg", (add_column(total), add_column(count)), duration)


def _refuse(expression: Any) -> Exception:
    return refuse(
        f"the aggregate {type(expression).__name__}",
        "use Count, Sum, Avg, Min and Max as they are, and compute with their results in Python",
    )


class Merger:
    """Merges the rows that several shards return for one group of GROUP BY."""

    def __init__(self, partials: Sequence[Partial], comparison: Comparison) -> None:
        self._partials = partials
        self._comparison = comparison
        for partial in partials:
            for part in partial.compared:
                comparison.check_extremes(part)

    def add(self, whole: list[Any], row: Row) -> None:
        """Merge the values of ``row`` into the merged row ``whole``, which is changed.

        Both are rows for the same group of GROUP BY; ``row`` is from another shard.
        """
        seen: set[int] = set()
        for partial in self._partials:
            for part in partial.parts:
                if part in seen:
                    continue
                seen.add(part)
                if partial.kind in ("min", "max"):
                    self._extreme(partial.kind, part, whole, row)
                else:
                    whole[part] = _sum(whole[part], row[part])

    def _extreme(self, kind: str, part: int, whole: list[Any], row: Row) -> None:
        if row[part] is None:
            return
        if whole[part] is not None:
            new = self._comparison.ordered(row, part)
            old = self._comparison.ordered(whole, part)
            if not (new < old if kind == "min" else old < new):
                return
        self._comparison.carry(part, row, whole)

    def finish(self, whole: list[Any]) -> None:
        """Write the final values of the aggregates into the merged row ``whole``.

        Call this method once, after the rows of all shards were merged into ``whole``.
        """
        for partial in self._partials:
            target = partial.column
            if partial.kind == "avg":
                total, count = (whole[part] for part in partial.parts)
                if count:
                    whole[target] = quotient(total, count, duration=partial.duration)
                continue
            (part,) = partial.parts
            value = whole[part]
            if part != partial.column and value is not None:
                whole[target] = value


def _sum(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        return _EXACT.add(left, right)
    return left + right


def total_of(values: Iterable[Any]) -> tuple[Any, int]:
    """Return the sum of ``values``, and how many values there are.

    Values that are not numbers are counted, but not added. The sum is None if there are no numbers.
    """
    total, count = None, 0
    for value in values:
        count += 1
        if isinstance(value, int | float | Decimal):
            total = _sum(total, value)
    return total, count


def quotient(total: Any, count: int, *, duration: bool = False) -> Any:
    """Return ``total / count`` as the database computes ``AVG``.

    If ``duration`` is true, the result is rounded to an integer. Otherwise, if ``total`` is a
    Decimal, the result is a Decimal with four more decimal places. All other results are floats.
    """
    if duration:
        value = _EXACT.divide(Decimal(total), count)
        return int(value.to_integral_value(decimal.ROUND_HALF_UP))
    if not isinstance(total, Decimal):
        return float(total) / count
    scale = -int(total.as_tuple().exponent) + _QUOTIENT_SCALE
    return _EXACT.quantize(_EXACT.divide(total, count), Decimal(1).scaleb(-scale))
