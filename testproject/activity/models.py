"""The store of events. A new kind of event, with properties of its own, needs no migration."""

from __future__ import annotations

from django.db import models

from sharded_orm.contrib.entities import DataStore, Index

events = DataStore(
    "events",
    group="photos",
    # An event is on the shard of whoever acted, with the photos and comments.
    shard_on="actor_id",
    fields={
        "actor_id": models.BigIntegerField(),
        # The owner of the photo. Missing if it is the actor, so that such events are not in by_receiver.
        "receiver_id": models.BigIntegerField(),
        "happened_at": models.DateTimeField(),
    },
)
by_actor = Index(events, "by_actor", properties=["actor_id", "-happened_at"], shard_on="actor_id")
by_receiver = Index(
    events, "by_receiver", properties=["receiver_id", "-happened_at"], shard_on="receiver_id"
)
