"""The queryset and manager of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Manager

from sharded_orm.models.querysets.reads import ReadingQuerySet
from sharded_orm.models.querysets.writes import WritingQuerySet


class ShardedQuerySet(ReadingQuerySet, WritingQuerySet):
    """A :class:`~django.db.models.query.QuerySet` that routes itself.

    The conditions name the shards each time the query runs: equality on the shard key names
    one shard, ``__in`` the shards of the listed keys, an instance the instance's own shard.
    A query that names no shard raises :exc:`ShardKeyRequired`; :meth:`scatter` asks all shards.
    Reads of several shards are merged exactly as one database would answer, or refused with
    :exc:`ScatterNotSupported`. Writes run shard by shard, each atomic on its own shard only
    (P14).
    """


ShardedManager: Callable[[], Manager[Any]] = Manager.from_queryset(
    ShardedQuerySet, class_name="ShardedManager"
)
"""The manager of :class:`ShardedModel`; derive yours from it or from a
:class:`ShardedQuerySet` with ``as_manager()``."""
