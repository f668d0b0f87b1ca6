"""A model whose rows name the node that they are on."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import ShardedModel


class Place(ShardedModel):
    place_id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()
    node = models.CharField(max_length=50)

    class Meta:
        app_label = "places"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"

    def __str__(self) -> str:
        return self.node
