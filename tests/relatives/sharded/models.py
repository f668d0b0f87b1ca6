"""The models on shards, sharded by their owner; agents, cities and memos are global."""

from __future__ import annotations

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models

from sharded_orm.models import GlobalModel, PackedIDField, ShardedModel
from tests.relatives import fields


class OfOwner(ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "owner"


class Agent(fields.AgentFields, GlobalModel):
    stamps = GenericRelation("Stamp", related_query_name="agent")


class City(fields.Named):
    """A model that does not know of shards."""


class Shelf(fields.ShelfFields, OfOwner):
    pass


class Label(fields.LabelFields, OfOwner):
    pass


class Item(fields.ItemFields, OfOwner):
    pass


class Passport(fields.PassportFields, OfOwner):
    pass


class Badge(fields.BadgeFields, OfOwner):
    pass


class Cover(fields.CoverFields, OfOwner):
    pass


class Note(fields.NoteFields, OfOwner):
    pass


class Memo(fields.NoteFields, GlobalModel):
    pass


class Stamp(ShardedModel):
    """Sharded by the id of the row that it is about."""

    id = models.BigIntegerField(primary_key=True)
    content_type = models.ForeignKey(ContentType, models.DO_NOTHING, db_constraint=False)
    object_id = models.BigIntegerField()
    content_object = GenericForeignKey()

    class ShardMeta:
        group = "photos"
        shard_key = "object_id"


class Sticker(ShardedModel):
    """Its key is generated for the shard of the row that it is about."""

    id = PackedIDField(primary_key=True, type_id=90)
    name = models.CharField(max_length=50)
    content_type = models.ForeignKey(ContentType, models.DO_NOTHING, db_constraint=False)
    object_id = models.BigIntegerField()
    content_object = GenericForeignKey()

    class ShardMeta:
        group = "pins"
        shard_key = "id"
