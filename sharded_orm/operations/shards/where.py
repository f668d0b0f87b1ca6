"""Find the shard of a key, and explain why the key is on this shard, for an operator who asks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist, ValidationError

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey, ShardKeyRequired, UnknownModel
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.tables.directory import Placement
from sharded_orm.operations.key_input import typed_key
from sharded_orm.routing.directory import DirectoryStrategy


@dataclass(frozen=True)
class KeyLocation:
    """The shard of a key.

    If the key has no shard yet, ``shard`` and all attributes after it are None.

    :param key: the key, converted to the type of its field.
    :param why: why the key is on this shard, as the group's strategy explains it.
    :param shard: the shard's number.
    :param node: the name of the shard's primary.
    :param replica: the name of the shard's replica; None if it has none.
    :param range: the first and the last shard number of the range to which the shard belongs, such
        as (0, 511).
    :param open: whether new keys may be placed on shards of this range.
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
    """Find the shard on which rows with a certain key are, and why they are there.

    For example, ``where("photos.Photo", "user_id", "7")`` finds the shard with the photos of user
    7. Uses the topology of this process, and queries no shard. If the group has a directory, one
    query looks up the key. A key that has no shard yet is not placed.

    :param label: a model such as ``photos.Photo``. ``Photo`` is enough if only one model, or only
        one sharded model, has that name.
    :param name: the shard key's name or ``attname`` (``user`` or ``user_id``), ``pk`` if the shard
        key is the primary key, or another field whose values contain the shard number.
    :param text: the value of this field, as a person has typed it.
    :raises UnknownModel: there is no such model, there are several, or it is not sharded.
    :raises ShardKeyRequired: the field ``name`` does not determine the shard.
    :raises InvalidShardKey: no row can have ``text`` as its key, or the strategy refuses the key.
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
    """The row of the directory for one shard key. It says on which shard the key is.

    The directory is the table that maps each shard key to its shard. After a change of this row, a
    process may still use the older shard number that it has in memory.

    :param shard: the number of the key's shard.
    :param placed_at: the time at which the key was placed on that shard.
    """

    shard: int
    placed_at: datetime


def directory_entry(location: KeyLocation) -> PlacementEntry | None:
    """Read what the directory has stored for a key that :func:`where` has returned. One query.

    Return None if it has stored nothing for the key. If the group has no directory, return None
    without a query.
    """
    strategy = runtime.strategy(location.group)
    if not isinstance(strategy, DirectoryStrategy):
        return None
    rows = Placement.objects.using(runtime.config().directory)
    row = rows.filter(group=location.group, key=strategy.entry(location.key)).first()
    return None if row is None else PlacementEntry(row.shard, row.placed_at)


def sharded_model(label: str) -> ShardOptions:
    """Return the shard options of model ``label``.

    :param label: a model such as ``photos.Photo``. ``Photo`` is enough if only one model, or only
        one sharded model, has that name.
    :raises UnknownModel: there is no such model, there are several, or it is not sharded.
    """
    sharded = [model for model in apps.get_models() if shard_options(model) is not None]
    lowered = label.lower()
    if "." in lowered:
        models = [model for model in apps.get_models() if model._meta.label_lower == lowered]
    else:
        models = [model for model in apps.get_models() if model._meta.model_name == lowered]
    if len(models) > 1:
        # If several models have the name, take the sharded ones. For example, a project may have a
        # sharded model Permission, and django.contrib.auth has a model Permission, too.
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
