"""A sharded model with columns of types that only PostgreSQL has."""

from __future__ import annotations

from django.contrib.postgres.constraints import ExclusionConstraint
from django.contrib.postgres.fields import (
    ArrayField,
    DateTimeRangeField,
    IntegerRangeField,
    RangeOperators,
)
from django.db import models

from sharded_orm.models import ShardedModel


class Specimen(ShardedModel):
    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()
    text = models.TextField(null=True)
    tags = ArrayField(models.CharField(max_length=20), null=True)
    numbers = ArrayField(models.IntegerField(null=True), null=True)
    span = IntegerRangeField(null=True)
    period = DateTimeRangeField(null=True)
    address = models.GenericIPAddressField(null=True)
    data = models.JSONField(null=True)
    amount = models.DecimalField(max_digits=30, decimal_places=8, null=True)
    ratio = models.FloatField(null=True)
    took = models.DurationField(null=True)
    big = models.BigIntegerField(null=True)

    class Meta:
        constraints = [
            ExclusionConstraint(
                name="booked_once",
                expressions=[("span", RangeOperators.OVERLAPS)],
                condition=models.Q(text="booked"),
            )
        ]

    class ShardMeta:
        group = "photos"
        shard_key = "owner"


class CachedSpecimen(ShardedModel):
    """The driver returns a list for one of its columns."""

    owner = models.BigIntegerField(primary_key=True)
    tags = ArrayField(models.CharField(max_length=20))

    class ShardMeta:
        group = "photos"
        shard_key = "owner"
        cache = True
