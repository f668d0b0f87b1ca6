"""The columns of a table, read and written as they are stored.

The methods of a project's own field classes are not called: ``from_db_value()`` may decrypt or
round, and ``pre_save()`` may set the present time. Instead, the values are converted by the
databases only, as for Django's own field of the same type. So a value may go from one kind of
database to another, and a time zone of a connection is respected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from django.db.models import (
    BigIntegerField,
    BinaryField,
    BooleanField,
    DateField,
    DateTimeField,
    DecimalField,
    DurationField,
    ExpressionWrapper,
    F,
    Field,
    FloatField,
    Model,
    TextField,
    TimeField,
    UUIDField,
)

from sharded_orm import compat
from sharded_orm.models.sharding.options import target_field

_SIMPLE: dict[str, Any] = {
    "BinaryField": BinaryField,
    "BooleanField": BooleanField,
    "DateField": DateField,
    "DateTimeField": DateTimeField,
    "DurationField": DurationField,
    "FloatField": FloatField,
    "TimeField": TimeField,
    "UUIDField": UUIDField,
}
_INTEGERS = (
    "AutoField", "BigAutoField", "SmallAutoField", "IntegerField", "BigIntegerField",
    "SmallIntegerField", "PositiveIntegerField", "PositiveBigIntegerField",
    "PositiveSmallIntegerField",
)  # fmt: skip
# JSON is copied as text: Python has only one None for NULL and for JSON's null, and would write
# numbers in its own way.
_TEXTS = (
    "CharField", "FileField", "FilePathField", "GenericIPAddressField", "IPAddressField",
    "JSONField", "SlugField", "TextField",
)  # fmt: skip


class StoredColumn:
    """A column of a model's own table.

    :param field: the model's field.
    """

    def __init__(self, field: Any) -> None:
        self.field = field
        self.name: str = field.attname
        self.column: str = field.column

    @cached_property
    def plain_field(self) -> Field[Any, Any] | None:
        """Django's own field for the values of the column; None if there is none."""
        target: Any = target_field(self.field)
        kind = target.get_internal_type()
        if kind in _SIMPLE:
            plain: Field[Any, Any] = _SIMPLE[kind]()
        elif kind in _INTEGERS:
            plain = BigIntegerField()
        elif kind in _TEXTS:
            plain = TextField()
        elif kind == "DecimalField":
            plain = DecimalField(max_digits=target.max_digits, decimal_places=target.decimal_places)
        else:
            return None
        return plain

    @property
    def _own(self) -> Any:
        assert self.plain_field is not None
        return self.plain_field

    def expression(self) -> Any:
        """Return the column for ``values_list()``, as it is stored."""
        return ExpressionWrapper(F(self.name), output_field=self._own)

    def parameter(self, value: Any, connection: Any) -> Any:
        """Return ``value`` as a parameter of a statement that stores it."""
        return self._own.get_db_prep_save(value, connection)

    def placeholder(self, value: Any, connection: Any) -> str:
        """Return the placeholder of ``value`` in a statement."""
        if isinstance(self._own, BinaryField):
            return compat.binary_placeholder(connection, value)
        return "%s"

    def from_database(self, value: Any) -> Any:
        """Return a value of :meth:`expression` such that equal values are equal in Python."""
        if value is not None and isinstance(self._own, BinaryField):
            return bytes(value)
        return value

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two values of the column are the same. NULL is the same as NULL only."""
        if one == other or one is None or other is None:
            return bool(one == other)
        if target_field(self.field).get_internal_type() == "JSONField":
            # Databases write the same JSON with different spaces.
            try:
                return _plain_json(one) == _plain_json(other)
            except ValueError:
                return False
        return bool(one != one and other != other)  # Both are "not a number".


def _plain_json(text: str) -> str:
    """Return JSON in one way of writing it. Unlike Python, JSON tells true from 1."""
    return json.dumps(json.loads(text), sort_keys=True)


def stored_columns(model: type[Model]) -> list[StoredColumn]:
    """Return the columns of the own table of ``model``, without those that the database computes."""
    return [
        StoredColumn(field)
        for field in model._meta.local_concrete_fields
        if not getattr(field, "generated", False)
    ]


def differing_names(
    columns: Sequence[StoredColumn], one: Sequence[Any], other: Sequence[Any]
) -> list[str]:
    """Return the names of the columns in which two rows differ."""
    return [
        column.name
        for column, a, b in zip(columns, one, other, strict=True)
        if not column.is_same(a, b)
    ]
