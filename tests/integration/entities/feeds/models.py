"""Two stores: entries by their ids, with indexes in both groups, and posts by their author."""

from __future__ import annotations

from django.db import models

from sharded_orm.contrib.entities import DataStore, Index
from sharded_orm.models import ExactCharField

feed = DataStore(
    "feed",
    group="accounts",
    fields={
        "user_id": models.BigIntegerField(),
        "link": ExactCharField(max_length=200),
        "published": models.DateTimeField(),
        "rank": models.IntegerField(),
        "slug": ExactCharField(max_length=50),
    },
)
by_user = Index(feed, "index_user", properties=["user_id"], shard_on="user_id")
by_link = Index(feed, "index_link", properties=["link", "-published"], shard_on="link")
by_rank = Index(
    feed, "index_rank", properties=["user_id", "-rank", "slug"], shard_on="user_id", group="books"
)
by_slug = Index(feed, "index_slug", properties=["slug"], shard_on="slug", unique=True)

posts = DataStore(
    "posts",
    group="books",
    fields={"user_id": models.BigIntegerField(), "topic": ExactCharField(max_length=50)},
    shard_on="user_id",
)
by_topic = Index(posts, "index_topic", properties=["topic"], shard_on="topic", group="accounts")
