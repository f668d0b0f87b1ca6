"""Compares values from the shards in the same way as the database does.

Rows of several shards are merged by the values that the database sent, before Django converts them.
All databases compare numbers and dates in the same way, but text in different ways:

- SQLite compares UTF-8 bytes. Columns with a collation other than BINARY are refused.
- PostgreSQL compares by a collation, but it returns no sort weights. So a server ranks the texts;
  see :mod:`sharded_orm.scatter.ranked_comparison`.
- MariaDB and MySQL compare by a collation, too, but return the sort weights of texts; see
  :mod:`sharded_orm.scatter.weighted_comparison`.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from django.core.exceptions import FieldError
from django.db import models
from django.db.models.expressions import Col
from django.db.models.functions import Collate

from sharded_orm.scatter.arithmetic import Divide, add
from sharded_orm.scatter.refusals import refuse

Row = Sequence[Any]

_PLAIN_FIELDS = (
    models.IntegerField,
    models.AutoField,
    models.FloatField,
    models.DecimalField,
    models.BooleanField,
    models.DateField,
    models.TimeField,
    models.DurationField,
)


@dataclass(frozen=True, slots=True)
class Column:
    """A selected column, with the properties that determine how its values are compared."""

    # ``alias`` is the alias of the table in the query, and ``name`` is the column's name. Both are
    # None if the selected column is a computed expression.
    alias: str | None
    name: str | None
    # The kind of the values: "plain" for numbers and dates, which Python compares as every database
    # does; "uuid" for UUIDs; "text" for all other values.
    kind: str
    # The collation set by the query or by the field. None means the default collation of the table.
    collation: str | None = None
    # The field that determines how Django converts the values; None if it is unknown.
    field: Any = dataclasses.field(default=None, compare=False, repr=False)
    # The selected expression.
    expression: Any = dataclasses.field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class OrderKey:
    """An entry of ORDER BY: its column's position, its direction, and whether NULLs come first."""

    column: int
    descending: bool
    nulls_first: bool


def has_field(expression: Any) -> bool:
    """Whether Django knows the type of the values of ``expression`` (its ``output_field``)."""
    try:
        expression.output_field  # noqa: B018  # A property, which raises an error.
    except (AttributeError, FieldError):
        return False
    return True


def column_of(expression: Any) -> Column:
    """Return the :class:`Column` that describes the values of ``expression``."""
    output = expression.output_field if has_field(expression) else None
    while getattr(output, "remote_field", None) and getattr(output, "target_field", None):
        output = output.target_field
    if isinstance(output, _PLAIN_FIELDS):
        kind = "plain"
    elif isinstance(output, models.UUIDField):
        kind = "uuid"
    else:
        kind = "text"
    collation = _collation_of(expression)
    if isinstance(expression, Col):
        name = expression.target.column
        return Column(expression.alias, name, kind, collation, output, expression)
    return Column(None, None, kind, collation, output, expression)


def _collation_of(expression: Any) -> str | None:
    todo = [expression]
    while todo:
        part = todo.pop()
        if part is None:
            continue
        if isinstance(part, Collate):
            return str(part.collation)
        if isinstance(part, Col):
            target = part.target
            while getattr(target, "remote_field", None) and getattr(target, "target_field", None):
                target = target.target_field
            collation = getattr(target, "db_collation", None)
            if collation:
                return str(collation)
        elif hasattr(part, "get_source_expressions"):
            todo += part.get_source_expressions()
    return None


class _Reversed:
    """A wrapper around a value whose ``<`` is reversed, for descending order."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Reversed)
        return bool(self.value == other.value)

    def __lt__(self, other: _Reversed) -> bool:
        return bool(other.value < self.value)


class Comparison:
    """The base class of the comparisons, which compare rows of several shards as one database
    would.

    :param columns: the selected columns.
    :param compared: the positions of the columns whose values will be compared.

    :attr:`weights` has SQL for values that the outer SELECT must select in addition, such as sort
    weights. In a row, they come after the shard's index (its position among the targets).
    :attr:`ranked` has the positions of the columns whose values a server ranks after they were read
    (:mod:`sharded_orm.scatter.value_ranks`).
    """

    def __init__(self, columns: Sequence[Column], compared: Iterable[int]) -> None:
        self.columns = columns
        # The position of the shard's index in a row. The index is the shard's position among the
        # targets. A row consists of its columns, the shard's index and the sort weights, in this
        # order.
        self.shard = len(columns)
        self.compared = tuple(compared)
        self.weights: tuple[str, ...] = ()
        self.ranked: frozenset[int] = frozenset()

    def normal(self, row: Row, column: int) -> Any:
        """Return a value of ``row``, converted so that Python compares it as the database does.

        The value is the one in column number ``column``. None stands for NULL. ``==``, ``hash()``
        and ``<`` of the returned values agree with the database.
        """
        raise NotImplementedError

    def ordered(self, row: Row, column: int) -> Any:
        """Return a value of ``row``, converted so that Python sorts it as ORDER BY does.

        The value is the one in column number ``column``. None stands for NULL. ``<`` of the
        returned values agrees with ORDER BY of the database.
        """
        return self.normal(row, column)

    def identity(self, columns: Sequence[int]) -> Callable[[Row], tuple[Any, ...]]:
        """Return a function that maps a row to a hashable key.

        Two rows have equal keys if the database considers their values in ``columns`` equal.
        """
        normal = self.normal
        return lambda row: tuple([normal(row, column) for column in columns])

    def order(self, keys: Sequence[OrderKey]) -> Callable[[Row], tuple[Any, ...]]:
        """Return a key function for ``sorted()``, which sorts rows as ORDER BY does.

        Rows that are equal for ORDER BY are sorted by shard, so that the result is always in the
        same order.
        """

        def key(row: Row) -> tuple[Any, ...]:
            parts: list[Any] = []
            for order in keys:
                value = self.ordered(row, order.column)
                if value is None:
                    parts += (not order.nulls_first, 0)
                else:
                    parts.append(order.nulls_first)
                    parts.append(_Reversed(value) if order.descending else value)
            parts.append(row[self.shard])
            return tuple(parts)

        return key

    def check_extremes(self, column: int) -> None:
        """Check that Python finds the same minimum and maximum of ``column`` as the server.

        Python compares the values that :meth:`ordered` returns, so it uses the order of ORDER BY.
        MIN and MAX of the server may use a different order.

        :raises ScatterNotSupported: the two orders may differ.
        """

    def checked(self, rows: Iterable[Row]) -> Iterable[Row]:
        """Return ``rows``, which are refused if their server has computed unlike others.

        Call this for rows with partial sums before the sums are added.
        """
        return rows

    def carry(self, column: int, source: Row, target: list[Any]) -> None:
        """Copy the value in column number ``column``, with its sort weights, from one row to another.

        :param source: the row to copy from; ``target`` is the row to copy to.
        """
        target[column] = source[column]

    def copy(self, row: list[Any], source: int, target: int) -> None:
        """Overwrite the value in column number ``target`` of ``row`` with that in column number
        ``source``.

        The sort weights of the value are copied, too.
        """
        row[target] = row[source]

    def add(self, column: int, source: Row, target: list[Any]) -> None:
        """Add the partial sum in the row ``source`` to the partial sum in the row ``target``.

        :param column: the position of the sum in both rows.
        """
        target[column] = add(target[column], source[column])

    def average(self, row: list[Any], total: int, count: int, target: int, divide: Divide) -> None:
        """Write the average of ``count`` values to column number ``target`` of ``row``.

        :param total: the number of the column that contains the sum of the values.
        :param divide: computes an average from a sum and a count.
        """
        row[target] = divide(row[total], count)


class SQLiteComparison(Comparison):
    """Compares values as SQLite does: by storage class (NULL, numbers, text, blobs), then by value.

    :raises ScatterNotSupported: a compared column has a collation other than BINARY.
    """

    def __init__(self, columns: Sequence[Column], compared: Iterable[int]) -> None:
        super().__init__(columns, compared)
        for index in self.compared:
            collation = columns[index].collation
            if collation and collation.upper() != "BINARY":
                raise refuse(
                    f"text compared by the collation {collation!r}",
                    "use Collate(field, 'BINARY'), or ask one shard",
                )

    def normal(self, row: Row, column: int) -> Any:
        value = row[column]
        if value is None:
            return None
        if isinstance(value, int | float | Decimal):
            return (1, value)
        if isinstance(value, str):
            return (2, value)
        if isinstance(value, bytes):
            return (3, value)
        if isinstance(value, datetime.date | datetime.time):
            # SQLite stores the value as text, and compares the text. The driver has parsed it, so
            # convert the value back to text.
            return (2, str(value))
        raise refuse(f"a comparison of values of type {type(value).__name__!r}", "ask one shard")
