"""The same rows with an id of each kind that the database makes."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import PackedIDField, ShardedModel, TimestampedIDField
from tests.benchmarks.models import PhotoFields


class Stamped(ShardedModel, PhotoFields):
    """Time, shard and number, by a function in the schema."""

    photo_id = TimestampedIDField(primary_key=True)

    class Meta:
        db_table = "stamped"

    class ShardMeta:
        group = "uploads"
        shard_key = "user_id"


class Packed(ShardedModel, PhotoFields):
    """Shard, type and number, by the sequence of the column."""

    photo_id = PackedIDField(primary_key=True, type_id=1)

    class Meta:
        db_table = "packed"

    class ShardMeta:
        group = "packed"
        shard_key = "user_id"


class StampedByStock(PhotoFields):
    """The same table, with the same default of its column, as a model of stock Django."""

    photo_id = models.BigAutoField(primary_key=True)

    class Meta:
        db_table = "stamped"
        managed = False


class Counted(PhotoFields):
    """Numbers by the sequence of the column: what stock Django has."""

    photo_id = models.BigAutoField(primary_key=True)

    class Meta:
        db_table = "counted"
