"""The models after the 28 migrations of this app, which contain every kind of operation."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import PackedIDField, ShardedModel


class OnFleet(ShardedModel):
    user_id = models.BigIntegerField()

    class Meta:
        abstract = True

    class ShardMeta:
        group = "fleet"
        shard_key = "user_id"


class Album(OnFleet):
    name = models.CharField(max_length=100)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user_id", "name"], name="fleet_album_name")]

    def __str__(self) -> str:
        return self.name


class Tag(OnFleet):
    word = models.CharField(max_length=50)

    class Meta:
        db_table = "fleet_labels"

    def __str__(self) -> str:
        return self.word


class Photo(OnFleet):
    user_id = models.BigIntegerField(db_index=True)
    title = models.CharField(max_length=200)
    file = models.CharField(max_length=255)
    note = models.TextField(default="")
    album = models.ForeignKey(Album, models.CASCADE, null=True)
    taken = models.DateTimeField(null=True)
    height = models.PositiveIntegerField(default=1)
    mood = models.CharField(max_length=20)
    checked = models.BooleanField(default=False)
    tags = models.ManyToManyField(Tag)

    class Meta:
        verbose_name = "picture"
        indexes = [models.Index(fields=["user_id", "taken"], name="fleet_photo_by_time")]

    def __str__(self) -> str:
        return self.title


class Remark(OnFleet):
    photo = models.ForeignKey(Photo, models.CASCADE)
    text = models.CharField(max_length=500)
    number = models.IntegerField(default=0)

    class Meta:
        unique_together = [("photo", "number")]

    def __str__(self) -> str:
        return self.text


class Receipt(ShardedModel):
    """Its ids start at another number on each shard, which is set after ``migrate``."""

    id = PackedIDField(primary_key=True, type_id=3)
    user_id = models.BigIntegerField()

    class ShardMeta:
        group = "fleet"
        shard_key = "user_id"

    def __str__(self) -> str:
        return str(self.pk)
