"""Convert keys that people type to values of a model field."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, models

from sharded_orm.models.sharding.options import target_field


def typed_key(field: Any, text: str, alias: str) -> Any:
    """Convert ``text`` to a value of ``field``, and check that a row on ``alias`` can have the
    value.

    Sends no query. Without the check, a key that no column can hold, such as a far too large
    number, would still get a shard, because most strategies compute a shard for any value.

    :param alias: the database whose limits of integers are checked. Django's own validators check
        only those of the default database.
    :raises ValidationError: no row can have the value; the message says why.
    """
    try:
        value = field.to_python(text)
    except (TypeError, ValueError, ArithmeticError) as exc:  # For example, invalid base64.
        raise ValidationError(f"it is no value of a {type(field).__name__} ({exc}).") from exc
    holder = target_field(field)
    holder.run_validators(value)
    if isinstance(holder, models.IntegerField) and isinstance(value, int):
        low, high = connections[alias].ops.integer_field_range(holder.get_internal_type())
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValidationError(f"its column holds numbers from {low} to {high}.")
    return value
