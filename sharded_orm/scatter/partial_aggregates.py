"""Partial aggregates: what each shard computes for an aggregate, and how the results are merged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import OperationalError
from django.db.models import Avg, Count, Func, Max, Min, Sum
from django.db.models.fields import DurationField, FloatField
from django.db.models.functions import Coalesce

from sharded_orm import compat
from sharded_orm.backends.features import ShardFeatures
from sharded_orm.scatter.arithmetic import Divide, check_sum, divider, quotient
from sharded_orm.scatter.comparison import Comparison, Row, has_field
from sharded_orm.scatter.refusals import refuse
from sharded_orm.scatter.summands import check, depends_on_precision, has_places_of_type

Combine = Callable[[Any, Any], Any]
"""A function that returns the aggregate of all rows, given the aggregates of two parts of the rows."""

#: The aggregates of PostgreSQL whose partial results can be combined exactly. They are keyed by the
#: names of their module and class, because the module can be imported only if psycopg is installed.
_COMBINED: Mapping[tuple[str, str], Combine] = {
    ("django.contrib.postgres.aggregates.general", name): combine
    for name, combine in {
        "BitAnd": operator.and_,
        "BitOr": operator.or_,
        "BitXor": operator.xor,
        "BoolAnd": operator.and_,
        "BoolOr": operator.or_,
    }.items()
}


@dataclass(frozen=True, slots=True)
class Partial:
    """An aggregate that each shard computes for its own rows, and how to merge the shards' values.

    The merged value replaces the value in ``column``. If the merged value is NULL, because no shard
    has a value to aggregate, the value that a shard sent in ``column`` stays. It may be, for
    example, the default of ``Sum(..., default=0)``.

    :param column: the position of the aggregate in the select list.
    :param kind: "count", "sum", "min", "max", "avg" or "combined".
    :param parts: the positions of the columns to merge. For "avg", these are the columns of the sum
        and of the count; otherwise the column of the aggregate itself.
    :param divide: computes an average from a sum and a count.
    :param combine: merges two values of the kind "combined".
    :param divides: whether the values depend on the precision to which the server divides numbers.
    """

    column: int
    kind: str
    parts: tuple[int, ...]
    divide: Divide = quotient
    combine: Combine = operator.and_
    divides: bool = False

    @property
    def compared(self) -> tuple[int, ...]:
        return self.parts if self.kind in ("min", "max") else ()

    @property
    def summed(self) -> tuple[int, ...]:
        """A tuple with the position of the column that contains each shard's partial sum.

        Only Sum() and Avg() have such a column. For other aggregates, the tuple is empty.
        """
        return self.parts[:1] if self.kind in ("sum", "avg") else ()


def partial_of(
    column: int, expression: Any, add_column: Callable[[Any], int], features: type[ShardFeatures]
) -> Partial:
    """Return how to merge the aggregate ``expression``, which is column ``column`` of the select
    list.

    :param add_column: a function that adds an expression to the select list, such as the count for
        an average. It returns the number of the new column.
    :raises ScatterNotSupported: the values that the shards return for this aggregate cannot be
        merged.
    """
    aggregate, defaults = expression, list[Any]()
    if type(aggregate) is Coalesce:
        aggregate, *defaults = aggregate.get_source_expressions()
        if any(d.contains_aggregate or d.contains_column_references for d in defaults):
            raise _refuse(expression)
    kind = type(aggregate)
    is_whole = aggregate is expression
    if (combine := _COMBINED.get((kind.__module__, kind.__name__))) is not None:
        part = column if is_whole else add_column(aggregate)
        return Partial(column, "combined", (part,), combine=combine)
    if kind not in (Count, Sum, Min, Max, Avg):
        raise _refuse(expression)
    if aggregate.distinct:
        raise refuse(
            f"{kind.__name__}(distinct=True) over groups that span shards",
            "group by the shard key, or aggregate values(...).distinct() in Python",
        )
    if kind not in (Sum, Avg):
        part = column if is_whole else add_column(aggregate)
        return Partial(column, kind.__name__.lower(), (part,))
    (source,), condition = compat.arguments_of(aggregate)
    check(aggregate, source, features, defaults)
    divides = depends_on_precision(source, is_average=kind is Avg)
    if kind is Sum:
        part = column if is_whole else add_column(aggregate)
        return Partial(column, "sum", (part,), divides=divides)
    total = Sum(averaged(source), filter=condition)
    count = Count(source, filter=condition)
    divide = divider(
        features,
        duration=isinstance(aggregate.output_field, DurationField),
        has_places_of_type=has_places_of_type(source),
    )
    parts = add_column(total), add_column(count)
    return Partial(column, "avg", parts, divide, divides=divides)


def averaged(source: Any) -> Any:
    """Return the expression whose sum is read in order to compute the average of ``source``.

    PostgreSQL returns the sum of values of its type ``real`` (such as those of
    ``TrigramSimilarity``) as a ``real``, with only seven digits, but their average as a
    ``double precision``. So such values are converted before they are added.
    """
    if not (has_field(source) and isinstance(source.output_field, FloatField)):
        return source
    return _Averaged(source, output_field=FloatField())


class _Averaged(Func):
    """A floating-point number, converted to the precision in which the server computes averages."""

    template = "%(expressions)s"
    arity = 1

    def as_postgresql(self, compiler: Any, connection: Any, **more: Any) -> Any:
        # In PostgreSQL, the product of a ``real`` and a ``numeric`` is a ``double precision``. So
        # this multiplication converts a ``real``, and leaves a ``numeric`` as it is.
        return self.as_sql(
            compiler, connection, template="(%(expressions)s) * CAST(1 AS numeric)", **more
        )


def rows_with_sums(rows: Iterable[Row], partials: Sequence[Partial]) -> Iterator[Row]:
    """Yield ``rows``, and refuse averages whose sums a shard cannot compute.

    SQLite adds integers as integers of 64 bits, and raises an error if the sum is greater. Its AVG
    is a float, and has no such limit.

    :raises ScatterNotSupported: the sum of an average has too many bits.
    """
    try:
        yield from rows
    except OperationalError as error:
        if "integer overflow" in str(error) and any(p.kind == "avg" for p in partials):
            raise refuse(
                "an Avg of integers whose sum on one shard has more than 64 bits",
                "convert them to floats: Avg(Cast(…, FloatField()))",
            ) from error
        raise


def _refuse(expression: Any) -> Exception:
    return refuse(
        f"the aggregate {type(expression).__name__} of rows on several shards",
        "group by the shard key; or use Count, Sum, Avg, Min and Max as they are, and compute with"
        " their results, or with the rows, in Python",
    )


class Merger:
    """Merges the rows that several shards return for the same group of GROUP BY."""

    def __init__(
        self,
        partials: Sequence[Partial],
        comparison: Comparison,
        features: type[ShardFeatures],
    ) -> None:
        self._partials = partials
        self._comparison = comparison
        self._features = features
        for partial in partials:
            for part in partial.compared:
                comparison.check_extremes(part)

    def add(self, whole: list[Any], row: Row) -> None:
        """Merge the values of ``row`` into the merged row ``whole``, in place.

        Both rows must be of the same group of GROUP BY. Call this once for each shard's row: if a
        row is merged twice, its values are counted twice.
        """
        seen: set[int] = set()
        for partial in self._partials:
            for part in partial.parts:
                if part in seen:
                    continue
                seen.add(part)
                if partial.kind in ("min", "max"):
                    self._extreme(partial.kind, part, whole, row)
                elif partial.kind == "combined":
                    self._add_combined(partial.combine, part, whole, row)
                else:
                    self._comparison.add(part, row, whole)

    def _extreme(self, kind: str, part: int, whole: list[Any], row: Row) -> None:
        # Call ordered() even for None. For MySQL's date 0000-00-00, for example, the driver returns
        # None, although the value is not NULL for the server. ordered() raises an error for it.
        new = self._comparison.ordered(row, part)
        old = self._comparison.ordered(whole, part)
        if new is None:
            return
        if old is not None and not (new < old if kind == "min" else old < new):
            return
        self._comparison.carry(part, row, whole)

    @staticmethod
    def _add_combined(combine: Combine, part: int, whole: list[Any], row: Row) -> None:
        value = row[part]
        if value is None:
            return
        # Accept only integers and booleans. PostgreSQL returns values of its type bit, for example,
        # as text.
        if not isinstance(value, int):
            raise refuse(f"such an aggregate of {value!r}", "aggregate integers or booleans")
        whole[part] = value if whole[part] is None else combine(whole[part], value)

    def finish(self, whole: list[Any]) -> None:
        """Write the final values of the aggregates into the merged row ``whole``.

        Call this method once, after the rows of all shards were merged into ``whole``.

        :raises ScatterNotSupported: one database could not return a sum.
        """
        for partial in self._partials:
            target = partial.column
            if partial.kind == "avg":
                total, count = partial.parts
                if whole[count]:
                    self._comparison.average(whole, total, whole[count], target, partial.divide)
                continue
            (part,) = partial.parts
            if partial.kind == "sum":
                check_sum(whole[part], self._features)
            if part != target and whole[part] is not None:
                self._comparison.copy(whole, part, target)
