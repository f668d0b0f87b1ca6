"""Models that find photos without their shard key."""

from __future__ import annotations

from sharded_orm.contrib.lookups import Lookup
from sharded_orm.models import ShardedModel, TicketField
from tests.benchmarks.models import PhotoFields


class Found(ShardedModel, PhotoFields):
    """The photos, found by their id alone."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        lookups = ["photo_id"]


class Known(ShardedModel, PhotoFields):
    """The photos, found by their id alone, which a process remembers."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        lookups = [Lookup("photo_id", unique=True)]


class Numbered(ShardedModel, PhotoFields):
    """The photos, with a number that is unique over all shards."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        lookups = [Lookup("stars", unique=True)]
