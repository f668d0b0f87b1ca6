"""Finds out which values Django sends to the database unchanged.

A plan need not call the field's methods for such values, which saves time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from django.db import models
from django.db.backends.base.operations import BaseDatabaseOperations

# Methods of Django that prepare a value for the database. Each is mapped to a type whose values the
# method returns unchanged.
_PREPARE: dict[Callable[..., Any], type] = {
    models.IntegerField.get_prep_value: int,
    models.FloatField.get_prep_value: float,
    models.CharField.get_prep_value: str,
    models.TextField.get_prep_value: str,
    models.BooleanField.get_prep_value: bool,
}
# The methods that the methods in _PREPARE call.
_CONVERT = frozenset({
    models.IntegerField.to_python, models.FloatField.to_python, models.CharField.to_python,
    models.TextField.to_python, models.BooleanField.to_python,
})  # fmt: skip
_METHODS = frozenset({"get_db_prep_save", "get_db_prep_value", "get_prep_value", "to_python"})
# Maps the names in _METHODS to the methods of Django's DateTimeField. These methods do not change a
# datetime with a time zone. Only a method of the backend, which they call last, adapts it.
_PREPARE_DATETIME = {
    "get_db_prep_save": models.Field.get_db_prep_save,
    "get_db_prep_value": models.DateTimeField.get_db_prep_value,
    "get_prep_value": models.DateTimeField.get_prep_value,
    "to_python": models.DateTimeField.to_python,
}


def only_adapts_datetimes(field: Any) -> bool:
    """Whether only the backend changes a datetime with a time zone that is stored in ``field``.

    The backend does so with ``adapt_datetimefield_value()``. Return False if the field, or its
    class, has a method of its own that prepares values, which may change the datetime, too.
    """
    field_class: Any = type(field)
    return (
        _METHODS.isdisjoint(field.__dict__)
        and all(getattr(field_class, name) is method for name, method in _PREPARE_DATETIME.items())
        and _has_only_djangos_methods(field_class)
    )


def is_sent_unchanged(field: Any, kind: type, connection: Any) -> bool:
    """Whether ``field`` sends each value of exactly the type ``kind`` to the database unchanged.

    False if the class of the field, or the backend, overrides Django's method for it. The answer
    holds for all connections of one class.
    """
    if type(field) in (models.ForeignKey, models.OneToOneField):
        # Django lets the field to which a foreign key refers prepare the value.
        field = field.target_field
    field_class: Any = type(field)
    prepared_type = _PREPARE.get(field_class.get_prep_value)
    if (
        prepared_type is None
        or kind not in (prepared_type, type(None))
        or field_class.to_python not in _CONVERT
        or field_class.get_db_prep_save is not models.Field.get_db_prep_save
        or not _METHODS.isdisjoint(field.__dict__)
        or not _has_only_djangos_methods(field_class)
    ):
        return False
    if field_class.get_db_prep_value is models.IntegerField.get_db_prep_value:
        adapt = type(connection.ops).adapt_integerfield_value
        return adapt is BaseDatabaseOperations.adapt_integerfield_value
    return field_class.get_db_prep_value is models.Field.get_db_prep_value


@cache
def _has_only_djangos_methods(field_class: Any) -> bool:
    """Whether fields of this class prepare values only by methods of Django.

    This function looks at all base classes, because Django's methods call ``super()``. If a class
    inherits from a field of Django and then from a mixin, this calls the method of the mixin.
    """
    return all(
        _METHODS.isdisjoint(vars(base)) or base.__module__.startswith("django.")
        for base in field_class.__mro__
    )
