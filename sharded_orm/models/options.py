"""``ShardMeta`` read: which group a model belongs to, and which field is its shard key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db.models import Field, Model

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.routing.where import ShardKey
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class ShardOptions:
    """What ``ShardMeta`` says. ``key`` is None for an automatic many-to-many table,
    whose rows follow the instance they hang on."""

    model: type[Model]
    group: str
    key: Field[Any, Any] | None

    @cached_property
    def where_key(self) -> ShardKey | None:
        """The key as :mod:`sharded_orm.routing.where` wants it."""
        if self.key is None:
            return None
        return ShardKey(self.group, self.key.attname, str(self.key.column))

    def key_of(self, instance: Model) -> Any:
        """The shard-key value of ``instance``, as the database would store it.

        :raises ShardKeyRequired: it is None, or the model has no key of its own.
        """
        if self.key is None:
            raise ShardKeyRequired(
                f"{self.model._meta.label} has no shard key of its own; reach it through the"
                " instance it belongs to."
            )
        value = self.key.get_prep_value(getattr(instance, self.key.attname))
        if value is None:
            raise ShardKeyRequired(
                f"{self.model._meta.object_name}.{self.key.name} is None; it is the shard key, which"
                " decides where the row is stored. Set it before saving."
            )
        return value

    def locate(self, instance: Model) -> Shard | None:
        """The shard that the key of ``instance`` names; None for an unplaced key."""
        return runtime.locate(self.group, self.key_of(instance))

    def place(self, instance: Model) -> Shard:
        """The same, for a row that is about to be written."""
        return runtime.place(self.group, self.key_of(instance))


_known: dict[Any, ShardOptions | None] = {}


def shard_options(model: type[Any]) -> ShardOptions | None:
    """The options of ``model``, or None when its rows are in the global database.

    An automatic many-to-many table follows the group of the model that declares it.
    """
    try:
        return _known[model]
    except KeyError:
        return _known.setdefault(model, _read(model))


def _read(model: Any) -> ShardOptions | None:
    meta = getattr(model, "_meta", None)
    if meta is None or meta.abstract:
        return None
    if meta.auto_created:
        source = shard_options(meta.auto_created)
        return None if source is None else ShardOptions(model, source.group, None)
    declared = getattr(model, "ShardMeta", None)
    if declared is None or not getattr(model, "_is_sharded", False):
        return None
    group, name = getattr(declared, "group", None), getattr(declared, "shard_key", None)
    if not group or not name:
        raise ImproperlyConfigured(f"{meta.label}.ShardMeta must set both group and shard_key.")
    try:
        key = meta.get_field(name)
    except FieldDoesNotExist as exc:
        raise ImproperlyConfigured(
            f"{meta.label}.ShardMeta.shard_key names {name!r}, which is no field of the model."
        ) from exc
    return ShardOptions(model, group, key)


def where_key(model: type[Any]) -> ShardKey | None:
    """The shard key of ``model``, if it has one."""
    options = shard_options(model)
    return options.where_key if options is not None else None


def describe(instance: Model) -> str:
    """An instance in an error message; its own ``__str__`` may need a database."""
    return f"{type(instance).__name__}(pk={instance.pk!r})"


def colocated_alias(options: ShardOptions, instance: Any) -> str | None:
    """The alias of the shard where ``instance`` is, when rows of ``options`` live beside it.

    None when it is of another group, global, or not on a shard yet.
    """
    other = shard_options(type(instance))
    if other is None or other.group != options.group:
        return None
    alias = instance._state.db
    if alias is not None and alias != options.group and not instance._state.adding:
        return str(alias)
    # By __dict__: while Model.__init__ runs, a key declared after the relation is not set
    # yet, and Django would take it for deferred and load it.
    if other.key is None or instance.__dict__.get(other.key.attname) is None:
        return None
    shard = other.locate(instance)
    return shard.alias if shard is not None else None


def shard_key_required(options: ShardOptions, problem: str) -> ShardKeyRequired:
    """The error for a query that names no shard, with the ways out."""
    name = options.model._meta.object_name
    key = options.key.name if options.key is not None else None
    if key is None:
        ways = "reach it through the instance it belongs to, or use .using(<shard alias>)"
    else:
        ways = (
            f"filter by it ({name}.objects.filter({key}=…)), name a shard with"
            f" .using('{options.group}_00000'), or ask every shard on purpose with .scatter()"
        )
    return ShardKeyRequired(
        f"{name} is sharded by {key!r} in group {options.group!r}, and {problem}: {ways}."
    )
