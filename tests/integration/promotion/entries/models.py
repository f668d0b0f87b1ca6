"""The model that the writers of these tests write."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import ShardedModel


class Entry(ShardedModel):
    entry_id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True  # if the settings configure a cache
