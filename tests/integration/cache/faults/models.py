"""The cached models of these tests. Imported only in processes that configure Django for them."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import GlobalModel, ShardedModel


class Row(models.Model):
    """A row that enters and leaves lists: those that filter by ``shown``, and those of an album."""

    item_id = models.BigIntegerField(primary_key=True)
    album_id = models.IntegerField()
    lane = models.IntegerField()
    shown = models.BooleanField()
    #: Each write of the row sets another value.
    stamp = models.BigIntegerField()
    #: The same value as text: in a row that is mixed from two states, the two differ.
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
