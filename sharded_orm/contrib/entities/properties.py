"""Converts the properties of entities between Python, the stored body, and columns of indexes.

The body of an entity has all its properties as JSON (never a pickle), compressed by zlib. The
checksum of zlib reveals a damaged body.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.functional import Promise
from django.utils.timezone import is_aware

from sharded_orm.contrib.entities.exceptions import InvalidProperty
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
    """Return ``value`` converted by ``field``.

    :raises InvalidProperty: the value does not fit the field.
    """
    try:
        converted = field.to_python(value)
        field.run_validators(converted)
        if isinstance(converted, datetime) and is_aware(converted):
            # Convert the time to UTC, because databases return times in UTC. This raises
            # OverflowError for some times in the years 1 and 9999.
            converted = converted.astimezone(UTC)
    except ValidationError as exc:
        raise InvalidProperty(f"The property {name}={value!r}: {'; '.join(exc.messages)}") from exc
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidProperty(f"The property {name}={value!r}: {exc}") from exc
    if isinstance(converted, str) and not isinstance(value, str | Promise):
        # Refuse other types, because Django's field would convert any object to text, such as a
        # list to "['a']".
        raise InvalidProperty(f"The property {name}={value!r} is no text. Convert it.")
    if isinstance(value, float) and converted != value:
        raise InvalidProperty(f"The property {name}={value!r} has a fraction. Round it.")
    if isinstance(value, datetime) and not isinstance(converted, datetime):
        raise InvalidProperty(f"The property {name}={value!r} is to be a date. Drop the time.")
    if isinstance(converted, datetime) and is_aware(converted) != settings.USE_TZ:
        raise InvalidProperty(
            f"The property {name}={value!r}: a time {'needs' if settings.USE_TZ else 'may not have'} a"
            f" time zone, as USE_TZ is {settings.USE_TZ}."
        )
    if isinstance(converted, str) and not _is_storable(converted):
        raise InvalidProperty(
            f"The property {name}={value!r} has a character that no database stores."
        )
    return converted


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
            f"The property {name!r} is {value!r}, no value of JSON, so it would not be read as it was"
            " written. Convert it, or declare the property in the fields of the store."
        )
    return zlib.compress(text.encode("ascii"))


def _json_text(values: Mapping[Any, Any]) -> str | None:
    """Return ``values`` as JSON; None if they would be different when the JSON is read.

    For example, a tuple would be read as a list, and the key 1 as the text "1".
    """
    try:
        text = json.dumps(values, allow_nan=False, separators=(",", ":"))
        return text if json.loads(text) == values else None
    except (TypeError, ValueError, RecursionError):
        return None


def decode(fields: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """Return the properties in the body of an entity.

    :raises ValueError: the body is damaged. The message says how.
    """
    try:
        properties = json.loads(zlib.decompress(body))
    except (zlib.error, ValueError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc
    if not isinstance(properties, dict):
        raise ValueError(f"it holds a {type(properties).__name__}, not a set of properties")
    for name, field in fields.items():
        if (value := properties.get(name)) is not None:
            try:
                properties[name] = field.to_python(value)
            except (ValidationError, OverflowError, TypeError) as exc:
                raise ValueError(f"its {name!r} is {value!r}, no {type(field).__name__}") from exc
    return properties


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
