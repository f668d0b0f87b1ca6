"""The models of the new release; ``title`` is still used by the old one."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import ShardedModel


class Album(ShardedModel):
    album_id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()
    title = models.CharField(max_length=20)
    stars = models.IntegerField(default=5)
    note = models.CharField(max_length=20, null=True)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


class Tag(ShardedModel):
    tag_id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
