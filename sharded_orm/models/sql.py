"""The SQL query of sharded models: conditions on instances carry the instances' shard."""

from __future__ import annotations

from typing import Any

from django.db.models import Model, Q
from django.db.models.sql import Query

from sharded_orm.models.options import ShardOptions, colocated_alias, shard_options
from sharded_orm.routing.where import OnShard


class ShardedQuery(Query):
    """Adds to ``album=album`` that the rows are on the album's shard.

    A comparison with an instance is compiled to its primary key, which does not tell
    the shard. Every way of adding a condition passes :meth:`add_q`: ``filter``, related
    managers, and Django's prefetches, which bypass the queryset.
    """

    def add_q(self, q_object: Q, reuse_all: bool = False) -> None:
        options = shard_options(self.model) if self.model is not None else None
        if options is not None and not q_object.negated:
            q_object = _with_shards(options, q_object)
        super().add_q(q_object, reuse_all)


def _with_shards(options: ShardOptions, condition: Any) -> Any:
    if isinstance(condition, Q):
        # An exclusion bounds nothing.
        if condition.negated or not any(map(_mentions_instance, condition.children)):
            return condition
        changed = Q()
        changed.connector = condition.connector
        changed.children = [_with_shards(options, child) for child in condition.children]
        return changed
    if not isinstance(condition, tuple) or not _mentions_instance(condition):
        return condition
    value = condition[1]
    instances = [value] if isinstance(value, Model) else list(value)
    aliases = [colocated_alias(options, instance) for instance in instances]
    if None in aliases:
        return condition
    shards = Q(*map(OnShard, dict.fromkeys(aliases)), _connector=Q.OR)  # type: ignore[arg-type]
    return Q(condition) & shards


def _mentions_instance(child: Any) -> bool:
    if isinstance(child, Q):
        return any(map(_mentions_instance, child.children))
    if not isinstance(child, tuple):
        return False
    value = child[1]
    if isinstance(value, list | tuple | set) and value:
        return all(isinstance(item, Model) for item in value)
    return isinstance(value, Model)
