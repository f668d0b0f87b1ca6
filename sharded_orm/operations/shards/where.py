"""Where the rows of a shard key are, and why."""

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
    """Where a key is. Everything from ``shard`` on is None while it has no shard.

    :param key: as its field makes it of what was asked.
    :param why: as the group's strategy explains it.
    :param node: of the primary; ``replica`` is another one, or None.
    :param open: whether the shard's range takes new keys; ``range`` is its first and last shard.
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
    """Where the rows of ``label`` with ``name`` = ``text`` are, by the topology of this process.

    Asks no shard; a strategy with a directory reads the key's placement, by one query, and places
    nothing.

    :param label: of a model, ``photos.Photo``, or its name alone if there is only one such.
    :param name: the shard key, by name or column, ``pk`` if it is the primary key; or another field
        whose values carry the shard.
    :raises UnknownModel: there is no such model, or it is not sharded.
    :raises ShardKeyRequired: ``name`` does not tell the shard.
    :raises InvalidShardKey: ``text`` cannot be such a key: no row can have it, or the strategy
        takes no such keys.
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
    told = KeyLocation(
        options.model._meta.label,
        field.attname,
        key,
        group.name,
        group.strategy,
        strategy.explain(key),
    )
    if number is None:
        return told
    shard = runtime.shard(group.name, number)
    within = group.range_of(number)
    return KeyLocation(
        told.model, told.field, told.key, told.group, told.strategy, told.why,
        number, shard.alias, shard.node, shard.replica, shard.schema,
        (within.first, within.last), within in group.open_ranges,
    )  # fmt: skip


@dataclass(frozen=True)
class PlacementEntry:
    """What the directory itself says of a key; a process may remember something older."""

    shard: int
    placed_at: datetime


def directory_entry(place: KeyLocation) -> PlacementEntry | None:
    """The row of the directory for a key that :func:`where` looked for; None if there is none.

    One query of the directory; none for a group whose strategy has no directory.
    """
    strategy = runtime.strategy(place.group)
    if not isinstance(strategy, DirectoryStrategy):
        return None
    rows = Placement.objects.using(runtime.config().directory)
    row = rows.filter(group=place.group, key=strategy.entry(place.key)).first()
    return None if row is None else PlacementEntry(row.shard, row.placed_at)


def sharded_model(label: str) -> ShardOptions:
    """The options of the sharded model that ``label`` names, without an app if that is plain.

    :raises UnknownModel: no model, or several, or one that is not sharded.
    """
    known = [model for model in apps.get_models() if shard_options(model) is not None]
    wanted = label.lower()
    if "." in wanted:
        found = [model for model in apps.get_models() if model._meta.label_lower == wanted]
    else:
        found = [model for model in apps.get_models() if model._meta.model_name == wanted]
    if len(found) > 1:
        # Django's own Permission, say, beside a sharded one.
        found = [model for model in found if model in known] or found
    if len(found) > 1:
        labels = sorted(model._meta.label for model in found)
        raise UnknownModel(f"{label!r} may be any of {labels!r}; name its app.")
    if not found:
        labels = sorted(model._meta.label for model in known)
        raise UnknownModel(f"There is no model {label!r}; sharded models are {labels!r}.")
    options = shard_options(found[0])
    if options is None:
        raise UnknownModel(
            f"{found[0]._meta.label} is not sharded: its rows are in the global database."
        )
    return options


def _field(options: ShardOptions, name: str) -> Any:
    meta = options.model._meta
    tells = [field for field in meta.concrete_fields if options.names_shard(field)]
    try:
        field: Any = meta.pk if name == "pk" else meta.get_field(name)
    except FieldDoesNotExist:
        field = next((each for each in tells if each.attname == name), None)
    if field not in tells:
        raise ShardKeyRequired(
            f"{name!r} does not tell the shard of {meta.object_name}; give"
            f" {' or '.join(f'{each.attname}=…' for each in tells) or 'a row it belongs to'}."
        )
    return field
