"""Recognizes ids that each shard generates by a counter of its own.

Rows of two shards may have the same id of this kind.
"""

from __future__ import annotations

from typing import Any

from django.db.models import AutoField, UUIDField

from sharded_orm.models.sharding.options import shard_options, target_field


def counts_per_shard(field: Any) -> bool:
    """Return whether each shard generates the ids in ``field`` by a counter of its own.

    If so, rows of two shards may have the same id. If ``field`` is a foreign key, its ids are those
    of the referenced rows.
    """
    target = target_field(field)
    if not isinstance(target, AutoField) or hasattr(type(target), "embedded_shard"):
        return False
    options = shard_options(target.model)
    return options is not None and target is not options.key


def is_unique_over_shards(field: Any) -> bool:
    """Return whether it is certain that no two rows, on any shards, have the same id in ``field``.

    If ``field`` is a foreign key, this is about the ids of the referenced rows.
    """
    target = target_field(field)
    return isinstance(target, UUIDField) or getattr(type(target), "unique_over_shards", False)
