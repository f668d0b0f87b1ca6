"""The SQL query of sharded models. A condition such as ``album=album`` also selects the album's shard."""

from __future__ import annotations

from collections.abc import ValuesView
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.db.models import Model, Q
from django.db.models.constants import LOOKUP_SEP
from django.db.models.sql.where import AND, WhereNode

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.bound_query import BoundKeyQuery
from sharded_orm.models.sharding.instance_shard import on_shard_of
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias


class ShardedQuery(BoundKeyQuery):
    """The query of a sharded model. To a condition such as ``album=album``, it adds the album's shard.

    Django compiles such a condition to a comparison of the primary key, which does not determine
    the shard. This class overrides :meth:`add_q`, which receives all conditions: those of
    ``filter()``, of related managers, and of Django's prefetches, which bypass the queryset.
    """

    def add_q(self, q_object: Q, reuse_all: bool = False) -> None:
        if any(map(_mentions_instance, q_object.children)):
            options = shard_options(self.model) if self.model is not None else None
            if options is not None:
                q_object = _with_shard_conditions(options, q_object)
        super().add_q(q_object, reuse_all)

    def resolve_expression(self, query: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Overrides Query.resolve_expression(), which Django calls for every subquery. Refuse an
        # outer query on a global model, because no other check does. Its result could be wrong: the
        # global database may still have an old table with the name of the sharded model's table.
        outer, options = getattr(query, "model", None), shard_options(self.model)  # type: ignore[arg-type]  # the model is not None here
        if outer is not None and options is not None and shard_options(outer) is None:
            raise CrossShardRelation(
                f"The query on {outer.__name__} (global) has a subquery on {options.model.__name__}, which is"
                f" in group {options.group!r}. One statement cannot reach both. Evaluate it first and pass"
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
        # This is a shortcut, because nearly every query has a condition on the shard key. If a
        # column of the model's own table is compared with a plain value, Django's build_filter()
        # has nothing to resolve, join or trim. It would build the same condition, but slower.
        if type(filter_expr) is tuple and not branch_negated and not self.annotations:
            name, value = filter_expr
            if type(value) in _PLAIN and (field := own_columns(self.model).get(name)):
                alias = self.get_initial_alias()
                self._lookup_joins = [alias]
                if can_reuse is not None:
                    can_reuse.add(alias)
                column = self._get_col(field, field, alias)  # type: ignore[attr-defined]  # missing in Django's type stubs
                condition: Any = self.build_lookup(["exact"], column, value)
                return WhereNode([condition], connector=AND), {alias}
        return super().build_filter(
            filter_expr, branch_negated, current_negated, can_reuse, *args, **kwargs
        )


_PLAIN = frozenset({int, str, bool, float, Decimal, UUID, date, datetime})


@lru_cache(maxsize=1024)
def own_columns(model: Any) -> dict[str, Any]:
    """Return the fields of the model's own table that are not relations, keyed by field name.

    The key ``pk`` stands for the primary key.
    """
    if model is None:
        return {}
    meta = model._meta
    fields = {
        field.name: field
        for field in meta.concrete_fields
        if not field.is_relation and field.model._meta.concrete_model is meta.concrete_model
    }
    if meta.pk.name in fields:
        fields["pk"] = meta.pk
    return fields


def _with_shard_conditions(options: ShardOptions, condition: Any) -> Any:
    if isinstance(condition, Q):
        if not any(map(_mentions_instance, condition.children)):
            return condition
        changed = Q()
        # Also add the shard to a negated condition, although it does not route the query. Without
        # the shard, exclude(album=album) would also exclude rows of other shards whose album has
        # the same id.
        changed.connector, changed.negated = condition.connector, condition.negated
        changed.children = [_with_shard_conditions(options, child) for child in condition.children]
        return changed
    if not isinstance(condition, tuple) or not _mentions_instance(condition):
        return condition
    value = condition[1]
    instances = [value] if isinstance(value, Model) else [i for i in value if i is not None]
    name = condition[0]
    lookup = name.rpartition(LOOKUP_SEP)[2]
    if isinstance(value, Model) and lookup in ("gt", "gte", "lt", "lte"):
        # Add no condition to a comparison by order, such as ``album__gt``, because rows before or
        # after the instance may be on any shard.
        return condition
    if _names_shard(options, name):
        # The compared value determines the shard, so add no condition on the instance's shard. The
        # two may differ if the value was changed after the instance was read; then the value is
        # right.
        return condition
    by_alias: dict[str | None, list[Any]] = {}
    for instance in instances:
        by_alias.setdefault(colocated_alias(options, instance), []).append(instance)
    if None in by_alias:
        return condition
    if len(by_alias) == 1:
        return Q(condition) & Q(on_shard_of(options, instances))
    # Compare each instance on its own shard only, because rows of two shards may have the same id.
    parts = [Q((name, rows)) & Q(on_shard_of(options, rows)) for rows in by_alias.values()]
    return Q(*parts, _connector=Q.OR)


def _names_shard(options: ShardOptions, name: str) -> bool:
    """Return whether ``name`` looks up by ``=`` or ``IN`` a field that determines the shard.

    :param name: the keyword in ``filter()``, such as ``album`` or ``album__in``.
    """
    path, _, lookup = name.partition(LOOKUP_SEP)
    if lookup not in ("", "exact", "in"):
        return False
    fields: Any = options.model._meta.fields
    return any(
        field.name == path and field.concrete and options.names_shard(field) for field in fields
    )


def _mentions_instance(child: Any) -> bool:
    if isinstance(child, Q):
        return any(map(_mentions_instance, child.children))
    if not isinstance(child, tuple):
        return False
    value = child[1]
    if isinstance(value, list | tuple | set | frozenset | ValuesView) and value:
        # Ignore None in the list, as Django does, because no value is equal to NULL.
        return {isinstance(item, Model) for item in value if item is not None} == {True}
    return isinstance(value, Model)
