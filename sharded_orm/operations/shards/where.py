"""Locating the rows of a shard key, with an explanation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, ValidationError

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey, ShardKeyRequired, UnknownModel
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.tables.placement import Placement
from sharded_orm.operations.key_input import typed_key
from sharded_orm.routing.directory import DirectoryStrategy


@dataclass(frozen=True)
class KeyLocation:
    """The shard of a key. All attributes from ``shard`` on are None while the key has no shard.

    :param key: the key, converted by its field.
    :param why: the explanation of the group's strategy.
    :param node: the node of the primary.
    :param replica: the node of the replica, or None.
    :param range: the first and last shard of the shard's range.
    :param open: whether the range takes new keys.
    """

    model: str
    field: str
    key: Any
    group: str
    strategy: str
    why: str
    shard: int | None = None
    alias: str | None = None
    node: str | None = None
    replica: str | None = None
    schema: str | None = None
    range: tuple[int, int] | None = None
    open: bool | None = None


def where(label: str, name: str, text: str) -> KeyLocation:
    """Locate the rows of model ``label`` with ``name`` = ``text``, by this process's topology.

    Asks no shard. A strategy with a directory reads the key's placement by one query, and places
    nothing.

    :param label: the model, such as ``photos.Photo``, or its name alone if it is unique.
    :param name: the shard key's name or column, or ``pk`` if it is the primary key; or another
        field whose values contain the shard.
    :param text: the key as typed.
    :raises UnknownModel: there is no such model, or it is not sharded.
    :raises ShardKeyRequired: ``name`` does not determine the shard.
    :raises InvalidShardKey: no row can have ``text`` as its key, or the strategy does not accept
        it.
    """
    options = sharded_model(label)
    field = _field(options, name)
    group = runtime.group(options.group)
    try:
        key = field.get_prep_value(typed_key(field, text, group.shard(0).alias))
    except ValidationError as exc:
        raise InvalidShardKey(
            f"{text!r} cannot be {options.model._meta.object_name}.{field.name}:"
            f" {' '.join(exc.messages)}"
        ) from exc
    strategy = runtime.strategy(options.group)
    number = strategy.locate(key)
    if number is None and not strategy.places:
        raise strategy.refusal(key)
    unplaced = KeyLocation(
        options.model._meta.label,
        field.attname,
        key,
        group.name,
        group.strategy,
        strategy.explain(key),
    )
    if number is None:
        return unplaced
    shard = runtime.shard(group.name, number)
    shard_range = group.range_of(number)
    return KeyLocation(
        unplaced.model, unplaced.field, unplaced.key, unplaced.group, unplaced.strategy, unplaced.why,
        number, shard.alias, shard.node, shard.replica, shard.schema,
        (shard_range.first, shard_range.last), shard_range in group.open_ranges,
    )  # fmt: skip


@dataclass(frozen=True)
class PlacementEntry:
    """The directory's own entry for a key; a process may still remember an older one."""

    shard: int
    placed_at: datetime


def directory_entry(location: KeyLocation) -> PlacementEntry | None:
    """The directory's entry for a key that :func:`where` has located; None if there is none.

    One query to the directory; none if the group's strategy has no directory.
    """
    strategy = runtime.strategy(location.group)
    if not isinstance(strategy, DirectoryStrategy):
        return None
    rows = Placement.objects.using(runtime.config().directory)
    row = rows.filter(group=location.group, key=strategy.entry(location.key)).first()
    return None if row is None else PlacementEntry(row.shard, row.placed_at)


def sharded_model(label: str) -> ShardOptions:
    """The shard options of model ``label``, whose app may be left out if the name is unique.

    :raises UnknownModel: there is no such model, there are several, or it is not sharded.
    """
    sharded = [model for model in apps.get_models() if shard_options(model) is not None]
    lowered = label.lower()
    if "." in lowered:
        models = [model for model in apps.get_models() if model._meta.label_lower == lowered]
    else:
        models = [model for model in apps.get_models() if model._meta.model_name == lowered]
    if len(models) > 1:
        # A sharded Permission beside that of Django, for example.
        models = [model for model in models if model in sharded] or models
    if len(models) > 1:
        labels = sorted(model._meta.label for model in models)
        raise UnknownModel(f"{label!r} may be any of {labels!r}; name its app.")
    if not models:
        labels = sorted(model._meta.label for model in sharded)
        raise UnknownModel(f"There is no model {label!r}; sharded models are {labels!r}.")
    options = shard_options(models[0])
    if options is None:
        raise UnknownModel(
            f"{models[0]._meta.label} is not sharded: its rows are in the global database."
        )
    return options


def _field(options: ShardOptions, name: str) -> Any:
    meta = options.model._meta
    candidates = [field for field in meta.concrete_fields if options.names_shard(field)]
    try:
        field: Any = meta.pk if name == "pk" else meta.get_field(name)
    except FieldDoesNotExist:
        field = next((candidate for candidate in candidates if candidate.attname == name), None)
    if field not in candidates:
        raise ShardKeyRequired(
            f"{name!r} does not tell the shard of {meta.object_name}; give"
            f" {' or '.join(f'{candidate.attname}=…' for candidate in candidates) or 'a row it belongs to'}."
        )
    return field
