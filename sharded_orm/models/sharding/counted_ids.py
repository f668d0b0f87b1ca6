"""Recognizes ids that each shard counts by itself."""

from __future__ import annotations

from typing import Any

from django.db.models import AutoField

from sharded_orm.models.sharding.options import shard_options, target_field


def counts_per_shard(field: Any) -> bool:
    """Whether each shard counts the ids in ``field`` by itself, so that two shards have the same ids.

    For a foreign key, the answer is about the ids that it refers to.
    """
    target = target_field(field)
    if not isinstance(target, AutoField) or hasattr(type(target), "embedded_shard"):
        return False
    options = shard_options(target.model)
    return options is not None and target is not options.key
