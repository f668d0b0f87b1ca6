"""Cached models of every kind."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from sharded_orm.models import GlobalModel, PackedIDField, ShardedModel

#: Text may be a cache key only if the database compares it byte by byte.
EXACT = settings.EXACT_COLLATION


class CachedAlbum(ShardedModel):
    """Refers to a cached row that may be deleted."""

    user_id = models.BigIntegerField()
    title = models.CharField(max_length=200)
    cover = models.ForeignKey("CachedPhoto", models.SET_NULL, null=True, related_name="+")

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True


class CachedPhoto(ShardedModel):
    """Has an isolate key, named by its attname."""

    photo_id = models.BigAutoField(primary_key=True)
    user_id = models.BigIntegerField()
    album = models.ForeignKey(CachedAlbum, models.CASCADE, null=True, related_name="photos")
    title = models.CharField(max_length=200)
    posted_at = models.DateTimeField(null=True)
    stars = models.IntegerField(default=0)
    price = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    tags = models.ManyToManyField("CachedTag", related_name="photos")

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True
        isolate_key = "album_id"


class CachedTag(ShardedModel):
    """Has no isolate key; unique within its shard key."""

    user_id = models.BigIntegerField()
    name = models.CharField(max_length=50)
    uses = models.IntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user_id", "name"], name="cached_tag_name")]

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True


class CachedComment(ShardedModel):
    """Has a foreign key to a cached row, which is its isolate key."""

    user_id = models.BigIntegerField()
    photo = models.ForeignKey(CachedPhoto, models.CASCADE, related_name="comments")
    text = models.TextField()

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True
        isolate_key = "photo"


class CachedBill(ShardedModel):
    """The database computes two of its fields."""

    user_id = models.BigIntegerField()
    net = models.IntegerField()
    tax = models.IntegerField(db_default=7)
    total = models.GeneratedField(
        expression=models.F("net") + models.F("tax"),
        output_field=models.IntegerField(),
        db_persist=True,
    )

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True


class PlainRow(ShardedModel):
    """A model without cache, in the same group as cached models."""

    user_id = models.BigIntegerField()
    photo = models.ForeignKey(CachedPhoto, models.CASCADE, null=True, related_name="plain_rows")
    text = models.CharField(max_length=100)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


class CachedNote(ShardedModel):
    """All its keys are text."""

    slug = models.CharField(max_length=150, primary_key=True, db_collation=EXACT)
    account = models.CharField(max_length=100, db_collation=EXACT)
    folder = models.CharField(max_length=100, db_collation=EXACT)
    text = models.TextField()

    class ShardMeta:
        group = "events"
        shard_key = "account"
        cache = True
        isolate_key = "folder"


class CachedBoard(ShardedModel):
    """The insert generates its shard key."""

    id = PackedIDField(primary_key=True, type_id=21)
    name = models.CharField(max_length=100)

    class ShardMeta:
        group = "pins"
        shard_key = "id"
        cache = True


class CachedProfile(ShardedModel):
    """Its primary key is the shard key, whose shard is in the directory."""

    user_id = models.BigIntegerField(primary_key=True)
    motto = models.CharField(max_length=100)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True


class CachedCountry(GlobalModel):
    name = models.CharField(max_length=100, unique=True)
    people = models.BigIntegerField(default=0)

    class ShardMeta:
        cache = True


class CachedPost(GlobalModel):
    """Global, with an isolate key."""

    topic = models.IntegerField(null=True)
    country = models.ForeignKey(CachedCountry, models.CASCADE, null=True, related_name="posts")
    title = models.CharField(max_length=100)

    class ShardMeta:
        cache = True
        isolate_key = "topic"


class CachedPlace(GlobalModel):
    """The parent of a cached model, in a table of its own."""

    name = models.CharField(max_length=100)

    class ShardMeta:
        cache = True


class CachedCafe(CachedPlace):
    chairs = models.IntegerField(default=0)
