"""Photos with a country, and the same on one database."""

from __future__ import annotations

from typing import Any

from django.db import models

from sharded_orm import ShardedModel, TicketField, on_delete
from sharded_orm.contrib.references.models import ReferenceModel


class Continent(ReferenceModel):
    name = models.CharField(max_length=50, unique=True)

    def __str__(self) -> str:
        return self.name


class Country(ReferenceModel):
    name = models.CharField(max_length=50)
    code = models.CharField(max_length=2, unique=True)
    continent = models.ForeignKey(Continent, models.PROTECT, null=True)
    neighbour = models.ForeignKey("self", models.PROTECT, null=True)
    area = models.DecimalField(max_digits=12, decimal_places=2, default=0)
    changed_at = models.DateTimeField(auto_now=True)
    facts = models.JSONField(default=dict)
    notes = models.JSONField(null=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class City(ReferenceModel):
    name = models.CharField(max_length=50)
    country = models.ForeignKey(Country, models.CASCADE)
    capital_of = models.ForeignKey("self", models.CASCADE, null=True)


class Visa(ReferenceModel):
    """Photos go with their visa."""

    name = models.CharField(max_length=50)

    class ShardMeta:
        cache = True


class Photo(ShardedModel):
    photo_id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    title = models.CharField(max_length=50)
    views = models.IntegerField(default=0)
    country: Any = models.ForeignKey(Country, on_delete.PROTECT, null=True)
    visa: Any = models.ForeignKey(Visa, on_delete.CASCADE, null=True)

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"


class Remark(ShardedModel):
    remark_id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    photo: Any = models.ForeignKey(Photo, models.CASCADE)
    country: Any = models.ForeignKey(Country, on_delete.LEAVE, null=True, related_name="remarks")
    city: Any = models.ForeignKey(City, on_delete.SET_NULL, null=True)
    text = models.CharField(max_length=50)

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"


class WrittenRemark(ShardedModel):
    """A mirror with fields of its source, as in ``ShardMeta.fields``."""

    class ShardMeta:
        mirror_of = "geo.Remark"
        group = "accounts"
        shard_key = "photo_id"
        fields = ("country", "text")


class PhotoOfVisa(ShardedModel):
    """A mirror with all fields of its source."""

    class ShardMeta:
        mirror_of = Photo
        group = "accounts"
        shard_key = "visa_id"


class TwinContinent(models.Model):
    name = models.CharField(max_length=50, unique=True)


class TwinCountry(models.Model):
    name = models.CharField(max_length=50)
    code = models.CharField(max_length=2, unique=True)
    continent = models.ForeignKey(TwinContinent, models.PROTECT, null=True)
    neighbour = models.ForeignKey("self", models.PROTECT, null=True)
    area = models.DecimalField(max_digits=12, decimal_places=2, default=0)

    class Meta:
        ordering = ("name",)


class TwinPhoto(models.Model):
    photo_id = models.BigIntegerField(primary_key=True)
    owner_id = models.BigIntegerField()
    title = models.CharField(max_length=50)
    views = models.IntegerField(default=0)
    country: Any = models.ForeignKey(TwinCountry, models.PROTECT, null=True)


class TwinRemark(models.Model):
    remark_id = models.BigIntegerField(primary_key=True)
    owner_id = models.BigIntegerField()
    photo: Any = models.ForeignKey(TwinPhoto, models.CASCADE)
    country: Any = models.ForeignKey(TwinCountry, models.PROTECT, null=True, related_name="remarks")
    text = models.CharField(max_length=50)
