"""Keys that people type, converted to values that rows of a field can have."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, models

from sharded_orm.models.sharding.options import target_field


def typed_key(field: Any, text: str, alias: str) -> Any:
    """Convert ``text`` to a value of ``field`` that a row on ``alias`` can have. Asks no database.

    Without this check, a strategy would compute a shard even for a number that no column can hold,
    or for a text that is too long for its field.

    :param alias: the database whose range of integers counts; Django's validators use the
        default's.
    :raises ValidationError: no row can have the value; the message says why.
    """
    try:
        value = field.to_python(text)
    except (TypeError, ValueError, ArithmeticError) as exc:  # Invalid base64, for example.
        raise ValidationError(f"it is no value of a {type(field).__name__} ({exc}).") from exc
    holder = target_field(field)
    holder.run_validators(value)
    if isinstance(holder, models.IntegerField) and isinstance(value, int):
        low, high = connections[alias].ops.integer_field_range(holder.get_internal_type())
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValidationError(f"its column holds numbers from {low} to {high}.")
    return value
