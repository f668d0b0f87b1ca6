"""Guests of a house, who are found by what they have: each kind of lookup, with both places of its entries."""

from __future__ import annotations

from django.db import models

from sharded_orm import ShardedModel
from sharded_orm.contrib.lookups import Lookup
from sharded_orm.contrib.lookups.tables import LookupTable
from sharded_orm.models.fields import ExactCharField


class ValueEntry(LookupTable):
    """Entries of two lookups, on shards that the values name."""

    class ShardMeta(LookupTable.ShardMeta):
        group = "accounts"


class Guest(ShardedModel):
    id = models.BigIntegerField(primary_key=True)
    house_id = models.BigIntegerField()
    email = ExactCharField(max_length=40, null=True)
    badge = ExactCharField(max_length=40, null=True)
    room = models.IntegerField(null=True)
    city = ExactCharField(max_length=40, null=True)

    class ShardMeta:
        group = "books"
        shard_key = "house_id"
        lookups = [
            Lookup("email", unique=True),
            Lookup("badge", unique=True, table="guests.ValueEntry"),
            "room",
            Lookup("city", table="guests.ValueEntry"),
        ]
