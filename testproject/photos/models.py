"""The models of the photo site: users are global, their rows are on the user's shard."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.urls import reverse
from django.utils.timezone import now

from sharded_orm import ShardedModel, TicketField
from sharded_orm.contrib.lookups import Lookup
from sharded_orm.contrib.lookups.tables import LookupTable
from testproject.photos import words
from testproject.photos.scenes import scene


def _user(**options: Any) -> models.ForeignKey[Any, Any]:
    # Users are in the global database, so no shard can enforce the key.
    return models.ForeignKey(
        settings.AUTH_USER_MODEL, models.DO_NOTHING, db_constraint=False, **options
    )


class Owned(ShardedModel):
    """Rows that belong to a user, and are on that user's shard."""

    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "owner"
        cache = True

    @property
    def shard_alias(self) -> str | None:
        """The alias of the shard that this row was read from."""
        return self._state.db


class Album(Owned):
    album_id = TicketField(primary_key=True)
    owner = _user(related_name="albums")
    title = models.CharField(max_length=100)
    created_at = models.DateTimeField(default=now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["owner", "title"], name="album_title_of_owner")
        ]

    def __str__(self) -> str:
        return self.title

    def get_absolute_url(self) -> str:
        return reverse("photos:album", args=[self.owner.username, self.album_id])


class Photo(Owned):
    photo_id = TicketField(primary_key=True)
    owner = _user(related_name="photos")
    # On the owner's shard like the photo, so an ordinary foreign key.
    album = models.ForeignKey(Album, models.CASCADE, related_name="photos")
    title = models.CharField(max_length=200)
    posted_at = models.DateTimeField(default=now)

    class Meta:
        indexes = [
            models.Index(fields=["owner", "-posted_at"], name="photo_of_owner"),
            models.Index(fields=["-posted_at"], name="photo_newest"),
        ]

    class ShardMeta(Owned.ShardMeta):
        # A new photo leaves the lists of the user's other albums valid.
        isolate_key = "album"
        # Old addresses, and those of pictures, do not name the user (Yupoo, Y7).
        lookups = [Lookup("photo_id", unique=True, table="photos.PhotoAddress")]

    def __str__(self) -> str:
        return self.title

    @property
    def description(self) -> str:
        """A description of the picture in words."""
        return scene(self.photo_id).description

    def get_absolute_url(self) -> str:
        return reverse("photos:photo", args=[self.owner.username, self.photo_id])


class PhotoTag(Owned):
    """A word that the owner has given to a photo; see :mod:`testproject.photos.tags`."""

    tag_id = TicketField(primary_key=True)
    owner = _user(related_name="photo_tags")
    photo = models.ForeignKey(Photo, models.CASCADE, related_name="tags")
    text = models.CharField(max_length=words.LONGEST)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "photo", "text"], name="tag_once")]
        indexes = [
            models.Index(fields=["text", "photo"], name="photos_of_tag"),
            models.Index(fields=["owner", "text"], name="tag_of_owner"),
        ]

    class ShardMeta(Owned.ShardMeta):
        isolate_key = "photo"

    def __str__(self) -> str:
        return self.text

    def clean(self) -> None:
        """Normalize the tag, whatever form it comes from."""
        self.text = words.normal(self.text)
        try:
            words.check(self.text)
        except words.InvalidTags as exc:
            raise ValidationError({"text": str(exc)}) from exc


class Comment(Owned):
    """A comment, on the shard of the photo's owner, as it is read with the photo.

    The author's shard has a copy, a :class:`WrittenComment`, so that the page "comments by" of an author
    queries one shard, too.
    """

    comment_id = TicketField(primary_key=True)
    owner = _user(related_name="+")
    photo = models.ForeignKey(Photo, models.CASCADE, related_name="comments")
    author = _user(related_name="+")
    text = models.TextField(max_length=1000)
    posted_at = models.DateTimeField(default=now)

    class ShardMeta(Owned.ShardMeta):
        isolate_key = "photo"

    def __str__(self) -> str:
        return self.text[:40]


class WrittenComment(ShardedModel):
    """The author's copy of a :class:`Comment`, on the author's shard (Yupoo, Y5). It follows the comment."""

    #: The id of the comment.
    comment_id = models.BigIntegerField(primary_key=True)
    author = _user(related_name="written_comments")
    #: The photo is on the owner's shard: no foreign key can lead there.
    owner = _user(related_name="+")
    photo_id = models.BigIntegerField()
    text = models.TextField(max_length=1000)
    posted_at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["author", "-posted_at"], name="comment_of_author")]

    class ShardMeta:
        mirror_of = Comment
        group = "photos"
        shard_key = "author"
        # Not cached: a relay in another process writes these rows too, and without memcached the
        # server of the demo has a cache of its own.

    def __str__(self) -> str:
        return self.text[:40]

    @property
    def description(self) -> str:
        """A description of the photo's picture in words."""
        return scene(self.photo_id).description


class PhotoAddress(LookupTable):
    """Photo id → owner, for old addresses (Y7); on the shard that the id itself names (Pinterest, P11).

    The table could be in the global database instead, but not in its SQLite file: the admin has a
    transaction open there while it saves a photo, and a file has one writer.
    """

    class ShardMeta(LookupTable.ShardMeta):
        group = "addresses"

    class Meta(LookupTable.Meta):
        verbose_name_plural = "photo addresses"
