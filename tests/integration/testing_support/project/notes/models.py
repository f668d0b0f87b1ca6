from __future__ import annotations

from django.db import models

from sharded_orm.models import GlobalModel, ShardedModel


class Person(GlobalModel):
    name = models.CharField(max_length=50)

    class ShardMeta:
        cache = True


class Note(ShardedModel):
    owner = models.IntegerField()
    text = models.CharField(max_length=100)

    class ShardMeta:
        group = "notes"
        shard_key = "owner"
        cache = True


class Remark(ShardedModel):
    owner = models.IntegerField()
    note = models.ForeignKey(Note, models.CASCADE)
    text = models.CharField(max_length=100)

    class ShardMeta:
        group = "notes"
        shard_key = "owner"


class Event(ShardedModel):
    owner = models.IntegerField()

    class ShardMeta:
        group = "other"
        shard_key = "owner"
