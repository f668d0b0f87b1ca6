"""One table with three models: ours by two strategies, and Django's own on the same rows."""

from __future__ import annotations

from django.db import models

from sharded_orm.contrib.lookups import Lookup
from sharded_orm.models import ShardedModel, TicketField


class PhotoFields(models.Model):
    user_id = models.BigIntegerField()
    title = models.CharField(max_length=200)
    posted_at = models.DateTimeField(db_index=True)
    stars = models.IntegerField(null=True)

    class Meta:
        abstract = True


class Photo(ShardedModel, PhotoFields):
    """Modulo 512: the shard of a key is computed."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"
        indexes = [models.Index(fields=["user_id", "posted_at"], name="photo_of_user")]

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


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


class Upload(ShardedModel, PhotoFields):
    """Modulo 16, for bulk writes."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "uploads"
        shard_key = "user_id"


class Placed(ShardedModel, PhotoFields):
    """Placed by the directory."""

    photo_id = TicketField(primary_key=True)

    class Meta:
        db_table = "photo"

    class ShardMeta:
        group = "placed"
        shard_key = "user_id"


class Plain(PhotoFields):
    """The model of a project without our library."""

    photo_id = models.BigIntegerField(primary_key=True)

    class Meta:
        db_table = "photo"
        managed = False
