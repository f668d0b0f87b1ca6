"""The models on shards, sharded by their owner; agents and cities are global."""

from __future__ import annotations

from sharded_orm.models import GlobalModel, ShardedModel
from tests.relatives import fields


class OfOwner(ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "owner"


class Agent(fields.Named, GlobalModel):
    pass


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
