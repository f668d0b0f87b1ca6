"""Recognizes ids that each shard counts by itself, so that rows of two shards may have the same id."""

from __future__ import annotations

from typing import Any

from django.db.models import AutoField, UUIDField

from sharded_orm.models.sharding.options import shard_options, target_field


def counts_per_shard(field: Any) -> bool:
    """Return whether each shard counts the ids in ``field`` by itself.

    Then rows of two shards may have the same id. If ``field`` is a foreign key, its ids are those
    of the referenced rows.
    """
    target = target_field(field)
    if not isinstance(target, AutoField) or hasattr(type(target), "embedded_shard"):
        return False
    options = shard_options(target.model)
    return options is not None and target is not options.key


def is_unique_over_shards(field: Any) -> bool:
    """Return whether an id in ``field`` is certainly the id of only one row on all shards together.

    If ``field`` is a foreign key, the rows are the referenced rows.
    """
    target = target_field(field)
    return isinstance(target, UUIDField) or getattr(type(target), "unique_over_shards", False)
