"""The SQL query of sharded models: conditions on instances carry the instances' shard."""

from __future__ import annotations

from collections.abc import ValuesView
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.db.models import Model, Q
from django.db.models.constants import LOOKUP_SEP
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.options import ShardOptions, colocated_alias, shard_options
from sharded_orm.routing.where import OnShard


class ShardedQuery(Query):
    """Adds to ``album=album`` that the rows are on the album's shard.

    A comparison with an instance is compiled to its primary key, which does not tell
    the shard. Every way of adding a condition passes :meth:`add_q`: ``filter``, related
    managers, and Django's prefetches, which bypass the queryset.
    """

    def add_q(self, q_object: Q, reuse_all: bool = False) -> None:
        if any(map(_mentions_instance, q_object.children)):
            options = shard_options(self.model) if self.model is not None else None
            if options is not None:
                q_object = _with_shards(options, q_object)
        super().add_q(q_object, reuse_all)

    def resolve_expression(self, query: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Overrides Query.resolve_expression, which every subquery passes. A plain model's query
        # asks nobody else, and its database may still have a table of this name, with old rows.
        outer, own = getattr(query, "model", None), shard_options(self.model)  # type: ignore[arg-type]  # it has one
        if outer is not None and own is not None and shard_options(outer) is None:
            raise CrossShardRelation(
                f"The query on {outer.__name__} (global) has a subquery on {own.model.__name__}, which is"
                f" in group {own.group!r}. One statement cannot reach both. Evaluate it first and pass"
                " its values as a list."
            )
        return super().resolve_expression(query, *args, **kwargs)

    def build_filter(
        self,
        filter_expr: Any,
        branch_negated: bool = False,
        current_negated: bool = False,
        can_reuse: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Pays for the condition on the shard key that every query has: a column of the
        # query's own table that is equal to a plain value needs nothing of what Django's
        # method resolves, joins and trims. The condition is made in the same way.
        if type(filter_expr) is tuple and not branch_negated and not self.annotations:
            name, value = filter_expr
            if type(value) in _PLAIN and (field := _own_columns(self.model).get(name)):
                alias = self.get_initial_alias()
                self._lookup_joins = [alias]
                if can_reuse is not None:
                    can_reuse.add(alias)
                column = self._get_col(field, field, alias)  # type: ignore[attr-defined]  # not in the stubs
                condition: Any = self.build_lookup(["exact"], column, value)
                return WhereNode([condition], connector=AND), {alias}
        return super().build_filter(
            filter_expr, branch_negated, current_negated, can_reuse, *args, **kwargs
        )


_PLAIN = frozenset({int, str, bool, float, Decimal, UUID, date, datetime})


@lru_cache(maxsize=1024)
def _own_columns(model: Any) -> dict[str, Any]:
    """The columns of the model's own table that are no relations, by name and ``pk``."""
    if model is None:
        return {}
    meta = model._meta
    own = {
        field.name: field
        for field in meta.concrete_fields
        if not field.is_relation and field.model._meta.concrete_model is meta.concrete_model
    }
    if meta.pk.name in own:
        own["pk"] = meta.pk
    return own


def _with_shards(options: ShardOptions, condition: Any) -> Any:
    if isinstance(condition, Q):
        if not any(map(_mentions_instance, condition.children)):
            return condition
        changed = Q()
        # An exclusion bounds nothing, but excludes what is on the instance's shard only.
        changed.connector, changed.negated = condition.connector, condition.negated
        changed.children = [_with_shards(options, child) for child in condition.children]
        return changed
    if not isinstance(condition, tuple) or not _mentions_instance(condition):
        return condition
    value = condition[1]
    instances = [value] if isinstance(value, Model) else [i for i in value if i is not None]
    name = condition[0]
    lookup = name.rpartition(LOOKUP_SEP)[2]
    if isinstance(value, Model) and lookup in ("gt", "gte", "lt", "lte"):
        return condition  # Rows beside it in the order may be on any shard.
    if _tells(options, name):
        return condition  # The value leads to its shard, also if it was changed since it was read.
    by_alias: dict[str | None, list[Any]] = {}
    for instance in instances:
        by_alias.setdefault(colocated_alias(options, instance), []).append(instance)
    if None in by_alias:
        return condition
    if len(by_alias) == 1:
        (alias,) = by_alias
        return Q(condition) & Q(OnShard(str(alias)))
    # Each shard's instances for that shard only: ids that count per shard repeat.
    parts = [Q((name, some)) & Q(OnShard(str(alias))) for alias, some in by_alias.items()]
    return Q(*parts, _connector=Q.OR)


def _tells(options: ShardOptions, name: str) -> bool:
    """Whether ``name`` compares a column of the own table whose values tell the shard."""
    path, _, lookup = name.partition(LOOKUP_SEP)
    if lookup not in ("", "exact", "in"):
        return False
    fields: Any = options.model._meta.fields
    return any(field.name == path and field.concrete and options.tells(field) for field in fields)


def _mentions_instance(child: Any) -> bool:
    if isinstance(child, Q):
        return any(map(_mentions_instance, child.children))
    if not isinstance(child, tuple):
        return False
    value = child[1]
    if isinstance(value, list | tuple | set | frozenset | ValuesView) and value:
        # None is equal to nothing, and left out by Django.
        return {isinstance(item, Model) for item in value if item is not None} == {True}
    return isinstance(value, Model)
