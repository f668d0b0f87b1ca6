"""Both sides of a sharded model's relations have descriptors of ours."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import models, router
from django.test.utils import isolate_apps

from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models import ShardedModel
from sharded_orm.models.relations.descriptors import (
    ShardedManyToManyDescriptor,
    ShardedReverseManyToOneDescriptor,
    ShardedReverseOneToOneDescriptor,
)
from tests.photos.models import Photo
from tests.relatives.sharded.models import Agent, City, Item, Label


@pytest.mark.parametrize(
    ("model", "accessor", "kind"),
    [
        (Agent, "bought", ShardedReverseManyToOneDescriptor),
        (Agent, "badge", ShardedReverseOneToOneDescriptor),
        (City, "items", ShardedReverseManyToOneDescriptor),
        (Item, "children", ShardedReverseManyToOneDescriptor),
        (Label, "items", ShardedManyToManyDescriptor),
    ],
)
def test_the_other_side(model: Any, accessor: str, kind: type) -> None:
    assert type(model.__dict__[accessor]) is kind


@isolate_apps("tests.photos")
def test_a_relation_to_a_proxy() -> None:
    class GroupProxy(Group):
        class Meta:
            app_label = "photos_app"
            proxy = True

    class Membership(ShardedModel):
        user_id = models.BigIntegerField()
        group = models.ForeignKey(
            GroupProxy, models.DO_NOTHING, db_constraint=False, related_name="memberships"
        )

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    try:
        assert type(Group.__dict__["memberships"]) is ShardedReverseManyToOneDescriptor
        assert Membership.group.field.remote_field.model is GroupProxy
    finally:
        delattr(Group, "memberships")


def test_the_router_does_not_take_a_row_for_the_key() -> None:
    """The router does not know by which relation the row was reached."""
    agent = Agent(id=1)
    agent._state.db, agent._state.adding = "default", False
    with pytest.raises(ShardKeyRequired, match="does not tell the shard"):
        router.db_for_read(Item, instance=agent)
    # The shard key of the row that is written decides.
    assert router.db_for_write(Item, instance=agent) == "photos"
    assert router.db_for_read(City, instance=Photo(user_id=1)) == "default"
