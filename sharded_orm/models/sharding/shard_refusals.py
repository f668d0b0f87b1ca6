"""Refuses to write a row on a shard where it does not belong."""

from __future__ import annotations

from typing import Any

from django.db import models

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.kept_shard import KeptShard
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions, options_of
from sharded_orm.models.sharding.same_key import refuse_related_of_other_key
from sharded_orm.topology.model import Shard


def refuse_relations_to_other_shards(
    options: ShardOptions, row: Any, using: str, update_fields: Any
) -> None:
    """Raise an error if a row that ``row`` refers to does not fit the shard ``using``.

    Call this before each save. Django asks the router about a relation only when a row is assigned,
    and the shard key may have been set after that.

    :param update_fields: the names of the fields that are saved; None for all.
    :raises CrossShardRelation: the other row is on another shard.
    :raises CrossKeyRelation: the other row has another shard key.
    """
    refuse_related_of_other_key(row, update_fields)
    related: dict[str, Any] = row._state.fields_cache
    for name, other in related.items():
        alias = other._state.db if isinstance(other, models.Model) else None
        if alias in (None, using, options.group) or other._state.adding:
            continue
        other_options = options_of(other)
        if (
            other_options is not None
            and other_options.group == options.group
            and current_alias(other_options, other) != using
        ):
            raise CrossShardRelation(
                f"{describe(row)} cannot be saved on {using!r}: its {name!r} is"
                f" {describe(other)}, which is on {alias!r}. Rows of one group can only be"
                " related on one shard."
            )


def refuse_near_on_other_shard(options: ShardOptions, row: Any, using: str) -> None:
    """Raise an error if the row passed as ``near=`` is on another shard than ``using``.

    ``near=`` puts a new row without a shard key on the shard of another row. But a new row with an
    explicit key belongs on the shard of this key.

    :raises CrossShardRelation: the two shards differ.
    """
    near: Any = getattr(row._state, "near", None)
    alias = row_placement.colocated_alias(options, near) if near is not None else None
    if alias is not None and alias != using:
        raise CrossShardRelation(
            f"{describe(row)} cannot be saved on {using!r}: near={describe(near)} is on"
            f" {alias!r}. Leave out the {options.key.name if options.key else None!r}, or near=."
        )


def refuse_other_shard(options: ShardOptions, row: Any, alias: str) -> None:
    """Raise an error if the shard key of ``row`` does not belong on the shard ``alias``.

    :raises ShardKeyChanged: the row is stored already, and its key belongs on another shard.
    :raises CrossShardRelation: for a new row whose key, near= or relation is on another shard.
    """
    key = options.key
    kept: KeptShard | None = None
    if key is not None:
        if alias == row._state.db and key.attname not in row.__dict__:
            # The shard key was never loaded, so it is unchanged and belongs on this shard.
            return
        kept = row._state.__dict__.get("kept_shard")
        value = row.__dict__.get(key.attname)
        if kept is not None and kept.is_accepted(alias, value):
            return
        if kept is not None and type(value) is int and not options.key_has_pre_save:
            # A shortcut for integer keys, the commonest keys. It finds the same shard as the
            # code below, in half of the time.
            located = kept.find(options.group, key.get_prep_value(value), runtime.locate)
            if located is not None and located.alias == alias:
                kept.accept(alias, value)
                return
    home = runtime.topology().resolve(alias)
    if home is None and database_settings.template_group(alias) == options.group:
        return
    shard = row_placement.locate(options, row)
    if options.awaits_key(row):
        _refuse_wrong_shard_of_new_id(options, row, alias, shard or home)
        return
    if shard is None and row._state.adding:
        shard = row_placement.place(options, row)
    if shard is not None and shard.alias == alias:
        if kept is not None and key is not None and not options.key_has_pre_save:
            kept.accept(alias, row.__dict__.get(key.attname))
        return
    name, key = options.key.name if options.key is not None else None, options.key_of(row)
    where = f"shard {shard.alias!r}" if shard is not None else "no shard yet"
    if not row._state.adding:
        raise ShardKeyChanged(
            f"{describe(row)} was read from {row._state.db!r} and cannot be written on {alias!r}: its shard"
            f" key {name}={key!r} is on {where}. The key of a row never changes by save(): leave out"
            " using= if it is given, or create the row under the new key and delete this one."
        )
    raise CrossShardRelation(
        f"{describe(row)} cannot be saved on {alias!r}: its shard key {name}={key!r} is on {where}."
        " Relate it only to rows with the same shard key, leave out using= if it is given, and set"
        " the key before save(), not in a receiver of pre_save."
    )


def _refuse_wrong_shard_of_new_id(
    options: ShardOptions, row: Any, alias: str, required: Shard | None
) -> None:
    # The shard key is generated for whichever shard stores the row. So the key fits any shard,
    # and only near= or a related row can require a certain shard.
    if required is None or required.group != options.group:
        raise CrossShardRelation(
            f"{describe(row)} cannot be saved on {alias!r}, which is no shard of group"
            f" {options.group!r}. Leave out using=."
        )
    if required.alias != alias:
        raise CrossShardRelation(
            f"{describe(row)} cannot be saved on {alias!r}: near= or a row that it refers to is"
            f" on {required.alias!r}. Leave out using=, or near=."
        )
