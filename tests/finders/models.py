"""Models whose rows are found by other columns than the shard key, and the same in one database."""

from __future__ import annotations

from django.db import models

from sharded_orm import ShardedModel
from sharded_orm.contrib.lookups import Lookup
from sharded_orm.contrib.lookups.tables import LookupTable
from sharded_orm.models.fields import ExactCharField


class AccountFields(models.Model):
    id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()
    serial = models.IntegerField(null=True)
    note = models.CharField(max_length=40, default="")

    class Meta:
        abstract = True


class Account(ShardedModel, AccountFields):
    email = ExactCharField(max_length=60, null=True)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        lookups = ["serial", Lookup("email", unique=True)]


class EmailEntry(LookupTable):
    class ShardMeta(LookupTable.ShardMeta):
        group = "events"


class Member(ShardedModel, AccountFields):
    """As :class:`Account`. The entries of its addresses are on shards of their own."""

    email = ExactCharField(max_length=60, null=True)

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        lookups = ["serial", Lookup("email", unique=True, table="finders.EmailEntry")]


class PlainAccount(AccountFields):
    """The twin of :class:`Account` and :class:`Member` in one database."""

    email = ExactCharField(max_length=60, null=True, unique=True)


class Ticket(ShardedModel):
    """Cached. Its primary key comes from the shard, and its rows are deleted with those of an account."""

    user_id = models.BigIntegerField()
    account = models.ForeignKey(Account, models.CASCADE, null=True, related_name="tickets")
    code = models.UUIDField()

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True
        lookups = ["code", "account"]
