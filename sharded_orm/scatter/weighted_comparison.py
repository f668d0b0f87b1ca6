"""Compares values as MariaDB and MySQL do.

These servers compare texts by a collation. So, for each compared text column, the query selects
three more values: the text's sort weight (``WEIGHT_STRING``), the weight of a blank, and the
collation's name. A ``PAD SPACE`` collation compares as if the shorter text continued with blanks.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import models

from sharded_orm.scatter.arithmetic import add_limited, check_quotient_places
from sharded_orm.scatter.comparison import Column, Comparison, Row
from sharded_orm.scatter.refusals import refuse

# Every server (MariaDB and MySQL) certainly compares this many leading bytes of a text's sort
# weight. A server sorts only by the first max_sort_length (1024) bytes. Some servers apply this
# limit to the bytes of the characters, others to the bytes of the weights. A character has at most
# 4 bytes, and its weight at least 2. So 1024 bytes of characters have at least 512 bytes of weight.
_SURELY_SORTED = 512

# Text can be compared by its sort weight if its collation has only one level of sort weights, and
# the collation's name begins with one of these names.
_CHARSETS = ("utf8mb4", "utf8mb3", "utf8", "latin1", "ascii", "ucs2", "uca1400")
_SEVERAL_LEVELS = re.compile(r"_(as_ci|as_cs|ai_cs|w2)$")


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


class MySQLComparison(Comparison):
    """Compares values as MariaDB and MySQL do: text by its sort weights, other values as Python
    does.

    :param uuid_version: the version of the server if it has a native type for UUIDs; otherwise
        None.
    :param divides: whether the rows have averages or quotients of decimal numbers.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        compared: Iterable[int],
        *,
        uuid_version: tuple[int, ...] | None,
        divides: bool = False,
    ) -> None:
        super().__init__(columns, compared)
        self._uuid_version = uuid_version
        # Maps each compared column to the collation of its first text.
        self._collations: dict[int, str] = {}
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
        count = 3 * len(weighted) + len(dates)
        self._quotient_places = first + count if divides else None
        if divides:
            self.weights += ("@@div_precision_increment",)

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
        if (other := self._collations.setdefault(column, collation)) != collation:
            raise refuse(
                f"text compared by the collation {other!r} on some shards and by {collation!r} on"
                " others",
                "give the column the same collation on all shards ('manage.py shards check' lists"
                " the differences), or use Collate(field, ...)",
            )
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

    def checked(self, rows: Iterable[Row]) -> Iterable[Row]:
        place = self._quotient_places
        return rows if place is None else map(partial(_checked_places, place), rows)

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


def _checked_places(place: int, row: Row) -> Row:
    check_quotient_places(row[place])
    return row


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
