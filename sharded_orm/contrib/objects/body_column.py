"""The columns of an object's table: its body as JSON, and its version."""

from __future__ import annotations

import copy
import json
import re
from contextlib import suppress
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import signals

from sharded_orm.contrib.objects.exceptions import BodyTooLarge, DamagedObject, InvalidValue
from sharded_orm.models.sharding.key_errors import describe

# The escape of the character NUL in a JSON text. An escaped backslash before "u0000" is no NUL.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

# The function in C that raw_decode() calls. It raises StopIteration at the end of the text.
_read_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # missing in the stubs


class BodyColumn(models.JSONField):
    """The column with the JSON of all fields of an object (Pinterest, P5). New fields change no table.

    The attribute of an instance is a dict. If the stored body is damaged, it is a text or another
    kind of value, which :func:`body_of` refuses.
    """

    def deconstruct(self) -> Any:
        # Migrations contain a plain JSONField, so that they stay valid if this class moves.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.JSONField", args, kwargs

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        # Overrides JSONField.from_db_value(), which takes twice the time. The time matters, because
        # a page decodes a body for each of its objects.
        if type(value) is str and value[:1] == "{":
            try:
                body, end = _read_json(value, 0)
            except (ValueError, StopIteration):
                return value  # as Django does
            if end == len(value):
                return body
        return super().from_db_value(value, expression, connection)

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        # save() has prepared the body already. But receivers of ``pre_save`` may have changed it
        # since.
        prepared = "_prepared" in model_instance.__dict__
        if not prepared or signals.pre_save.has_listeners(type(model_instance)):
            prepare_body(model_instance, add)
        return model_instance.data


def prepare_body(instance: Any, add: bool) -> None:
    """Complete the body of an object for the database, and check it.

    :param add: whether the object is new.
    :raises InvalidValue: a value is missing, cannot be JSON, or is refused by a validator of its field.
    :raises BodyTooLarge: the body is larger than ``ObjectMeta.max_body``.
    """
    body, options = body_of(instance), instance._object
    for field in instance.body_fields():
        field.prepare(instance, add)
    for name in options.removed:
        body.pop(name, None)
    _check_size(instance, body, options.max_body)


def check_body(instance: Any) -> None:
    """Check that the body of an object can be stored: its size, and that it is JSON. Changes nothing.

    :raises InvalidValue: the body cannot be JSON.
    :raises BodyTooLarge: the body is larger than ``ObjectMeta.max_body``.
    """
    stored = copy.copy(instance)
    for field in stored.body_fields():
        # Other checks are made for the values themselves, and a value may still be missing.
        with suppress(ValidationError):
            field.prepare(stored, stored._state.adding)
    for name in stored._object.removed:
        stored.data.pop(name, None)
    _check_size(stored, body_of(stored), stored._object.max_body)


def body_of(instance: Any) -> dict[str, Any]:
    """Return the body of an object, a dict. To change the dict is to change the object.

    :raises DamagedObject: the stored body is no JSON object.
    """
    body = instance.data
    if isinstance(body, dict):
        return body
    raise DamagedObject(
        f"The body of {describe(instance)} on {instance._state.db!r} is {str(body)[:60]!r}, which is"
        " no JSON object. Restore its column 'data' from a backup, or purge() the object."
    )


def _check_size(instance: Any, body: dict[str, Any], limit: int) -> None:
    try:
        text = json.dumps(body, allow_nan=False)
        # Refuse single surrogates and NUL on all databases, because PostgreSQL cannot store them.
        if "\\ud" in text:
            json.dumps(body, ensure_ascii=False).encode()
        if "\\u0000" in text and _NUL.search(text):
            raise ValueError("it has the character NUL")
    except (TypeError, ValueError) as exc:
        raise InvalidValue(
            f"The body of {describe(instance)} cannot be stored as JSON: {exc}. Use values that JSON"
            " knows in fields.JSON, finite numbers, and text without NUL and lone surrogates."
        ) from exc
    if len(text) > limit:
        raise BodyTooLarge(
            f"The body of {describe(instance)} has {len(text)!r} bytes, and ObjectMeta.max_body is"
            f" {limit!r}. Store large values elsewhere, or raise the limit: below the largest packet of"
            " the servers, and knowing that the cache stores no value above 1 MB."
        )


class VersionColumn(models.PositiveBigIntegerField):  # type: ignore[type-arg]  # only the stubs are generic
    """Counts the changes of an object.

    Each UPDATE of an object has as a condition that the stored version is the one that was read.
    """

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.PositiveBigIntegerField", args, kwargs

    def pre_save(self, model_instance: Any, add: bool) -> int:
        version: int = getattr(model_instance, self.attname)
        return version if add else version + 1
