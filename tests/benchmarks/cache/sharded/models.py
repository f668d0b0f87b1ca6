"""The cached model, and the same model without the cache."""

from __future__ import annotations

from sharded_orm.models import ShardedModel, TicketField
from tests.benchmarks.cache.fields import PhotoFields


class Photo(ShardedModel, PhotoFields):
    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True


class Twin(ShardedModel, PhotoFields):
    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "twin"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
