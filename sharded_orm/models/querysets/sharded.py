"""The queryset of sharded models: Django's, sent to the right shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Manager

from sharded_orm.models.querysets.reads import ReadingQuerySet
from sharded_orm.models.querysets.writes import WritingQuerySet


class ShardedQuerySet(ReadingQuerySet, WritingQuerySet):
    """A :class:`~django.db.models.query.QuerySet` that routes itself.

    The shards are read from the where tree each time the query runs: equality on the
    shard key is one shard, ``__in`` the shards of those keys, an instance its own
    shard. A query that says nothing raises :exc:`ShardKeyRequired`; :meth:`scatter`
    asks all shards. Over several shards reads are merged exactly as one database would
    answer, or refused with :exc:`ScatterNotSupported`; writes run shard by shard, each
    atomic on its own shard only (P14).
    """


ShardedManager: Callable[[], Manager[Any]] = Manager.from_queryset(
    ShardedQuerySet, class_name="ShardedManager"
)
"""The manager of :class:`ShardedModel`; derive yours from it or from a
:class:`ShardedQuerySet` with ``as_manager()``."""
