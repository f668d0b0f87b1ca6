"""Which models are cached, and how their values become names in the cache (Yupoo, Y13-Y16).

Reads ``ShardMeta.cache`` and ``ShardMeta.isolate_key``. Values become *tokens*, the parts of
names, but only if equal tokens mean that the values are equal for the database, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured, ValidationError
from django.db import connections, models, router
from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.collations import Collations
from sharded_orm.backends.features import features_of
from sharded_orm.cache.guards import digest
from sharded_orm.cache.keys import CachedType, Scope, token
from sharded_orm.cache.values import FORMAT
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.topology.model import ALIAS_DIGITS

#: The token of NULL, for :meth:`CachedModel.isolate_token`. No value has it.
NULL = "%N"

_SCOPES = 2048
# Arguments of a field that have one of these types may change the values in its column ...
_PLAIN = (str, int, float, bool, type(None))
# ... unless they are among these.
_NOT_OF_THE_VALUE = {*models.Field.non_db_attrs, "default", "primary_key", "unique", "db_index"}
_NOT_OF_THE_VALUE |= {"auto_created", "sequence", "unique_for_date", "unique_for_month"}
_NOT_OF_THE_VALUE |= {"unique_for_year", "db_tablespace", "db_comment", "db_constraint", "to"}


@dataclass(frozen=True)
class TokenField:
    """A field whose values stand in names: the shard key, the isolate key, a primary key.

    :param target: the field itself; for a foreign key the field that it finally refers to.
    :param exact: whether values are equal for the database exactly if their tokens are equal.
    :param pad: whether comparisons ignore trailing spaces.
    """

    field: Any
    target: Any
    exact: bool
    pad: bool = False

    def token(self, value: Any) -> str | None:
        """The token of ``value``; None if it has none that is exact.

        That is NULL, an expression, a value that the field does not take, and every value of an
        inexact field.
        """
        if type(value) is not int or not self._takes_int:
            if not self.exact or value is None or hasattr(value, "resolve_expression"):
                return None
            if isinstance(value, models.Model):
                value = self._of_instance(value)
                if value is None:
                    return None
            try:
                value = self.field.get_prep_value(value)
            except (TypeError, ValueError, OverflowError, ValidationError):
                return None
            if self.pad and isinstance(value, str):
                value = value.rstrip(" ")
            if not isinstance(value, int | str | UUID | date) or isinstance(value, datetime):
                return None
        return token(value)

    @cached_property
    def _takes_int(self) -> bool:
        # Most keys are integers, which get_prep_value of these fields leaves as they are.
        return self.exact and type(self.target).get_prep_value in _PLAIN_INTEGERS

    def _of_instance(self, value: Any) -> Any:
        field: Any = self.field
        while isinstance(value, models.Model):
            if not field.is_relation or not isinstance(
                value, field.target_field.model._meta.concrete_model
            ):
                return None
            field = field.target_field
            value = value.__dict__.get(field.attname)
        return value


_PLAIN_INTEGERS = frozenset({models.IntegerField.get_prep_value, models.AutoField.get_prep_value})


@dataclass(frozen=True)
class CachedModel:
    """A model with ``cache = True``, and the fields that names in the cache depend on. Thread-safe.

    :param model: the concrete model.
    :param type: the model, for modules that know no ORM.
    :param options: the shard options; None for a global model.
    """

    model: type[models.Model]
    type: CachedType
    options: ShardOptions | None
    key_field: TokenField | None
    isolate_field: TokenField | None
    pk_fields: tuple[TokenField, ...]

    @property
    def key(self) -> Any:
        """The shard key; None of a global model."""
        return None if self.key_field is None else self.key_field.field

    @property
    def isolate(self) -> Any:
        """The field of ``isolate_key``, or None."""
        return None if self.isolate_field is None else self.isolate_field.field

    @property
    def pk(self) -> Any:
        return self.model._meta.pk

    def key_token(self, value: Any) -> str | None:
        """The token of a shard key's value; None if it is unknown. See :class:`TokenField`."""
        return None if self.key_field is None else self.key_field.token(value)

    def isolate_token(self, value: Any) -> str | None:
        """The token of an isolate key's value, which may be NULL; None if it is unknown."""
        field = self.isolate_field
        if field is None:
            return None
        if value is None and field.exact:
            return NULL
        return field.token(value)

    def pk_token(self, value: Any) -> str | None:
        """The token of a primary key, a tuple for a composite one; None if it is unknown."""
        fields = self.pk_fields
        if len(fields) == 1:
            return fields[0].token(value)
        if not isinstance(value, tuple | list) or len(value) != len(fields):
            return None
        parts = [field.token(part) for field, part in zip(fields, value, strict=True)]
        if None in parts:
            return None
        return token("+".join(map(str, parts)))

    @cached_property
    def scope(self) -> Callable[..., Scope]:
        """``scope(place, key, isolate=None)``: memoised, since a scope computes its names."""

        @lru_cache(maxsize=_SCOPES)
        def scope(place: str, key: str | None, isolate: str | None = None) -> Scope:
            return Scope(self.type, place, key, isolate)

        return scope

    def place(self, alias: str) -> str:
        """The place of the rows on ``alias``, which decides their cache server."""
        return alias if self.type.sharded else self.type.name

    def caches_alias(self, alias: str) -> bool:
        """Whether rows on ``alias`` are cached.

        They are on shards of the group, and for a global model on the database where the router
        writes it.
        """
        if self.options is None:
            return alias == self.global_alias
        stem = self._alias_stem
        digits = alias[len(stem) :]
        return (
            alias.startswith(stem)
            and len(digits) == ALIAS_DIGITS
            and digits.isascii()
            and digits.isdigit()
        )

    @cached_property
    def global_alias(self) -> str:
        """The alias where the router writes a global model."""
        return str(router.db_for_write(self.model))

    @cached_property
    def _alias_stem(self) -> str:
        return f"{self.options.group}_" if self.options is not None else ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """All aliases with rows of the model, in the present topology."""
        if self.options is None:
            return (self.global_alias,)
        return tuple(shard.alias for shard in runtime.group(self.options.group).shards())


# forget() puts a new dict here: a thread that is amid _learn() fills the old one.
_known: dict[Any, CachedModel | None] = {}


def cached_model(model: Any) -> CachedModel | None:
    """The :class:`CachedModel` of ``model``; None if it is not cached.

    A proxy counts as its concrete model, and a historical model of a migration as the installed
    model with its label. None for all models while ``SHARDED_ORM`` has no ``CACHE``.

    :raises ImproperlyConfigured: ``isolate_key`` is no field with a column of the model.
    """
    known = _known
    try:
        return known[model]
    except KeyError:
        return _learn(known, model)


def forget() -> None:
    """Forget all models, after the settings have changed."""
    global _known
    _known = {}


def _learn(known: dict[Any, CachedModel | None], model: Any) -> CachedModel | None:
    meta = getattr(model, "_meta", None)
    if meta is None or meta.abstract:
        return None
    if meta.apps is not apps:
        # Not remembered: a run of migrations makes thousands of these.
        try:
            installed = apps.get_model(meta.label)
        except (LookupError, ValueError):
            return None
        return cached_model(installed)
    concrete = meta.concrete_model
    if concrete is not model:
        cached = cached_model(concrete)
    else:
        cached = _read(model) if declares_cache(model) else None
    return known.setdefault(model, cached) if apps.models_ready else cached


def declares_cache(model: Any) -> bool:
    """Whether ``ShardMeta`` of the concrete model says ``cache = True``.

    The child of a cached model (multi-table inheritance) is not cached, as its rows are in two
    tables.
    """
    concrete = model._meta.concrete_model
    if concrete is None or concrete._meta.parents or not hasattr(concrete, "_is_sharded"):
        return False
    return getattr(getattr(concrete, "ShardMeta", None), "cache", False) is True


def isolate_name(model: Any) -> str | None:
    """``ShardMeta.isolate_key`` as it is declared."""
    return getattr(getattr(model._meta.concrete_model, "ShardMeta", None), "isolate_key", None)


def _read(model: Any) -> CachedModel | None:
    cache = runtime.cache()
    if cache is None:
        return None
    options = shard_options(model)
    if model._is_sharded and (options is None or options.key is None):
        return None
    meta = model._meta
    collations = collations_of(model)
    isolate = None
    if (name := isolate_name(model)) is not None:
        field = field_of(model, name)
        if field is None:
            raise ImproperlyConfigured(
                f"{meta.label}.ShardMeta.isolate_key names {name!r}, which is no field with a"
                " column of the model."
            )
        isolate = token_field(field, collations)
    pk = meta.pk
    parts = pk.fields if isinstance(pk, models.CompositePrimaryKey) else (pk,)
    return CachedModel(
        model,
        CachedType(cache.type_name(meta.label), options is not None, fingerprint(model)),
        options,
        token_field(options.key, collations) if options is not None else None,
        isolate,
        tuple(token_field(part, collations) for part in parts),
    )


def field_of(model: Any, name: str) -> Any:
    """The field of ``model`` with this name or attname, if it has a column; else None."""
    for field in model._meta.concrete_fields:
        if name in (field.name, field.attname) and field.column is not None:
            return field
    try:
        model._meta.get_field(name)
    except FieldDoesNotExist:
        pass
    return None


def fingerprint(model: Any) -> str:
    """Eight characters that change with the form of stored rows of ``model``."""
    parts = [str(FORMAT), model._meta.label]
    for field in model._meta.concrete_fields:
        path, arguments = _declared(field)
        parts.append(f"{field.attname}|{field.column}|{path}|{arguments!r}")
        while field.is_relation:
            field = field.target_field
            path, arguments = _declared(field)
            parts.append(f"{path}|{arguments!r}")
    return digest(*parts)[:8]


def _declared(field: Any) -> tuple[str, list[tuple[str, Any]]]:
    _, _, positional, named = field.deconstruct()
    arguments = [("", value) for value in positional] + sorted(
        (name, value) for name, value in named.items() if name not in _NOT_OF_THE_VALUE
    )
    kind = type(field)
    return (
        f"{kind.__module__}.{kind.__qualname__}",
        # The repr() of other values, such as functions, differs in each process.
        [(name, value) for name, value in arguments if isinstance(value, _PLAIN)],
    )


# ##### Values that are equal for a database #####


def collations_of(model: Any) -> Collations:
    """The collations of the databases that hold ``model``. Connects to none."""
    options = shard_options(model)
    if options is not None:
        group = runtime.group(options.group)
        engine = runtime.topology().nodes[group.ranges[0].primary]["ENGINE"]
    else:
        engine = connections.settings[router.db_for_write(model)]["ENGINE"]
    return features_of(load_backend(engine).DatabaseWrapper).collations


def token_field(field: Any, collations: Collations) -> TokenField:
    """``field``, with the rules of equality for its values."""
    target = target_field(field)
    if isinstance(target, models.CharField | models.TextField):
        collation = getattr(target, "db_collation", None)
        if isinstance(target, ExactCharField) and not collation:
            return TokenField(field, target, True)
        return TokenField(field, target, *collations.equality(collation))
    # Decimals, floats and datetimes with a zone can be written in several ways and be equal for
    # the database.
    exact = isinstance(
        target, models.IntegerField | models.BooleanField | models.UUIDField | models.DateField
    ) and not isinstance(target, models.DateTimeField)
    return TokenField(field, target, exact)
