"""The columns of two sets of models: one in one plain database, one on shards.

A foreign key to a name without an app refers to the model of that name in the same set.
"""

from __future__ import annotations

from typing import Any

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models


def to_agent(related_name: str, **options: Any) -> Any:
    return models.ForeignKey(
        "Agent", models.DO_NOTHING, db_constraint=False, related_name=related_name, **options
    )


class Named(models.Model):
    id = models.BigIntegerField(primary_key=True)
    name = models.CharField(max_length=50)
    stars = models.IntegerField(default=0)
    posted_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.name


class AgentFields(Named):
    remarks = GenericRelation("Note", related_query_name="agent")

    class Meta:
        abstract = True


class ShelfFields(Named):
    owner = to_agent("shelves")

    class Meta:
        abstract = True


class LabelFields(Named):
    owner = to_agent("labels")

    class Meta:
        abstract = True


class ItemFields(Named):
    """Its shard key refers to an agent, and so do two other fields."""

    owner = to_agent("items")
    buyer = to_agent("bought", null=True)
    seller = to_agent("sold")
    shelf = models.ForeignKey("Shelf", models.CASCADE, null=True, related_name="items")
    city = models.ForeignKey(
        "City", models.DO_NOTHING, db_constraint=False, null=True, related_name="items"
    )
    parent = models.ForeignKey("self", models.CASCADE, null=True, related_name="children")
    labels: Any = models.ManyToManyField("Label", related_name="items")
    friends: Any = models.ManyToManyField("self")
    notes = GenericRelation("Note", related_query_name="item")

    class Meta:
        abstract = True


class PassportFields(Named):
    """One-to-one with the row that its shard key refers to."""

    owner = models.OneToOneField(
        "Agent", models.DO_NOTHING, db_constraint=False, related_name="passport"
    )
    memos = GenericRelation("Memo", related_query_name="passport")

    class Meta:
        abstract = True


class BadgeFields(Named):
    """One-to-one with another row of the model that its shard key refers to."""

    owner = to_agent("badges")
    holder = models.OneToOneField(
        "Agent", models.DO_NOTHING, db_constraint=False, null=True, related_name="badge"
    )

    class Meta:
        abstract = True


class CoverFields(Named):
    """One-to-one inside the group."""

    owner = to_agent("covers")
    item = models.OneToOneField("Item", models.CASCADE, null=True, related_name="cover")

    class Meta:
        abstract = True


class NoteFields(Named):
    """About a row of any model."""

    owner = to_agent("%(class)ss")
    content_type = models.ForeignKey(
        ContentType, models.DO_NOTHING, db_constraint=False, null=True, related_name="+"
    )
    object_id = models.BigIntegerField(null=True)
    content_object = GenericForeignKey()

    class Meta:
        abstract = True
