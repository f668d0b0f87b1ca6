"""What the processes of these tests cache. Imported only where Django is configured for them."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import GlobalModel, ShardedModel


class Row(models.Model):
    """A row moves in and out of lists: of those that filter by ``shown``, of those of an album."""

    item_id = models.BigIntegerField(primary_key=True)
    album_id = models.IntegerField()
    lane = models.IntegerField()
    shown = models.BooleanField()
    #: Another one after each write of the row.
    stamp = models.BigIntegerField()
    #: The same, as text: a row that was put together from two does not agree with itself.
    note = models.CharField(max_length=40)

    class Meta:
        abstract = True


class Item(Row, ShardedModel):
    user_id = models.BigIntegerField()

    class Meta:
        indexes = [models.Index(fields=["user_id", "lane"], name="item_lane")]

    class ShardMeta:
        group = "chaos"
        shard_key = "user_id"
        cache = True
        isolate_key = "album_id"


class Notice(Row, GlobalModel):
    class Meta:
        indexes = [models.Index(fields=["lane"], name="notice_lane")]

    class ShardMeta:
        cache = True
        isolate_key = "album_id"
