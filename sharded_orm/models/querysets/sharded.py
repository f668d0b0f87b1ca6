"""The queryset and manager of sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.db.models import Manager

from sharded_orm.models.querysets.base import refuse_other_query
from sharded_orm.models.querysets.updates import PlannedUpdateQuerySet
from sharded_orm.models.sharding.type_variables import M


class ShardedQuerySet(PlannedUpdateQuerySet[M]):
    """A :class:`~django.db.models.query.QuerySet` that sends its queries to the right shards.

    Each time the query runs, its conditions determine the shards. For example, ``user_id=7``
    selects the shard of the key 7, ``user_id__in=[7, 8]`` selects the shards of both keys, and
    ``album=album`` selects the shard that has the album. If the conditions determine no shard, the
    query raises :exc:`ShardKeyRequired`. After a call of :meth:`scatter`, such a query is sent to
    all shards instead.

    A read of several shards returns exactly the result that one database would return, or raises
    :exc:`ScatterNotSupported`. Writes run shard by shard. The write on each shard is atomic, but
    all of them together are not (Pinterest, P14).
    """

    if not TYPE_CHECKING:  # For type checkers, ``query`` stays the attribute of Django's QuerySet.

        @PlannedUpdateQuerySet.query.setter
        def query(self, value: Any) -> None:
            refuse_other_query(self.model, value)
            PlannedUpdateQuerySet.query.fset(self, value)


ShardedManager: Callable[[], Manager[Any]] = Manager.from_queryset(
    ShardedQuerySet, class_name="ShardedManager"
)
"""The manager class of :class:`ShardedModel`. Derive a manager of your own from this class, or make one
by ``as_manager()`` of a :class:`ShardedQuerySet`."""
