"""Read and write the columns of a table in the form in which the database stores them.

An import copies values without calling the methods of a project's own field classes. For example,
``from_db_value()`` may decrypt a value, and ``pre_save()`` may set the present time. Instead, each
value is converted as by Django's own field of the same type. So values can be copied between
different kinds of databases, and the time zones of connections are respected.
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
# Types whose values are copied as texts. JSON is copied as text, too, because a parser in Python
# would turn both NULL and JSON's null into None, and might change the format of numbers.
_TEXTS = (
    "CharField", "FileField", "FilePathField", "GenericIPAddressField", "IPAddressField",
    "JSONField", "SlugField", "TextField",
)  # fmt: skip


class StoredColumn:
    """A column of a model's own table. Columns that a model inherits are in the tables of its
    parents.

    :param field: the model's field for the column.
    """

    def __init__(self, field: Any) -> None:
        self.field = field
        self.name: str = field.attname
        self.column: str = field.column

    @cached_property
    def plain_field(self) -> Field[Any, Any] | None:
        """One of Django's own fields, which reads and writes the values of the column. The
        project's field class is not used, because its methods may change the values.

        None if Django has no field for the type of the column.
        """
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
        """Return an expression for ``values_list()`` that reads the column in its stored form."""
        return ExpressionWrapper(F(self.name), output_field=self._own)

    def parameter(self, value: Any, connection: Any) -> Any:
        """Return ``value`` as a parameter of a statement that stores it."""
        return self._own.get_db_prep_save(value, connection)

    def placeholder(self, value: Any, connection: Any) -> str:
        """Return the text that stands for ``value`` in a statement, such as ``%s``."""
        if isinstance(self._own, BinaryField):
            return compat.binary_placeholder(connection, value)
        return "%s"

    def from_database(self, value: Any) -> Any:
        """Convert a value that was read with :meth:`expression` to one that Python's ``==``
        compares correctly.
        """
        if value is not None and isinstance(self._own, BinaryField):
            return bytes(value)
        return value

    def is_same(self, one: Any, other: Any) -> bool:
        """Return whether two values of the column are the same. NULL equals only NULL."""
        if one == other or one is None or other is None:
            return bool(one == other)
        if target_field(self.field).get_internal_type() == "JSONField":
            # Compare the parsed JSON, because databases may format the same JSON differently.
            try:
                return _plain_json(one) == _plain_json(other)
            except ValueError:
                return False
        return bool(one != one and other != other)  # Two NaN values are the same.


def _plain_json(text: str) -> str:
    """Return the JSON ``text`` in a form that is the same for equal values.

    To find out whether two values are equal, compare these texts, not the parsed values. In Python,
    ``True == 1`` is true, but in JSON ``true`` and ``1`` are different values.
    """
    return json.dumps(json.loads(text), sort_keys=True)


def stored_columns(model: type[Model]) -> list[StoredColumn]:
    """Return the columns of the table of ``model``, except those that the database computes."""
    return [
        StoredColumn(field) for field in model._meta.local_concrete_fields if not field.generated
    ]


def differing_names(
    columns: Sequence[StoredColumn], one: Sequence[Any], other: Sequence[Any]
) -> list[str]:
    """Return the names of the columns in which two rows differ.

    :param one: the values of the first row, in the order of ``columns``; ``other`` has those of the
        second row.
    """
    return [
        column.name
        for column, a, b in zip(columns, one, other, strict=True)
        if not column.is_same(a, b)
    ]
