"""The fields of objects: Django's own field classes, whose values are kept in the object's JSON.

They take Django's arguments, such as ``null``, ``default``, ``max_length``, ``choices`` and
``validators``. The additional argument ``was`` has the former names of the field.
"""

from __future__ import annotations

import json
from functools import cached_property
from inspect import getattr_static
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from sharded_orm.contrib.objects.body_column import ValidatedJSONField, body_of
from sharded_orm.contrib.objects.exceptions import (
    BodyFieldInQuery,
    DamagedObject,
    InvalidObjectType,
    InvalidValue,
    WrongObjectType,
)
from sharded_orm.contrib.objects.options import names_of
from sharded_orm.models.sharding.key_errors import describe

if TYPE_CHECKING:
    _FieldBase = models.Field[Any, Any]
else:
    _FieldBase = object

# Values of these types are stored in JSON as they are. Others, such as a date, are stored as the
# text that value_to_string() returns.
_OF_JSON = (str, int, float, dict, list, type(None))
# The types whose values can be changed in place, without an assignment to the object's attribute.
_MUTABLE = (dict, list)
_NOTHING = object()
# Maps to_python() methods of Django to the types of values that the method returns unchanged. For
# example, CharField.to_python() returns a str as it is, so the call can be left out.
_KEPT: dict[Any, frozenset[type]] = {
    models.Field.to_python: frozenset({str, int, float, bool}),
    models.CharField.to_python: frozenset({str}),
    models.TextField.to_python: frozenset({str}),
    models.IntegerField.to_python: frozenset({int}),
    models.FloatField.to_python: frozenset({float}),
    models.BooleanField.to_python: frozenset({bool}),
}
# Arguments of Django's fields about columns and indexes, which a field in a body does not have.
_OF_COLUMNS = (
    "primary_key", "unique", "db_index", "db_column", "db_default", "db_collation",
    "unique_for_date", "unique_for_month", "unique_for_year",
)  # fmt: skip


class BodyField(_FieldBase):
    """A mixin that keeps the values of a Django field in the JSON of an object.

    :param was: the former names of the field: a text, or a tuple of texts. If an object has no
        value under the new name, its value under a former name is used. The next save of the object
        stores it under the new name.
    """

    was: tuple[str, ...]

    def __init__(self, *args: Any, was: str | tuple[str, ...] = (), **kwargs: Any) -> None:
        if refused := sorted(kwargs.keys() & set(_OF_COLUMNS)):
            raise InvalidObjectType(
                f"{type(self).__name__} is stored in the body of an object, and does not take"
                f" {refused!r}. Values that must be found or unique need a mapping or a table."
            )
        self.was = names_of(f"'was' of {type(self).__name__}", was)
        super().__init__(*args, **kwargs)

    def get_attname_column(self) -> tuple[str, None]:
        # A field without a column is not a field of the table, so migrations and queries ignore it.
        return self.get_attname(), None

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if cls.__dict__.get(name, self) is None:
            return  # "name = None" in a class removes a field of its abstract base, as in Django.
        self.set_attributes_from_name(name)
        for attribute in {self.name, self.attname}:
            taken = getattr_static(cls, attribute, None)
            is_inherited = isinstance(taken, BodyAttribute) and taken.field.name == name
            if attribute in ("id", "near") or not (taken is None or is_inherited):
                raise InvalidObjectType(
                    f"{cls.__name__} cannot have a field {name!r}, because it has an attribute"
                    f" {attribute!r}. Give the field another name."
                )
        super().contribute_to_class(cls, name, private_only=True)
        setattr(cls, self.attname, BodyAttribute(self))

    def get_col(self, alias: Any, output_field: Any = None) -> Any:
        # Django calls this method if a query filters, orders or selects by the field. No such query
        # is possible.
        raise BodyFieldInQuery(
            f"{self.model.__name__}.{self.name} is in the bodies of the objects, which a query does not"
            " search. Find objects by their ids or through a mapping, and filter in Python; or store"
            " what must be searched in a table of its own."
        )

    # -- Values -------------------------------------------------------------------------

    def read(self, instance: Any) -> Any:
        """Return the field's value of an object. If the body has none, return the default.

        :raises DamagedObject: the body, or the value in it, cannot be read.
        """
        body = body_of(instance)
        stored = self._stored(body)
        if stored is not _NOTHING:
            self._watch(instance, stored)
            return self._from_json(instance, stored)
        value = self.get_default()
        if self.has_default() and callable(self.default):
            # Store the default in the body, because the next call of a callable default may return
            # another value. If the default is a list or dict, the program may change it in place,
            # and the change must reach the body.
            body[self.name] = self.to_json(value)
            return self.read(instance)
        if instance._state.adding:
            return value
        # Convert the default as if it had been stored. For example, the default of a DecimalField
        # may be the integer 0, which must become a Decimal.
        return self._from_json(instance, self.to_json(value))

    def write(self, instance: Any, value: Any) -> None:
        """Assign a value to the field of an object, in memory only.

        :raises ValidationError: the value is of a wrong type.
        """
        stored = self.to_json(value)
        body = body_of(instance)
        if not _is_same(body.get(self.name, _NOTHING), stored):
            instance.__dict__.setdefault("_assigned", set()).add(self.name)
        body[self.name] = stored
        self._watch(instance, stored)

    def is_changed(self, instance: Any) -> bool:
        """Return whether the field was assigned another value since the object was read or saved,
        or its list or dict was changed in place.
        """
        if self.name in instance.__dict__.get("_assigned", ()):
            return True
        seen = instance.__dict__.get("_seen", {})
        return self.name in seen and seen[self.name] != _text(self._stored(body_of(instance)))

    def _stored(self, body: dict[str, Any]) -> Any:
        if self.name in body:
            return body[self.name]
        return next((body[name] for name in self.was if name in body), _NOTHING)

    def _watch(self, instance: Any, stored: Any) -> None:
        """Remember the present content of a list or dict as JSON. is_changed() compares it later,
        to notice changes in place.
        """
        if isinstance(stored, _MUTABLE):
            seen = instance.__dict__.setdefault("_seen", {})
            if self.name not in seen:
                seen[self.name] = _text(stored)

    def to_json(self, value: Any) -> Any:
        """Return ``value`` in the form in which the object's JSON stores it.

        :raises ValidationError: the value is of a wrong type.
        """
        if value is None:
            return None
        if hasattr(value, "resolve_expression"):
            raise InvalidValue(
                f"{value!r} for {self.model.__name__}.{self.name} would have to be computed by the"
                " database. Compute it in Python, inside of edit()."
            )
        try:
            prepared = self.get_prep_value(self.to_python(value))
        except (TypeError, ValueError, ArithmeticError) as exc:
            raise InvalidValue(
                f"{value!r} is no value of {self.model.__name__}.{self.name}: {exc}."
            ) from exc
        if isinstance(prepared, _OF_JSON):
            return prepared
        return self.value_to_string(SimpleNamespace(**{self.attname: prepared}))  # type: ignore[arg-type]  # the method only reads this attribute of the row

    def _from_json(self, instance: Any, stored: Any) -> Any:
        if stored is None:
            return None
        try:
            return self.to_python(stored)
        except (ValidationError, TypeError, ValueError, ArithmeticError) as exc:
            raise DamagedObject(
                f"{describe(instance)} on {instance._state.db!r} has {stored!r} for {self.name!r}, which"
                f" is no value of {type(self).__name__}. Assign a value and save, or correct the body."
            ) from exc

    def prepare(self, instance: Any, add: bool) -> None:
        """Prepare the field's value of an object for a save: set a default, use the new name,
        validate.

        All values of a new object are validated. Of a stored object, only the changed values are
        validated. So an object can still be saved if a validator was added after it was stored.

        :raises InvalidValue: the value is missing, or a validator refuses it.
        """
        body = body_of(instance)
        if getattr(self, "auto_now", False) or getattr(self, "auto_now_add", False):
            self.pre_save(instance, add)
        for name in self.was:
            if name in body:
                former = body.pop(name)
                body.setdefault(self.name, former)
        if add and self.name not in body:
            body[self.name] = self.to_json(self.get_default())
        if not add and (self.name not in body or not self.is_changed(instance)):
            return  # If the body has no value, the default is read.
        value = self._from_json(instance, body[self.name])
        try:
            if value is None and not self.null:
                raise ValidationError(self.error_messages["null"], code="null")
            if value is not None:
                self.run_validators(value)
        except ValidationError as exc:
            raise InvalidValue({self.name: exc.error_list}) from exc


def _is_same(present: Any, stored: Any) -> bool:
    if isinstance(stored, _MUTABLE):
        return _text(present) == _text(stored)
    return type(present) is type(stored) and bool(present == stored)


def _text(value: Any) -> str | None:
    # Compare values by their JSON texts, because Python takes values such as [1] and [True] for
    # equal, although their JSON differs.
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):
        return None  # JSON cannot represent the value, so save() will raise an error for it.


def values_were_read(instance: Any) -> None:
    """Note that the object was just read from the database, so no field counts as changed."""
    instance.__dict__.pop("_assigned", None)
    instance.__dict__.pop("_seen", None)


def values_were_saved(instance: Any) -> None:
    """Note that the object was just saved, so no field counts as changed.

    The program may still hold a list or dict of the object and change it in place later. So the
    present contents are remembered for comparison.
    """
    instance.__dict__.pop("_assigned", None)
    if seen := instance.__dict__.get("_seen"):
        body = body_of(instance)
        instance.__dict__["_seen"] = {name: _text(body[name]) for name in seen if name in body}


class BodyAttribute:
    """The descriptor through which a field of the body is read and assigned, as in ``pin.note``."""

    def __init__(self, field: BodyField) -> None:
        self.field = field
        self._name = field.name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Do not look into instance.__dict__, because Python would first have to make this dict for
        # each object, which takes time.
        body = instance.data
        if type(body) is dict:
            value = body.get(self._name)
            if type(value) in self._kept:
                return value  # this takes a fifth of the time of the rest
        return self.field.read(instance)

    @cached_property
    def _kept(self) -> frozenset[type]:
        """The types of stored values that can be returned as they are, without to_python()."""
        return _KEPT.get(type(self.field).to_python, frozenset())

    def __set__(self, instance: Any, value: Any) -> None:
        self.field.write(instance, value)


class Text(BodyField, models.TextField):
    pass


class Char(BodyField, models.CharField):
    pass


class Email(BodyField, models.EmailField):
    pass


class URL(BodyField, models.URLField):
    def formfield(self, **kwargs: Any) -> Any:
        # "https" is the default of Django from 6.0 on. Without the argument, Django 5.2 emits a
        # warning.
        return super().formfield(**{"assume_scheme": "https", **kwargs})


class Slug(BodyField, models.SlugField):
    pass


class Integer(BodyField, models.BigIntegerField):
    pass


class Boolean(BodyField, models.BooleanField):
    pass


class Float(BodyField, models.FloatField):
    pass


class Decimal(BodyField, models.DecimalField):
    pass


class Date(BodyField, models.DateField):
    pass


class DateTime(BodyField, models.DateTimeField):
    pass


class Time(BodyField, models.TimeField):
    pass


class Duration(BodyField, models.DurationField):
    pass


class UUID(BodyField, models.UUIDField):
    pass


class IPAddress(BodyField, models.GenericIPAddressField):
    pass


class JSON(BodyField, ValidatedJSONField):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.encoder or self.decoder:
            raise InvalidObjectType(
                "JSON of sharded_orm.contrib.objects.fields does not take 'encoder' and 'decoder', because"
                " its lists and dicts are a part of the body, and are stored as they are. Use values that"
                " JSON knows."
            )


class Ref(BodyField, models.BigIntegerField):
    """A reference to an object on any shard. ``pin.board_id`` is its id, ``pin.board`` the object
    itself.

    The first read of ``pin.board`` costs one query, or one request to the cache. It raises
    ``DoesNotExist`` if that object was deleted. This can happen because no database enforces
    references between shards.

    :param to: the class of the object, its label, or ``"self"``.
    """

    def __init__(self, to: Any, *args: Any, **kwargs: Any) -> None:
        self.to = to
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        return name, path, [self.to, *args], kwargs

    def get_attname(self) -> str:
        return f"{self.name}_id"

    def contribute_to_class(self, cls: Any, name: str, *args: Any, **kwargs: Any) -> None:
        super().contribute_to_class(cls, name, *args, **kwargs)
        setattr(cls, name, ReferenceAttribute(self))

    @cached_property
    def target(self) -> Any:
        if not isinstance(self.to, str):
            return self.to
        if self.to == "self":
            return self.model
        label = self.to if "." in self.to else f"{self.model._meta.app_label}.{self.to}"
        return apps.get_model(label)

    def write(self, instance: Any, value: Any) -> None:
        if value is not None:
            value = self.to_python(value)
            self.target._object.check_id(self.target.__name__, value)
        super().write(instance, value)

    def save_form_data(self, instance: Any, data: Any) -> None:
        setattr(instance, self.attname, data)

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(**{"validators": [self._refuse_other_type], **kwargs})

    def _refuse_other_type(self, value: int) -> None:
        try:
            self.target._object.check_id(self.target.__name__, value)
        except ValueError as exc:
            raise self._missing(value) from exc

    def _missing(self, value: Any) -> ValidationError:
        return ValidationError(
            _("There is no %(model)s with the id %(id)s."),
            # Form fields replace the message of an error with the code "invalid" by their own,
            # which for numbers is "Enter a whole number."
            code="invalid_choice",
            params={"model": self.target._meta.verbose_name, "id": value},
        )

    def validate(self, value: Any, model_instance: Any) -> None:
        """Raise an error if no object has this id."""
        super().validate(value, model_instance)
        if value is not None:
            try:
                self.target.objects.without_conditions().get(value)
            except DamagedObject:
                pass  # It exists, and this object may refer to it.
            except (ObjectDoesNotExist, ValueError) as exc:
                raise self._missing(value) from exc


class ReferenceAttribute(BodyAttribute):
    """The descriptor that reads the object to which a reference leads, such as ``pin.board``."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        field: Any = self.field
        pk = field.read(instance)
        if pk is None:
            return None
        # Do not keep the object in _state.fields_cache, where Django keeps related objects.
        # sharded_orm assumes that all objects there are on the shard of this object, and a
        # reference can lead to another shard.
        known = instance.__dict__.setdefault("_referred", {})
        row = known.get(field.name)
        if row is None or row.pk != pk:
            row = known[field.name] = field.target.objects.without_conditions().get(pk)
        return row

    def __set__(self, instance: Any, value: Any) -> None:
        field: Any = self.field
        if value is not None and not isinstance(value, field.target._meta.concrete_model):
            raise WrongObjectType(
                f"{value!r} is no {field.target.__name__}. Assign an object of that class to"
                f" {field.name!r}, or an id to {field.attname!r}."
            )
        if value is not None and value.pk is None:
            raise WrongObjectType(f"The {field.target.__name__} has no id yet. Save it first.")
        field.write(instance, None if value is None else value.pk)
        instance.__dict__.setdefault("_referred", {})[field.name] = value
