"""Compares values from the shards in the same way as the database does.

Rows of several shards are merged by the values that the database sent, before Django converts them.
All databases compare numbers and dates in the same way, but text in different ways:

- SQLite compares UTF-8 bytes. Columns with a collation other than BINARY are refused.
- PostgreSQL compares by a collation, but it returns no sort weights. So a server ranks the texts;
  see :mod:`sharded_orm.scatter.ranked_comparison`.
- MariaDB and MySQL compare by a collation. So, for each compared text column, the query selects
  three more values: the text's sort weight (``WEIGHT_STRING``), the weight of a blank, and the
  collation's name. A ``PAD SPACE`` collation compares as if the shorter text continued with blanks.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django.core.exceptions import FieldError
from django.db import models
from django.db.models.expressions import Col
from django.db.models.functions import Collate

from sharded_orm.scatter.arithmetic import Divide, add, add_limited
from sharded_orm.scatter.refusals import refuse

Row = Sequence[Any]

# Every server (MariaDB and MySQL) certainly compares this many leading bytes of a text's sort
# weight. A server sorts only by the first max_sort_length (1024) bytes. Some servers apply this
# limit to the bytes of the characters, others to the bytes of the weights. A character has at most
# 4 bytes, and its weight at least 2. So 1024 bytes of characters have at least 512 bytes of weight.
_SURELY_SORTED = 512

# Text can be compared by its sort weight if its collation has only one level of sort weights, and
# the collation's name begins with one of these names.
_CHARSETS = ("utf8mb4", "utf8mb3", "utf8", "latin1", "ascii", "ucs2", "uca1400")
_SEVERAL_LEVELS = re.compile(r"_(as_ci|as_cs|ai_cs|w2)$")

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
    field: Any = field(default=None, compare=False, repr=False)


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
        return Column(expression.alias, expression.target.column, kind, collation, output)
    return Column(None, None, kind, collation, output)


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


class ComparedText:
    """The sort weight of a text. Sort weights sort like the texts in the server's collation.

    Servers sort only by the first bytes of a weight. If two texts are equal in these bytes and
    differ after them, ``<`` raises :exc:`ScatterNotSupported`.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: bytes) -> None:
        self.weight = weight

    def __hash__(self) -> int:
        return hash(self.weight)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, ComparedText)
        return self.weight == other.weight

    def __lt__(self, other: ComparedText) -> bool:
        weight, other_weight = self.weight, other.weight
        if (
            len(weight) > _SURELY_SORTED
            and len(other_weight) > _SURELY_SORTED
            and weight[:_SURELY_SORTED] == other_weight[:_SURELY_SORTED]
            and weight != other_weight
        ):
            raise refuse(
                "an order by texts that differ only after their first 128 characters,"
                " which the server's sort cuts off",
                "order by Left(field, 100), or by another column",
            )
        return weight < other_weight


class PaddedText(ComparedText):
    """The sort weight of a text whose collation is ``PAD SPACE``: trailing blanks are ignored.

    :param pad: the sort weight of a blank.
    """

    __slots__ = ("pad",)

    def __init__(self, weight: bytes, pad: bytes) -> None:
        size = len(pad)
        end = len(weight)
        while end >= size and weight[end - size : end] == pad:
            end -= size
        self.weight = weight[:end]
        self.pad = pad

    __hash__ = ComparedText.__hash__

    def __lt__(self, other: ComparedText) -> bool:
        weight, other_weight = self.weight, other.weight
        missing = len(other_weight) - len(weight)
        if missing > 0:
            weight += self.pad * (missing // len(self.pad) + 1)
        elif missing < 0:
            other_weight += self.pad * (-missing // len(self.pad) + 1)
        return ComparedText.__lt__(ComparedText(weight), ComparedText(other_weight))


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


class MySQLComparison(Comparison):
    """Compares values as MariaDB and MySQL do: text by its sort weights, other values as Python
    does.

    :param uuid_version: the version of the server if it has a native type for UUIDs; otherwise
        None.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        compared: Iterable[int],
        *,
        uuid_version: tuple[int, ...] | None,
    ) -> None:
        super().__init__(columns, compared)
        self._uuid_version = uuid_version
        weighted, dates = [], []
        for index in self.compared:
            kind = columns[index].kind
            if kind == "text" or (kind == "uuid" and uuid_version is None):
                weighted.append(index)
            elif isinstance(columns[index].field, models.DateField):
                dates.append(index)
        self.weights = (*map(_weights, weighted), *(f"c{column} IS NULL" for column in dates))
        first = len(columns) + 1
        self._weights: Mapping[int, int] = {
            column: first + 3 * place for place, column in enumerate(weighted)
        }
        # Maps the position of each compared date column to the position of its additional value
        # ``IS NULL``, which tells whether the date is NULL.
        self._nulls: Mapping[int, int] = {
            column: first + 3 * len(weighted) + place for place, column in enumerate(dates)
        }

    def normal(self, row: Row, column: int) -> Any:
        value = row[column]
        if value is None:
            place = self._nulls.get(column)
            if place is not None and row[place] == 0:
                # For the date 0000-00-00, the driver returns None. But for the server, this date is
                # not NULL, so it must not be compared as NULL.
                raise refuse(
                    "a comparison of dates that Python does not have, such as 0000-00-00",
                    "set them to NULL, or ask one shard",
                )
            return None
        if isinstance(value, str):
            return self._text(row, column, value)
        if isinstance(value, bytes):
            return ComparedText(value)
        return value

    def _text(self, row: Row, column: int, value: str) -> Any:
        place = self._weights.get(column)
        if place is None:
            if self.columns[column].kind == "uuid":
                return value
            raise refuse(
                f"a comparison of the text {value!r} where a number or date was expected",
                "name the expression's output_field",
            )
        weight, pad, collation = row[place : place + 3]
        if isinstance(weight, str):
            weight = weight.encode("latin1")
        if collation == "binary":
            return ComparedText(value.encode())
        if not collation.startswith(_CHARSETS) or _SEVERAL_LEVELS.search(collation):
            raise refuse(
                f"text compared by the collation {collation!r}",
                "use Collate(field, ...) with a collation of one level, such as utf8mb4_bin",
            )
        if "_nopad_" in collation or "_0900_" in collation:
            return ComparedText(weight)
        return PaddedText(weight, pad)

    def ordered(self, row: Row, column: int) -> Any:
        if self._uuid_version is not None and self.columns[column].kind == "uuid":
            return _uuid_order(row[column], self._uuid_version)
        return self.normal(row, column)

    def check_extremes(self, column: int) -> None:
        if self._uuid_version is not None and self.columns[column].kind == "uuid":
            raise refuse("Min or Max of a native UUID", "order by it and take the first")

    def add(self, column: int, source: Row, target: list[Any]) -> None:
        target[column] = add_limited(target[column], source[column])

    def carry(self, column: int, source: Row, target: list[Any]) -> None:
        super().carry(column, source, target)
        if (null := self._nulls.get(column)) is not None:
            target[null] = source[null]
        place = self._weights.get(column)
        if place is not None:
            target[place : place + 3] = source[place : place + 3]

    def copy(self, row: list[Any], source: int, target: int) -> None:
        super().copy(row, source, target)
        null, source_null = self._nulls.get(target), self._nulls.get(source)
        if null is not None and source_null is not None:
            row[null] = row[source_null]
        place, source_place = self._weights.get(target), self._weights.get(source)
        if place is not None and source_place is not None:
            row[place : place + 3] = row[source_place : source_place + 3]


def _weights(column: int) -> str:
    name = f"c{column}"
    return f"WEIGHT_STRING({name}), WEIGHT_STRING(CONCAT(LEFT({name}, 0), ' ')), COLLATION({name})"


def _uuid_order(value: str | None, version: tuple[int, ...]) -> bytes | None:
    """Return the bytes by which MariaDB sorts a native UUID; None for NULL.

    MariaDB sorts UUIDs of the versions 1 to 5 by their node, then by their clock sequence, then by
    their time, most significant part first. UUIDs of version 6 and later are sorted by their bytes.
    Servers without the fix MDEV-29959 sort all UUIDs like the versions 1 to 5. On such a server, an
    order by UUIDs is refused.

    :param version: the server's version.
    :raises ScatterNotSupported: the server lacks the fix.
    """
    if not ((10, 11, 5) <= version < (11,) or version >= (11, 0, 3)):
        raise refuse(
            "an order by a native UUID of this server", "order by Cast(field, CharField())"
        )
    if value is None:
        return None
    raw = uuid.UUID(value).bytes
    if raw[6] >> 4 < 6 and raw[8] & 0x80:
        return raw[10:] + raw[8:10] + raw[6:8] + raw[4:6] + raw[:4]
    return raw
