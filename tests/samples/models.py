"""Sharded models with a column of every type, for comparisons with one database."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from sharded_orm.models import ShardedModel


class OnPhotos(ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "owner"


class Sample(OnPhotos):
    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()
    name = models.CharField(max_length=60, null=True)
    label = models.CharField(max_length=60, default="")
    text = models.TextField(null=True)
    number = models.IntegerField(null=True)
    price = models.DecimalField(max_digits=9, decimal_places=2, null=True)
    ratio = models.FloatField(null=True)
    flag = models.BooleanField(null=True)
    day = models.DateField(null=True)
    at = models.DateTimeField(null=True)
    clock = models.TimeField(null=True)
    took = models.DurationField(null=True)
    code = models.UUIDField(null=True)
    data = models.JSONField(null=True)
    blob = models.BinaryField(null=True)


class Part(OnPhotos):
    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()
    sample = models.ForeignKey(Sample, models.CASCADE, related_name="parts")
    weight = models.IntegerField(null=True)

    class Meta:
        ordering = ["-weight", "id"]


class Handle(ShardedModel):
    """Its key is text; a directory places it."""

    name = models.CharField(max_length=40, primary_key=True, db_collation=settings.EXACT_COLLATION)
    note = models.CharField(max_length=40, default="")

    class ShardMeta:
        group = "photos"
        shard_key = "name"


class Letter(ShardedModel):
    """On the shard of the handle that it is written to; its number repeats from shard to shard."""

    handle = models.ForeignKey(Handle, models.CASCADE, related_name="letters")
    text = models.CharField(max_length=40, default="")

    class ShardMeta:
        group = "photos"
        shard_key = "handle"
