"""Recognizes ids that each shard counts by itself, so that rows of two shards may have the same id."""

from __future__ import annotations

from typing import Any

from django.db.models import AutoField, UUIDField

from sharded_orm.models.sharding.options import shard_options, target_field


def counts_per_shard(field: Any) -> bool:
    """Whether each shard counts the ids in ``field`` by itself, and so repeats ids of other shards.

    If ``field`` is a foreign key, its ids are those of the referenced rows.
    """
    target = target_field(field)
    if not isinstance(target, AutoField) or hasattr(type(target), "embedded_shard"):
        return False
    options = shard_options(target.model)
    return options is not None and target is not options.key


def is_unique_over_shards(field: Any) -> bool:
    """Whether no two rows can have the same id in ``field``, even if they are on different shards.

    If ``field`` is a foreign key, the rows are the referenced rows. False if this is not certain.
    """
    target = target_field(field)
    return isinstance(target, UUIDField) or getattr(type(target), "unique_over_shards", False)
