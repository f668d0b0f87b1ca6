"""Converts the properties of entities between Python, the stored body, and columns of indexes.

The body of an entity has all its properties as JSON (never a pickle), compressed by zlib. The
checksum of zlib reveals a damaged body.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from functools import cache
from numbers import Number
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, models
from django.utils.functional import Promise
from django.utils.timezone import is_aware

from sharded_orm.contrib.entities.exceptions import InvalidProperty
from sharded_orm.json_levels import MAX_LEVELS, has_too_many_levels
from sharded_orm.models.fields import ExactCharField

#: The field classes that a property of an index may have. With others, such as FloatField,
#: databases may disagree on which values are equal, or how they are sorted.
FIELDS = (
    models.BooleanField,
    models.DateField,  # and DateTimeField
    models.IntegerField,
    models.UUIDField,
    ExactCharField,
)
#: An error message cuts a value off after this number of characters.
_SHOWN = 200


def shown(value: Any) -> str:
    """Return ``value`` for an error message, cut off if it is long."""
    try:
        text = repr(value)
    except Exception:  # for example an int of 5000 digits, or lists in lists
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def clean(fields: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``properties``, with the values of declared properties converted by their fields.

    :param fields: the fields of declared properties, by name.
    :raises InvalidProperty: a value does not fit its field.
    """
    cleaned = dict(properties)
    for name, field in fields.items():
        if (value := cleaned.get(name)) is not None:
            cleaned[name] = clean_value(field, name, value)
    return cleaned


def clean_value(field: Any, name: str, value: Any) -> Any:
    """Return ``value`` converted by ``field``, if the validators of the field accept it.

    :raises InvalidProperty: the value does not fit the field.
    """
    converted = _converted(field, name, value)
    try:
        field.run_validators(converted)
    except ValidationError as exc:
        raise InvalidProperty(f"The property {name}={shown(value)}: {_reason(exc)}") from exc
    return converted


def _converted(field: Any, name: str, value: Any) -> Any:
    """Return ``value`` converted by ``field``.

    :raises InvalidProperty: the conversion fails, or would change the value.
    """
    try:
        converted = field.to_python(value)
        if isinstance(converted, datetime) and is_aware(converted):
            # Convert the time to UTC, because databases return times in UTC. This raises
            # OverflowError for some times in the years 1 and 9999.
            converted = converted.astimezone(UTC)
    except ValidationError as exc:
        raise InvalidProperty(f"The property {name}={shown(value)}: {_reason(exc)}") from exc
    except (ArithmeticError, TypeError, ValueError) as exc:
        # Decimal("sNaN") raises an ArithmeticError whatever it is compared with.
        raise InvalidProperty(f"The property {name}={shown(value)}: {exc}") from exc
    reason = _refusal(value, converted)
    if reason:
        raise InvalidProperty(f"The property {name}={shown(value)}{reason}")
    return converted


def _reason(error: ValidationError) -> str:
    """Return the messages of ``error``, cut off if they are long."""
    try:
        return "; ".join(error.messages)[:_SHOWN]
    except Exception:
        # The messages may contain the value, and a value such as 10**5000 has no text.
        return "the field does not take it"


def _refusal(value: Any, converted: Any) -> str:
    """Return the rest of a sentence that says why a field must not convert ``value`` to
    ``converted``; "" if there is no reason.
    """
    if isinstance(converted, str):
        # Refuse other types, because Django's field would convert any object to text, such as a
        # list to "['a']".
        if not isinstance(value, str | Promise):
            return " is no text. Convert it."
        if not _is_storable(converted):
            return " has a character that no database stores."
    elif isinstance(converted, int):
        if converted != value and isinstance(value, Number):
            return " has a fraction. Round it."
    elif isinstance(converted, datetime):
        if is_aware(converted) != settings.USE_TZ:
            needs = "needs" if settings.USE_TZ else "may not have"
            return f": a time {needs} a time zone, as USE_TZ is {settings.USE_TZ}."
    elif isinstance(value, datetime):
        return " is to be a date. Drop the time."
    return ""


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def encode(fields: Mapping[str, Any], cleaned: Mapping[str, Any]) -> bytes:
    """Return the compressed body of an entity.

    :param cleaned: the result of :func:`clean`.
    :raises InvalidProperty: a value would be different when it is read.
    """
    plain = {name: _to_json(value) if name in fields else value for name, value in cleaned.items()}
    text = _json_text(plain)
    if text is None:
        name, value = next(item for item in plain.items() if _json_text(dict([item])) is None)
        raise InvalidProperty(
            f"The property {name!r} is {shown(value)}. That is no value of JSON, or has more than {MAX_LEVELS}"
            " levels, so it would not be read as it was written. Convert it, or declare the property in the"
            " fields of the store."
        )
    return zlib.compress(text.encode("ascii"))


def _json_text(values: Mapping[Any, Any]) -> str | None:
    """Return ``values`` as JSON; None if they would be different when the JSON is read.

    For example, a tuple would be read as a list, and the key 1 as the text "1".
    """
    try:
        text = json.dumps(values, allow_nan=False, separators=(",", ":"))
        is_same = json.loads(text) == values
    except (TypeError, ValueError, RecursionError):
        return None
    return text if is_same and not has_too_many_levels(values, text) else None


def decode(fields: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """Return the properties in the body of an entity.

    :raises ValueError: the body is damaged. The message says how.
    """
    try:
        properties = json.loads(zlib.decompress(body))
    except (zlib.error, ValueError, RecursionError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    if not isinstance(properties, dict):
        raise ValueError(f"it holds a {type(properties).__name__}, not a set of properties")
    for name, field in fields.items():
        if (value := properties.get(name)) is not None:
            try:
                properties[name] = _stored_value(field, name, value)
            except ValueError as exc:
                raise ValueError(
                    f"its {name!r} is {shown(value)}, which its {type(field).__name__} does not take"
                ) from exc
    return properties


def _stored_value(field: Any, name: str, value: Any) -> Any:
    """Return the value of a declared property in a body, converted by its field.

    :raises ValueError: the field does not take the value. So it was stored before the store
        declared the property with this field.
    """
    kind = _type_left_unchanged(type(field).to_python)
    # Most values are stored as they are, so do not pay for a conversion that changes nothing.
    stored = value if type(value) is kind else _converted(field, name, value)
    if kind is int:
        low, high = _integer_range(field.get_internal_type())
        fits = low <= stored <= high
    elif kind is str:
        fits = _is_storable(stored) and (
            field.max_length is None or len(stored) <= field.max_length
        )
    else:
        fits = True
    if not fits:
        raise ValueError(f"{shown(stored)} is out of range")
    return stored


def _type_left_unchanged(to_python: Any) -> type[Any] | None:
    """Return the type of the values that this method of a field returns as they are."""
    if to_python is models.IntegerField.to_python:
        return int
    return str if to_python is models.CharField.to_python else None


@cache
def _integer_range(kind: str) -> tuple[int, int]:
    """Return the least and the greatest number of a column."""
    low, high = connection.ops.integer_field_range(kind)
    return (-(2**63) if low is None else low), (2**63 - 1 if high is None else high)


def _to_json(value: Any) -> Any:
    """Return the value of a declared property as a JSON type, for example a UUID or a date as text.

    The method ``to_python()`` of the property's field converts it back.
    """
    if isinstance(value, UUID):
        return value.hex
    if isinstance(value, date):
        return value.isoformat()
    return value


def values_to_json(values: tuple[Any, ...]) -> list[Any]:
    """Return values of columns as JSON types. :func:`values_from_json` reverses this."""
    return [_to_json(value) for value in values]


def values_from_json(fields: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    """Return the values of columns that :func:`values_to_json` has turned into JSON types.

    :raises ValueError: ``values`` do not fit the columns ``fields``.
    """
    if len(values) != len(fields):
        raise ValueError(f"{len(values)} values for {len(fields)} columns")
    try:
        return tuple(field.to_python(value) for field, value in zip(fields, values, strict=True))
    except (ValidationError, OverflowError, TypeError) as exc:
        raise ValueError(str(exc)) from exc
