"""Models for the tests of routing and queries."""

from __future__ import annotations

from django.db import models

from sharded_orm.ids.layout import TimestampedLayout
from sharded_orm.models import (
    ExactCharField,
    GlobalManager,
    GlobalModel,
    PackedIDField,
    ShardedManager,
    ShardedModel,
    TicketField,
    TimestampedIDField,
)


class PersonManager(GlobalManager):
    def get_by_natural_key(self, username: str) -> Person:
        person: Person = self.get(username=username)
        return person


class Person(GlobalModel):
    username = models.CharField(max_length=50, unique=True)

    objects = PersonManager()

    def __str__(self) -> str:
        return self.username

    def natural_key(self) -> tuple[str]:
        return (self.username,)


class OnPhotos(ShardedModel):
    """An abstract base; its subclasses inherit the ShardMeta."""

    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"


class Album(ShardedModel):
    album_id = TicketField(primary_key=True)
    owner = models.ForeignKey(Person, models.DO_NOTHING, db_constraint=False, related_name="albums")
    title = models.CharField(max_length=200)

    class ShardMeta:
        group = "photos"
        shard_key = "owner"

    def __str__(self) -> str:
        return self.title


class TagManager(ShardedManager):  # type: ignore[misc, valid-type]
    def get_by_natural_key(self, user_id: int, name: str) -> Tag:
        tag: Tag = self.get(user_id=user_id, name=name)
        return tag


class Tag(OnPhotos):
    user_id = models.BigIntegerField()
    name = models.CharField(max_length=50)

    objects = TagManager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user_id", "name"], name="tag_name")]

    def __str__(self) -> str:
        return self.name

    def natural_key(self) -> tuple[int, str]:
        return (self.user_id, self.name)


class Photo(OnPhotos):
    photo_id = TicketField(primary_key=True, sequence="photos")
    user_id = models.BigIntegerField()
    album = models.ForeignKey(Album, models.CASCADE, null=True, blank=True, related_name="photos")
    title = models.CharField(max_length=200)
    posted_at = models.DateTimeField(null=True, blank=True)
    stars = models.IntegerField(null=True, blank=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, null=True, blank=True)
    tags = models.ManyToManyField(Tag, blank=True, related_name="photos")

    class Meta:
        indexes = [models.Index(fields=["posted_at"], name="photo_posted")]

    def __str__(self) -> str:
        return self.title

    def get_absolute_url(self) -> str:
        return f"/of/{self.user_id}/{self.photo_id}/"


class Comment(OnPhotos):
    comment_id = TicketField(primary_key=True)
    user_id = models.BigIntegerField()
    photo = models.ForeignKey(Photo, models.CASCADE, related_name="comments")
    author = models.ForeignKey(
        Person, models.DO_NOTHING, db_constraint=False, related_name="+", null=True
    )
    text = models.TextField()


class Vote(OnPhotos):
    """Its composite primary key contains the shard key."""

    pk = models.CompositePrimaryKey("user_id", "number")
    user_id = models.BigIntegerField()
    number = models.IntegerField()
    value = models.IntegerField(default=0)


class Event(ShardedModel):
    """Sharded by text, modulo its md5."""

    account = ExactCharField(max_length=100)
    number = models.IntegerField(default=0)

    class ShardMeta:
        group = "events"
        shard_key = "account"


class Reading(ShardedModel):
    """Sharded by ranges of its sensor."""

    sensor = models.IntegerField()
    value = models.FloatField()

    class ShardMeta:
        group = "archive"
        shard_key = "sensor"


class Pin(ShardedModel):
    """Its id carries its shard."""

    id = models.BigIntegerField(primary_key=True)
    note = models.CharField(max_length=100)

    class ShardMeta:
        group = "pins"
        shard_key = "id"


class Board(ShardedModel):
    """A table of its shard counts its packed ids."""

    id = PackedIDField(primary_key=True, type_id=1)
    name = models.CharField(max_length=100)
    parent = models.ForeignKey("self", models.CASCADE, null=True, blank=True)

    class ShardMeta:
        group = "pins"
        shard_key = "id"


class Save(ShardedModel):
    """On the shard of its board; its own packed id carries the same shard."""

    id = PackedIDField(primary_key=True, type_id=2)
    board = models.ForeignKey(Board, models.CASCADE, related_name="saves")
    note = models.CharField(max_length=100)

    class ShardMeta:
        group = "pins"
        shard_key = "board"


class Like(ShardedModel):
    """Refers to a packed id that is not its shard key."""

    id = PackedIDField(primary_key=True, type_id=3)
    board = models.ForeignKey(Board, models.CASCADE)
    save_of = models.ForeignKey(Save, models.CASCADE, null=True)

    class ShardMeta:
        group = "pins"
        shard_key = "board"


class Visit(ShardedModel):
    """Its timestamped id is its shard key."""

    id = TimestampedIDField(primary_key=True)
    page = models.CharField(max_length=100, unique=True)

    class ShardMeta:
        group = "visits"
        shard_key = "id"


class Story(ShardedModel):
    """Sharded by its author, modulo; its id carries the shard as well."""

    id = TimestampedIDField(primary_key=True, layout=TimestampedLayout(sequence_bits=4))
    author = models.BigIntegerField()
    text = models.CharField(max_length=100)

    class ShardMeta:
        group = "events"
        shard_key = "author"


class BoardProxy(Board):
    class Meta:
        proxy = True


class VisitProxy(Visit):
    class Meta:
        proxy = True


class Note(ShardedModel):
    """Its own packed id is the shard key. It may refer to a board, and has a second id."""

    id = PackedIDField(primary_key=True, type_id=4)
    board = models.ForeignKey(Board, models.CASCADE, null=True, blank=True, related_name="notes")
    text = models.CharField(max_length=100)
    stamp = TimestampedIDField(unique=True)

    class ShardMeta:
        group = "pins"
        shard_key = "id"


class Tick(ShardedModel):
    """Its timestamped id is not the shard key, but routes all the same."""

    id = TimestampedIDField(primary_key=True)
    visit = models.ForeignKey(Visit, models.CASCADE)

    class ShardMeta:
        group = "visits"
        shard_key = "visit"
