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
from sharded_orm.json_levels import MAX_LEVELS, has_too_many_levels
from sharded_orm.models.sharding.key_errors import describe

# Finds the character NUL in a JSON text, where it is written ``\u0000``. In ``\\u0000``, the first
# backslash escapes the second, so this is no NUL.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

# The scanner in C behind json.JSONDecoder.raw_decode(). Calling it directly saves time. It raises
# StopIteration if a text ends too early.
_read_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # missing in the stubs


class ValidatedJSONField(models.JSONField):
    """A ``JSONField`` that calls a value invalid if it is nested too deeply to be written as JSON."""

    def validate(self, value: Any, model_instance: Any) -> None:
        try:
            super().validate(value, model_instance)
        except RecursionError as exc:
            raise ValidationError(self.error_messages["invalid"], code="invalid") from exc


class BodyColumn(ValidatedJSONField):
    """The column with all fields of an object as JSON (Pinterest, P5). Because the fields have no
    columns, a new field needs no change of a table.

    The attribute of an instance is a dict. If the stored text is damaged, it is another type of
    value, and :func:`body_of` raises an error.
    """

    def deconstruct(self) -> Any:
        # Migrations name JSONField and not this class, so that they stay valid if this class moves
        # to another module.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.JSONField", args, kwargs

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        # Overrides JSONField.from_db_value(), which takes twice the time. A page decodes the body
        # of each of its objects.
        try:
            body, end = _read_json(value, 0)
            if end == len(value):
                return body
        except (TypeError, ValueError, StopIteration):
            pass  # Let Django handle None, a text with spaces around the JSON, or a damaged text.
        except RecursionError:
            return value  # The text has too many levels, so body_of() calls the body damaged.
        return super().from_db_value(value, expression, connection)

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        # If save() was called, it has prepared the body already. But a receiver of ``pre_save`` may
        # have changed the body after that. So if there are receivers, prepare it again.
        prepared = "_prepared" in model_instance.__dict__
        if not prepared or signals.pre_save.has_listeners(type(model_instance)):
            prepare_body(model_instance, add)
        return model_instance.data


def prepare_body(instance: Any, add: bool) -> None:
    """Prepare the body of an object for the database. Defaults are set, values move to the new
    names of renamed fields, removed fields are dropped, and values are validated.

    :param add: whether the object is new.
    :raises InvalidValue: a value is missing, cannot be JSON, or is refused by a validator of its
        field.
    :raises BodyTooLarge: the body is larger than ``ObjectMeta.max_body``.
    """
    body, options = body_of(instance), instance._object
    for field in instance.body_fields():
        field.prepare(instance, add)
    for name in options.removed:
        body.pop(name, None)
    _check_size(instance, body, options.max_body)


def check_body(instance: Any) -> None:
    """Check that the body of an object can be stored as JSON, and is not too large. Changes
    nothing.

    :raises InvalidValue: the body cannot be JSON.
    :raises BodyTooLarge: the body is larger than ``ObjectMeta.max_body``.
    """
    # Do this before the copy, which would raise RecursionError if the body has too many levels.
    _json_of(instance, body_of(instance))
    stored = copy.copy(instance)
    for field in stored.body_fields():
        # Ignore invalid values, because full_clean() reports them later, by field. Also ignore
        # missing values, because the program may still set them before the save.
        with suppress(ValidationError):
            field.prepare(stored, stored._state.adding)
    for name in stored._object.removed:
        stored.data.pop(name, None)
    _check_size(stored, body_of(stored), stored._object.max_body)


def body_of(instance: Any) -> dict[str, Any]:
    """Return the body of an object, a dict. A change of the dict changes the object, because the
    dict is not copied.

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
    text = _json_of(instance, body)
    if len(text) > limit:
        raise BodyTooLarge(
            f"The body of {describe(instance)} has {len(text)!r} bytes, and ObjectMeta.max_body is"
            f" {limit!r}. Store large values elsewhere, or raise the limit: below the largest packet of"
            " the servers, and knowing that the cache stores no value above 1 MB."
        )


def _json_of(instance: Any, body: dict[str, Any]) -> str:
    """Return the body of an object as JSON.

    :raises InvalidValue: the body cannot be JSON that every database can store and Python can read.
    """
    try:
        text = json.dumps(body, allow_nan=False)
        # PostgreSQL can store neither NUL nor a surrogate without its partner, so refuse both on
        # all databases. In JSON, a surrogate is written as ``\ud...``. encode() raises an error if
        # it has no partner.
        if "\\ud" in text:
            json.dumps(body, ensure_ascii=False).encode()
        if "\\u0000" in text and _NUL.search(text):
            raise ValueError("it has the character NUL")
        if has_too_many_levels(body, text):
            raise ValueError("it is nested too deeply")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidValue(
            f"The body of {describe(instance)} cannot be stored as JSON: {exc}. Use values that JSON"
            f" knows in fields.JSON, with at most {MAX_LEVELS} levels of lists and dicts, finite numbers,"
            " and text without NUL and lone surrogates."
        ) from exc
    return text


class VersionColumn(models.PositiveBigIntegerField):  # type: ignore[type-arg]  # only the stubs are generic
    """The version of an object, a number that each save raises by 1.

    A save stores the object only if the version in the database is still the one that was read.
    """

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.PositiveBigIntegerField", args, kwargs

    def pre_save(self, model_instance: Any, add: bool) -> int:
        version: int = getattr(model_instance, self.attname)
        return version if add else version + 1
