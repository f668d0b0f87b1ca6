"""Keys as people type them: which values the rows of a field can have at all."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, models

from sharded_orm.models.sharding.options import target_field


def typed_key(field: Any, text: str, alias: str) -> Any:
    """``text`` as a value of ``field`` that a row on ``alias`` can have. Asks no database.

    A strategy computes a shard for nearly anything; a number that no column holds, or a text
    that is too long for its field, has none.

    :param alias: of the database whose integers count: Django's validators know the default one.
    :raises ValidationError: no row can have it; says why.
    """
    try:
        value = field.to_python(text)
    except (TypeError, ValueError, ArithmeticError) as exc:  # No base64, say.
        raise ValidationError(f"it is no value of a {type(field).__name__} ({exc}).") from exc
    holder = target_field(field)
    holder.run_validators(value)
    if isinstance(holder, models.IntegerField) and isinstance(value, int):
        low, high = connections[alias].ops.integer_field_range(holder.get_internal_type())
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValidationError(f"its column holds numbers from {low} to {high}.")
    return value
