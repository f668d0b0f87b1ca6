"""The declaration of lookups in ``ShardMeta``, and the form in which their values are stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import models
from django.db.models.expressions import Value

from sharded_orm import compat, runtime
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.lookup import Lookup
from sharded_orm.contrib.lookups.tables import LookupTable
from sharded_orm.models.fields import ExactCharField
from sharded_orm.models.fields.generated_id import EmbeddedShardMixin
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.routing.modulo import ModuloStrategy

#: The columns of entries hold values and shard keys as text, of at most this many characters.
MAX_VALUE, MAX_KEY = 255, 100

# Methods by which a field class can change the value on its way to or from the database. A lookup
# does not call all of them. So if a class of the project overrides one, the lookup might store
# another value than the column. Such a field cannot have a lookup.
_CONVERSIONS = (
    "pre_save", "get_prep_value", "get_db_prep_value", "get_db_prep_save", "from_db_value",
    "get_placeholder",
)  # fmt: skip


@dataclass(frozen=True)
class ModelLookup:
    """A lookup of one model, by which a query finds rows from the value of ``field``, without their
    shard key.
    """

    model: Any
    field: Any
    unique: bool
    options: ShardOptions
    #: The label of the project's model whose table has the lookup's entries (rows with a value and
    #: the shard key); None if they are in the global database.
    table_name: str | None = None

    @cached_property
    def name(self) -> str:
        """The name under which the entries of the lookup are stored: ``app.model.field``."""
        return f"{self.model._meta.label_lower}.{self.field.name}"

    @property
    def key(self) -> Any:
        return self.options.key

    @cached_property
    def table(self) -> ShardOptions | None:
        """The ``ShardMeta`` of the project's model that stores the entries of the lookup.

        None if they are in the global database.
        """
        return None if self.table_name is None else table_options(self.table_name)

    @cached_property
    def problem(self) -> str | None:
        """The reason why the model cannot have this lookup; None if it can.

        The reason completes a sentence that begins with "The lookup", such as "needs a primary key
        of one column".
        """
        meta = self.model._meta
        if self.options.key_is_generated:
            return "needs a shard key that is known before the insert, not a generated one"
        if not isinstance(meta.pk, models.Field) or isinstance(meta.pk, models.CompositePrimaryKey):
            return "needs a primary key of one column"
        if meta.pk.has_db_default():
            return "needs a primary key that has no default of the database"
        for what, field in (("primary key", meta.pk), ("shard key", self.key)):
            if field not in meta.local_concrete_fields:
                return f"needs the {what} in the model's own table"
            if (problem := _problem_of_field(field, MAX_KEY)) is not None:
                return f"cannot use the {what} {field.name!r}, which {problem}"
        if (problem := self._problem_of_table()) is not None:
            return problem
        if (problem := self._problem_of_database()) is not None:
            return problem
        field = self.field
        if isinstance(field, EmbeddedShardMixin):
            return "is not needed: the id holds the number of the shard"
        if field is self.key:
            return "is not needed: the field is the shard key"
        if isinstance(field, models.AutoField) or field.generated or field.has_db_default():
            return "needs a field whose value is known before the insert, not one of the database"
        return _problem_of_field(field, MAX_VALUE)

    def _problem_of_table(self) -> str | None:
        if self.table_name is None:
            return None
        model = _model(self.table_name)
        if model is None or not issubclass(model, LookupTable) or self.table is None:
            return f"names the table {self.table_name!r}, which is no model that derives from LookupTable"
        if self.table.group == self.options.group:
            return (
                f"has its table {self.table_name!r} in the group of its rows, {self.table.group!r}"
            )
        if not isinstance(runtime.strategy(self.table.group), ModuloStrategy):
            return (
                f"has its table {self.table_name!r} in group {self.table.group!r}, whose strategy is not"
                " 'modulo'"
            )
        return None

    def _problem_of_database(self) -> str | None:
        # Any DB_CASCADE of the model deletes rows, and their entries would stay. A unique value
        # would then never be free again. DB_SET_NULL and DB_SET_DEFAULT only change one field. The
        # entries store the value and the shard key.
        for field in self.model._meta.local_concrete_fields:
            on_delete: Any = getattr(field.remote_field, "on_delete", None)
            if compat.changes_rows_unseen(on_delete) and (
                field in (self.field, self.key) or on_delete.__name__ == "DB_CASCADE"
            ):
                # No on_delete may give the shard key another value.
                others = (
                    "CASCADE or PROTECT" if field is self.key else "CASCADE, SET_NULL or the like"
                )
                return (
                    f"does not learn of rows that the database itself changes, and {field.name!r} has"
                    f" on_delete={on_delete.__name__}: use {others}"
                )
        return None

    def text(self, value: Any) -> str:
        """Return the text that the lookup stores for ``value``.

        :param value: a value of the field, prepared for the database.
        :raises LookupRefused: the value is too long, or it is no plain integer, text or UUID.
        """
        return _text(self.field, value, f"{self.model.__name__}.{self.field.name}", MAX_VALUE)

    def key_text(self, key: Any) -> str:
        return _text(self.key, key, f"{self.model.__name__}.{self.key.name}", MAX_KEY)

    def key_of_text(self, text: str) -> Any:
        """Return the shard key that an entry stores as ``text``, such as 7 for "7".

        The result has the type that the column of the shard key stores.
        """
        field = target_field(self.key)
        return field.get_prep_value(field.to_python(text))

    def slot(self, pk: Any, key_text: str) -> str:
        """Return the text that tells apart the entries of several rows with the same value.

        For example, two rows can have the same city in a lookup by city. The text is a digest of
        the primary key and the shard key of the row. In a unique lookup it is empty, because a
        value has only one entry there.
        """
        if self.unique:
            return ""
        pk_text = _text(self.model._meta.pk, pk, self.name, MAX_VALUE)
        return hashlib.sha256(f"{pk_text}\0{key_text}".encode()).hexdigest()


def table_options(name: str) -> ShardOptions | None:
    """Return the ``ShardMeta`` of the project's model ``name``; None if there is no such model."""
    model = _model(name)
    return None if model is None else shard_options(model)


def _model(name: str) -> Any:
    try:
        return apps.get_model(name)
    except (LookupError, ValueError):
        return None


def _problem_of_field(field: Any, most: int) -> str | None:
    target = target_field(field)
    for each in {field, target}:
        for name in _CONVERSIONS:
            method = getattr(type(each), name, None)
            module = "django." if method is None else str(method.__module__)
            if not module.startswith(("django.", "sharded_orm.")):
                return f"has a {name}() of its own, which may change the stored value"
    if isinstance(target, models.CharField):
        if not target.max_length or target.max_length > most:
            return f"may be longer than {most} characters"
        return None
    if not isinstance(target, models.IntegerField | models.AutoField | models.UUIDField):
        return "is no integer, UUID or text with a max_length"
    return None


def _text(field: Any, value: Any, name: str, most: int) -> str:
    """Return the text that a lookup stores for ``value``.

    :param value: an integer, text or UUID, as the database stores it.
    """
    if isinstance(value, str):
        limit = min(target_field(field).max_length or most, most)
        if str(value) != value or len(value) > limit:
            raise LookupRefused(
                f"{value!r} cannot be followed by the lookup of {name}: it is longer than {limit}"
                " characters, or its str() is another text. Shorten it, or pass its str()."
            )
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, UUID):
        return str(value)
    raise LookupRefused(
        f"{value!r} cannot be followed by the lookup of {name}, which takes integers, text and UUIDs."
        " Set it to a plain value."
    )


def plain_value(lookup_field: Any, value: Any) -> Any:
    """Return the value that an INSERT or UPDATE sets, as the database stores it; None for NULL.

    :raises LookupRefused: the value is an expression such as ``F("name")``, which only the database
        can compute, or it is no value of the field.
    """
    if type(value) is Value:
        value = value.value
    if isinstance(value, models.Model):
        value = getattr(value, lookup_field.target_field.attname)
    if hasattr(value, "resolve_expression"):
        raise LookupRefused(
            f"{value!r} for {lookup_field.model.__name__}.{lookup_field.name} is computed by the"
            " database, and the lookup of this field must know the value before. Read the rows, set"
            " the field to a value and save() them."
        )
    try:
        return lookup_field.get_prep_value(value)
    except ValidationError as exc:
        raise LookupRefused(f"{value!r} is no value of {lookup_field.name!r}.") from exc


def declared(model: Any) -> list[Lookup]:
    """Return the :class:`Lookup` objects in the model's ``ShardMeta.lookups``.

    They are returned as they are declared, even if a declaration is wrong. For example, a lookup of
    a field that does not exist is returned. (The system checks report it.)
    """
    names = getattr(getattr(model, "ShardMeta", None), "lookups", None) or ()
    return [Lookup(each) if isinstance(each, str) else each for each in names]


def lookups_of(model: Any) -> tuple[ModelLookup, ...]:
    """Return the lookups by fields of the model's own table, as opposed to a parent's table. The
    tuple is empty if there are none. Sends no query.

    :param model: a model, perhaps a proxy or the historical model of a migration.
    """
    return lookups_by_label().get(model._meta.concrete_model._meta.label_lower, ())


@lru_cache(maxsize=1)
def lookups_by_label() -> dict[str, tuple[ModelLookup, ...]]:
    """Return the lookups of all installed models, keyed by the label of the model."""
    apps.check_models_ready()
    lookups = {}
    for model in apps.get_models():
        options = None if model._meta.proxy else shard_options(model)
        if options is None or options.key is None:
            continue
        own = tuple(
            ModelLookup(model, field, bool(each.unique), options, each.table)
            for each in declared(model)
            if (field := own_field(model, each)) is not None
        )
        if own:
            lookups[model._meta.label_lower] = own
    return lookups


@lru_cache(maxsize=1)
def lookups_by_name() -> dict[str, ModelLookup]:
    """Return the lookups of all installed models, keyed by :attr:`ModelLookup.name`."""
    return {lookup.name: lookup for own in lookups_by_label().values() for lookup in own}


def own_field(model: Any, lookup: Any) -> Any:
    """Return the field that ``lookup`` names; None if the model's own table has no such field, for
    example because the field is in a parent's table.
    """
    try:
        field = model._meta.get_field(lookup.field)
    except (AttributeError, FieldDoesNotExist):
        return None
    return field if field in model._meta.local_concrete_fields else None


def declared_inexact(lookup: ModelLookup, collations: Any) -> str | None:
    """Return the declared collation of the lookup's text field; None if it is exact.

    A collation is not exact if it treats different texts, such as "a" and "A", as equal.
    """
    target = target_field(lookup.field)
    if not isinstance(target, models.CharField) or isinstance(target, ExactCharField):
        return None
    equality = collations.equality(target.db_collation)
    if equality.is_exact and not equality.pads:
        return None
    return target.db_collation or "of the table"
