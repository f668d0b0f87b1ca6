"""Compares values as PostgreSQL does.

Python can compare numbers, dates, UUIDs and bytes. It cannot compare JSON, arrays, ranges and some
other types. It cannot compare texts either: their order depends on a collation, and PostgreSQL
returns no sort keys. So a server returns *ranks* of such values
(:mod:`sharded_orm.scatter.value_ranks`). Equal values have the same rank, and a greater value has a
higher rank.
"""

from __future__ import annotations

import datetime
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from django.db import models

from sharded_orm.scatter.arithmetic import Divide, duration_quotient
from sharded_orm.scatter.comparison import Column, Comparison, Row
from sharded_orm.scatter.refusals import refuse

# For these fields, the driver returns a value as the server's own text. If a server must rank the
# values of another field, the query selects the text of each value in an additional column.
_WRITTEN_AS_TEXT: Final = (
    models.CharField,
    models.TextField,
    models.FileField,
    models.GenericIPAddressField,
    models.JSONField,
)

#: Maps the texts of a column's values to the ranks of the values. None if Python compares the texts
#: in the same way as the server, so that no ranks are needed.
Ranks = Mapping[str, int] | None


class _NotANumber:
    """NaN (not a number), compared as in PostgreSQL: equal to itself, and greater than all numbers."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NotANumber)

    def __lt__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return not isinstance(other, _NotANumber)


_NAN: Final = _NotANumber()
# Without a name, PostgreSQL would call several columns alike.
_ALL_DIGITS: Final = (
    "CAST(pg_catalog.current_setting('extra_float_digits') AS integer) > 0 AS digits"
)
_MONTH: Final = 30 * 86_400_000_000
_DAY: Final = 86_400_000_000


class RankedComparison(Comparison):
    """Compares values as PostgreSQL does: in :attr:`ranked` columns by ranks, otherwise as Python does.

    Set the ranks of a row's values in ``equality_ranks`` or ``order_ranks`` before the row is
    compared.

    :param summed: the positions of the columns in which each shard returns the sum of its own rows.
        The merge adds these sums.
    :param reads_utc: whether the driver returns all times in UTC. If not, a server must rank the
        times. In a time zone whose clocks are set back in autumn, the time 02:30, for example,
        occurs twice on that day. Python would consider these two times equal.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        compared: Iterable[int],
        summed: Iterable[int] = (),
        *,
        reads_utc: bool,
    ) -> None:
        super().__init__(columns, compared)
        #: Maps the position of each compared column to the ranks of its values. Two values have the
        #: same rank if the server treats them as equal.
        self.equality_ranks: dict[int, Ranks] = {}
        #: Maps the position of each compared column to the ranks of its values. A value that comes
        #: later in the server's order has a higher rank.
        self.order_ranks: dict[int, Ranks] = {}
        weights: list[str] = []
        self._durations: dict[int, int] = {}
        self._texts: dict[int, int] = {}
        ranked = []
        first = len(columns) + 1
        for index in sorted({*self.compared, *summed}):
            column = columns[index]
            if isinstance(column.field, models.DurationField):
                self._durations[index] = first + len(weights)
                weights.append(f"{_duration_parts(f'c{index}')} AS w{index}")
            elif index not in self.compared or _is_plain(column, reads_utc):
                continue
            else:
                ranked.append(index)
                if not isinstance(column.field, _WRITTEN_AS_TEXT):
                    self._texts[index] = first + len(weights)
                    # Give the column a name with AS. Otherwise PostgreSQL would name it like the
                    # column inside the CAST, so the name would occur twice.
                    weights.append(f"CAST(c{index} AS text) AS w{index}")
        # The position of an additional value, which says whether the server sends all digits of
        # floats. None if no floats are compared or added.
        self._all_digits: int | None = None
        if any(_has_floats(columns[index].field) for index in {*self.compared, *summed}):
            self._all_digits = first + len(weights)
            weights.append(_ALL_DIGITS)
        self.weights = tuple(weights)
        self.ranked = frozenset(ranked)
        #: Whether settings of the database session, such as the time zone, change the text of some
        #: compared values.
        self.depends_on_settings = bool(self._texts)

    def text(self, row: Row, column: int) -> str | None:
        """Return the server's text of a value that the server ranks; None for NULL.

        :param column: the position of the value in ``row``.
        """
        value = row[self._texts.get(column, column)]
        if value is not None and not isinstance(value, str):
            raise _unexpected(value)
        return value

    def checked(self, rows: Iterable[Row]) -> Iterable[Row]:
        return rows if self._all_digits is None else map(self._checked_digits, rows)

    def _checked_digits(self, row: Row) -> Row:
        if self._all_digits is not None and not row[self._all_digits]:
            raise refuse(
                "floats that the merge compares or adds, of a server whose extra_float_digits is"
                " below 1: it sends them without their last digits",
                "set extra_float_digits to 1, its default, for the role or in OPTIONS",
            )
        return row

    def normal(self, row: Row, column: int) -> Any:
        return self._value(row, column, self.equality_ranks)

    def ordered(self, row: Row, column: int) -> Any:
        return self._value(row, column, self.order_ranks)

    def _value(self, row: Row, column: int, ranks_by_column: Mapping[int, Ranks]) -> Any:
        if self._all_digits is not None:
            self._checked_digits(row)
        if column in self.ranked:
            text = self.text(row, column)
            ranks = ranks_by_column[column]
            return text if text is None or ranks is None else ranks[text]
        place = self._durations.get(column)
        if place is not None:
            parts = row[place]
            return None if parts is None else parts[0] * _MONTH + parts[1] * _DAY + parts[2]
        value = row[column]
        if isinstance(value, float | Decimal):
            return _NAN if math.isnan(value) else value
        if isinstance(value, memoryview | bytearray):
            return bytes(value)
        if value is None or _compares_as_in_python(value):
            return value
        raise _unexpected(value)

    def carry(self, column: int, source: Row, target: list[Any]) -> None:
        super().carry(column, source, target)
        for places in (self._texts, self._durations):
            if (place := places.get(column)) is not None:
                target[place] = source[place]

    def copy(self, row: list[Any], source: int, target: int) -> None:
        super().copy(row, source, target)
        for places in (self._texts, self._durations):
            if (place := places.get(target)) is not None:
                row[place] = row[places[source]]

    def add(self, column: int, source: Row, target: list[Any]) -> None:
        place = self._durations.get(column)
        if place is None:
            super().add(column, source, target)
        elif target[place] is None:
            self.carry(column, source, target)
        elif source[place] is not None:
            parts = [a + b for a, b in zip(target[place], source[place], strict=True)]
            target[place] = parts
            target[column] = _duration(parts)

    def average(self, row: list[Any], total: int, count: int, target: int, divide: Divide) -> None:
        place = self._durations.get(total)
        if place is None:
            super().average(row, total, count, target, divide)
            return
        months, days, microseconds = row[place]
        _refuse_months(months)
        value = row[target] = duration_quotient(days, microseconds, count)
        if (target_place := self._durations.get(target)) is not None:
            row[target_place] = [0, 0, value // datetime.timedelta(microseconds=1)]


def _is_plain(column: Column, reads_utc: bool) -> bool:
    """Whether Python compares the values of ``column`` like PostgreSQL, without ranks."""
    if isinstance(column.field, models.DateTimeField):
        return reads_utc
    return column.kind in ("plain", "uuid") or isinstance(column.field, models.BinaryField)


def _has_floats(field: Any) -> bool:
    while (element := getattr(field, "base_field", None)) is not None:
        field = element
    return isinstance(field, models.FloatField)


def _compares_as_in_python(value: Any) -> bool:
    if isinstance(value, datetime.time):
        # Python cannot compare times with a time zone as PostgreSQL does. PostgreSQL compares first
        # the moments and then the time zones. Python compares only the moments.
        return value.tzinfo is None
    return isinstance(value, int | bytes | datetime.date | uuid.UUID)


def _duration_parts(name: str) -> str:
    """Return SQL for an array of the months, days and microseconds of the interval ``name``.

    PostgreSQL stores an interval as these three numbers.
    """
    return (
        f"CASE WHEN {name} IS NOT NULL THEN CAST(ARRAY["
        f"EXTRACT(YEAR FROM {name}) * 12 + EXTRACT(MONTH FROM {name}), EXTRACT(DAY FROM {name}),"
        f" EXTRACT(EPOCH FROM {name} - DATE_TRUNC('day', {name})) * 1000000] AS bigint[]) END"
    )


def _duration(parts: Sequence[int]) -> datetime.timedelta:
    months, days, microseconds = parts
    _refuse_months(months)
    return datetime.timedelta(days=days, microseconds=microseconds)


def _refuse_months(months: int) -> None:
    # Refuse a sum of intervals with months. The driver converts a month to 30 days, but 12 months to
    # 365 days. So the sum of two converted intervals may differ from the converted sum.
    if months:
        raise refuse("a sum of intervals with months or years", "sum numbers of days")


def _unexpected(value: Any) -> Exception:
    return refuse(
        f"a comparison of values of type {type(value).__name__!r} where others were expected",
        "name the expression's output_field",
    )
