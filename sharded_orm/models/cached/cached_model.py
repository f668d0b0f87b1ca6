"""Which models are cached, and how field values get into names of cache entries (Yupoo, Y13-Y16).

A model is cached if its ``ShardMeta`` has ``cache = True``. ``ShardMeta.isolate_key`` names a field
that divides the cached lists of a shard key. For example, with ``isolate_key = "album_id"``, a
write to a photo of album 7 voids the lists of album 7, but not those of album 8.

In the name of a cache entry, a *token* (a text) stands for a field value. The tokens of a field are
*exact* if the database considers two values equal if and only if their tokens are equal. If the
tokens of a field are not exact, its values are not used in names of cache entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property, lru_cache
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import connections, models, router
from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.collations import Collations
from sharded_orm.backends.features import features_of
from sharded_orm.cache.guards import digest
from sharded_orm.cache.keys import CachedType, Scope, token
from sharded_orm.cache.values import FORMAT
from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.plans.id_batch import PLAIN_INTEGERS
from sharded_orm.models.sharding.options import ShardOptions, shard_options, target_field
from sharded_orm.topology.model import ALIAS_DIGITS

#: The token (the text in names of cache entries) of an isolate key that is NULL. No other value has
#: this token.
NULL = "%N"

# How many Scope objects each model remembers. A scope is a set of rows whose cache entries become
# void together.
_SCOPES = 2048
# An argument of a model field, such as max_length, is part of the model's fingerprint if its value
# has one of these types.
_PLAIN = (str, int, float, bool, type(None))
# The names of field arguments that do not change how values are stored in the column. They are left
# out of the model's fingerprint, a digest of the model's fields.
_NOT_OF_THE_VALUE = {*models.Field.non_db_attrs, "default", "primary_key", "unique", "db_index"}
_NOT_OF_THE_VALUE |= {"auto_created", "sequence", "unique_for_date", "unique_for_month"}
_NOT_OF_THE_VALUE |= {"unique_for_year", "db_tablespace", "db_comment", "db_constraint", "to"}


@dataclass(frozen=True)
class TokenField:
    """A key field of a cached model: a shard key, isolate key or primary key.

    The name of a cache entry contains a *token* for the value of this field.

    :param target: for a foreign key, the field to which it refers, directly or through further
        foreign keys; otherwise ``field``.
    :param exact: whether the database considers two values equal if and only if their tokens are
        equal. If not, :meth:`token` returns None for every value.
    :param pad: whether the database ignores trailing spaces when it compares values (default: no).
    """

    field: Any
    target: Any
    exact: bool
    pad: bool = False

    def token(self, value: Any) -> str | None:
        """Return the text that represents ``value`` in names of cache entries: its token.

        Return None if ``value`` has no token: it is NULL, an expression, or not accepted by the
        field. Always return None if ``exact`` is False.
        """
        if type(value) is int and self._takes_int:
            # For a number that is not negative, str() gives the same text as token(), but faster.
            return str(value) if value >= 0 else token(value)
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

    def keeps(self, value: Any) -> bool:
        """Whether ``get_prep_value()`` of the field is known to return ``value`` itself.

        If so, the caller can use ``value`` without calling ``get_prep_value()``. If this method
        returns False, ``get_prep_value()`` may or may not return another value.
        """
        return type(value) is int and self._takes_int

    @cached_property
    def _takes_int(self) -> bool:
        # True if get_prep_value() is the method of Django's integer fields. It returns an int
        # unchanged, so token() and keeps() need not call it. Most keys are such fields.
        return self.exact and type(self.target).get_prep_value in PLAIN_INTEGERS

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


@dataclass(frozen=True)
class CachedModel:
    """A model with ``cache = True``, and the fields that determine the names of its cache entries.

    Thread-safe.

    :param model: the concrete model.
    :param type: the description of the model for :mod:`sharded_orm.cache`, which does not use the
        ORM.
    :param options: the shard options of the model; None for a global (not sharded) model.
    :param key_field: the shard key; None for a global model.
    :param isolate_field: the isolate key; None if the model has no isolate key.
    :param pk_fields: the fields of the primary key; more than one if the primary key is composite.
    """

    model: type[models.Model]
    type: CachedType
    options: ShardOptions | None
    key_field: TokenField | None
    isolate_field: TokenField | None
    pk_fields: tuple[TokenField, ...]

    @property
    def key(self) -> Any:
        """The field of the shard key; None for a global model."""
        return None if self.key_field is None else self.key_field.field

    @property
    def isolate(self) -> Any:
        """The field of the isolate key, which divides the cached lists of a shard key; or None."""
        return None if self.isolate_field is None else self.isolate_field.field

    @property
    def pk(self) -> Any:
        return self.model._meta.pk

    def key_token(self, value: Any) -> str | None:
        """Return the token of ``value`` as a shard key: its form in names of cache entries.

        Return None if ``value`` has no token (see :meth:`TokenField.token`), and for a global
        model, which has no shard key.

        The token of a key that has moved to another shard contains the version of its placement
        (its row in the directory). So entries from before the move are never used again, not even
        if the key moves back.
        """
        if self.key_field is None or self.options is None:
            return None
        plain = self.key_field.token(value)
        strategy = runtime.strategy(self.options.group)
        if plain is None or not strategy.moves_keys:
            return plain
        try:
            version = strategy.version(self.key.get_prep_value(value))
        except InvalidShardKey:
            # The strategy does not accept this value as a shard key. So no row has this key, and
            # the key cannot have moved to another shard.
            return plain
        return f"{plain}+{version}" if version else plain

    def isolate_token(self, value: Any) -> str | None:
        """Return the token of ``value`` as an isolate key: its form in names of cache entries.

        Return None if the model has no isolate key, or if ``value`` has no token (see
        :meth:`TokenField.token`). But NULL (``value`` is None) has a token here, if the field is
        exact.
        """
        field = self.isolate_field
        if field is None:
            return None
        if value is None and field.exact:
            return NULL
        return field.token(value)

    def pk_token(self, value: Any) -> str | None:
        """Return the token of a primary key: its form in names of cache entries.

        Return None if the key, or a part of a composite key, has no token (see
        :meth:`TokenField.token`).

        :param value: the value of the primary key; a tuple for a composite one.
        """
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
        """A function ``scope(place, key, isolate=None)`` that returns a :class:`Scope` of the model.

        A scope is a set of rows whose cache entries become void together. ``place`` is a result of
        :meth:`place`; ``key`` is the token of a shard key, and ``isolate`` that of an isolate key.
        The function remembers its latest results, because it takes time to compute the names of
        the cache entries in a scope.
        """

        @lru_cache(maxsize=_SCOPES)
        def scope(place: str, key: str | None, isolate: str | None = None) -> Scope:
            return Scope(self.type, place, key, isolate)

        return scope

    def place(self, alias: str) -> str:
        """Return a string that selects the cache server for the rows on ``alias``: their place.

        For a sharded model the place is ``alias``. For a global model it is the model's name in the
        cache (``type.name``).
        """
        return alias if self.type.sharded else self.type.name

    def caches_alias(self, alias: str) -> bool:
        """Whether rows of the model on ``alias`` are cached.

        Rows of a sharded model are cached on all shards of its group; rows of a global model only
        on the database to which the router writes them.
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
        """The alias of the database to which the router writes the rows of this global model."""
        return str(router.db_for_write(self.model))

    @cached_property
    def _alias_stem(self) -> str:
        return f"{self.options.group}_" if self.options is not None else ""

    @property
    def aliases(self) -> tuple[str, ...]:
        """The aliases of the databases that store rows of the model.

        For a sharded model: all shards of its group in the current topology. For a global model:
        its one database.
        """
        if self.options is None:
            return (self.global_alias,)
        return tuple(shard.alias for shard in runtime.group(self.options.group).shards())


# Results of cached_model(), keyed by model. forget() replaces this dict by a new one and does not
# empty it, because another thread may just have computed a result from the old settings. The other
# thread then adds its result to the old dict, which nobody reads any more.
_known: dict[Any, CachedModel | None] = {}


def cached_model(model: Any) -> CachedModel | None:
    """Return the :class:`CachedModel` of ``model``; None if ``model`` is not cached.

    For a proxy, return the :class:`CachedModel` of its concrete model; for a historical model of a
    migration, that of the installed model with the same label. If the setting ``SHARDED_ORM`` has
    no ``CACHE``, no model is cached.

    :raises ImproperlyConfigured: ``isolate_key`` is not the name of a field of the model, or the
        field has no column.
    """
    known = _known
    try:
        return known[model]
    except KeyError:
        return _learn(known, model)


def forget() -> None:
    """Forget the results of :func:`cached_model`. Called after the settings have changed."""
    global _known
    _known = {}


def _learn(known: dict[Any, CachedModel | None], model: Any) -> CachedModel | None:
    meta = getattr(model, "_meta", None)
    if meta is None or meta.abstract:
        return None
    if meta.apps is not apps:
        # ``model`` is a historical model of a migration. Do not remember the result, because
        # migrations make thousands of such models.
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
    """Whether the ``ShardMeta`` of ``model``'s concrete model has ``cache = True``.

    False for a model with a parent (multi-table inheritance), because the cache does not support
    rows in two tables.
    """
    concrete = model._meta.concrete_model
    if concrete is None or concrete._meta.parents or not hasattr(concrete, "_is_sharded"):
        return False
    return getattr(getattr(concrete, "ShardMeta", None), "cache", False) is True


def isolate_name(model: Any) -> str | None:
    """Return ``ShardMeta.isolate_key`` of a model; None if the model does not declare it.

    The model may lack a field of this name; the caller must check that.
    """
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
    """Return the field of ``model`` whose name or attname is ``name``.

    Return None if there is no such field, or if the field has no column.
    """
    for field in model._meta.concrete_fields:
        if name in (field.name, field.attname) and field.column is not None:
            return field
    return None


def fingerprint(model: Any) -> str:
    """Return a digest of the fields of ``model``, 8 hexadecimal characters.

    The digest changes whenever a change of the fields changes the format of the model's rows. So
    cached rows in the old format are not used.
    """
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
        # Leave out arguments of other types, such as functions, because their repr() may be
        # different in each process.
        [(name, value) for name, value in arguments if isinstance(value, _PLAIN)],
    )


# ##### Which values a database considers equal #####


def collations_of(model: Any) -> Collations:
    """Return the object that knows which texts the databases of ``model`` treat as equal.

    The object is chosen by the ``ENGINE`` in the settings. No database is connected.
    """
    options = shard_options(model)
    if options is not None:
        group = runtime.group(options.group)
        engine = runtime.topology().nodes[group.ranges[0].primary]["ENGINE"]
    else:
        engine = connections.settings[router.db_for_write(model)]["ENGINE"]
    return features_of(load_backend(engine).DatabaseWrapper).collations


def token_field(field: Any, collations: Collations) -> TokenField:
    """Return the :class:`TokenField` of ``field``.

    Its attribute ``exact`` says whether the database considers two values of the field equal
    exactly when their tokens are equal.

    :param collations: the object that knows which texts are equal in the database of the field's
        column.
    """
    target = target_field(field)
    if isinstance(target, models.CharField | models.TextField):
        collation = getattr(target, "db_collation", None)
        if isinstance(target, ExactCharField) and not collation:
            return TokenField(field, target, True)
        return TokenField(field, target, *collations.equality(collation))
    # Decimals, floats and datetimes are not exact, because the database considers some of their
    # values equal that have different texts, for example datetimes with different time zones.
    exact = isinstance(
        target, models.IntegerField | models.BooleanField | models.UUIDField | models.DateField
    ) and not isinstance(target, models.DateTimeField)
    return TokenField(field, target, exact)
