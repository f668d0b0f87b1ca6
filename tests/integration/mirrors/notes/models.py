"""Notes of an owner, and their mirrors."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from sharded_orm import ShardedModel, TicketField
from sharded_orm.contrib.mirrors.querysets import MirrorManager


class Note(ShardedModel):
    note_id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    author_id = models.BigIntegerField(null=True)
    text = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=0)
    is_public = models.BooleanField(default=True)
    changed_at = models.DateTimeField(auto_now=True)
    answers = models.ForeignKey("self", models.CASCADE, null=True, related_name="replies")
    topics = models.ManyToManyField("Topic", through="NoteTopic")

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"
        cache = True


class Topic(ShardedModel):
    topic_id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    name = models.CharField(max_length=50)

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"


class NoteTopic(ShardedModel):
    """Which notes have which topics; a table of a many-to-many relation that has a mirror."""

    id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    note = models.ForeignKey(Note, models.CASCADE)
    topic = models.ForeignKey(Topic, models.CASCADE)
    data = models.JSONField(null=True)

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"


class WrittenNote(ShardedModel):
    """The author's copy: the key may change, and may be missing."""

    note_id = models.BigIntegerField(primary_key=True)
    author_id = models.BigIntegerField()
    owner_id = models.BigIntegerField()
    text = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    changed_at = models.DateTimeField()

    class ShardMeta:
        mirror_of = "notes.Note"
        group = "books"
        shard_key = "author_id"
        cache = True


class PlainNote(ShardedModel):
    """As ``Note``, but without mirrors: what benchmarks compare with."""

    note_id = TicketField(primary_key=True)
    owner_id = models.BigIntegerField()
    author_id = models.BigIntegerField(null=True)
    text = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=0)
    is_public = models.BooleanField(default=True)
    changed_at = models.DateTimeField(auto_now=True)
    answers = models.ForeignKey("self", models.CASCADE, null=True)

    class ShardMeta:
        group = "books"
        shard_key = "owner_id"
        cache = True


class PlainWrittenNote(ShardedModel):
    """As ``WrittenNote``, but written by hand."""

    note_id = models.BigIntegerField(primary_key=True)
    author_id = models.BigIntegerField()
    owner_id = models.BigIntegerField()
    text = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    changed_at = models.DateTimeField()

    class ShardMeta:
        group = "books"
        shard_key = "author_id"
        cache = True


class PublicNote(ShardedModel):
    """In another group, and only some of the rows."""

    note_id = models.BigIntegerField(primary_key=True)
    text = models.CharField(max_length=100)

    class ShardMeta:
        mirror_of = Note
        group = "accounts"
        shard_key = "note_id"
        condition = Q(is_public=True)


class TopicOfNote(ShardedModel):
    id = models.BigIntegerField(primary_key=True)
    note_id = models.BigIntegerField()
    topic_id = models.BigIntegerField()
    data = models.JSONField(null=True)

    class ShardMeta:
        mirror_of = NoteTopic
        group = "accounts"
        shard_key = "topic_id"


class VerifiedTopic(ShardedModel):
    """Compared with its source whenever it is read, nulls included."""

    id = models.BigIntegerField(primary_key=True)
    owner_id = models.BigIntegerField()
    topic_id = models.BigIntegerField()
    data = models.JSONField(null=True)

    objects = MirrorManager()

    class ShardMeta:
        mirror_of = NoteTopic
        group = "books"
        shard_key = "topic_id"
        cache = True
        verify_reads = True


class VerifiedNote(ShardedModel):
    """Compared with its source whenever it is read."""

    note_id = models.BigIntegerField(primary_key=True)
    author_id = models.BigIntegerField()
    owner_id = models.BigIntegerField()
    text = models.CharField(max_length=100)

    objects = MirrorManager()

    class Meta:
        ordering = ("note_id",)

    class ShardMeta:
        mirror_of = Note
        group = "books"
        shard_key = "author_id"
        cache = True
        verify_reads = True
