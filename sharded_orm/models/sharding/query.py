"""The SQL query of sharded models. A condition such as ``album=album`` also selects the album's shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any
from uuid import UUID

from django.core.exceptions import FieldError
from django.db.models import Model, Q
from django.db.models.constants import LOOKUP_SEP
from django.db.models.sql import Query, UpdateQuery
from django.db.models.sql.where import AND, WhereNode
from django.utils.functional import LazyObject

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.bound_query import BoundKeyQuery
from sharded_orm.models.sharding.counted_ids import is_unique_over_shards
from sharded_orm.models.sharding.instance_shard import on_shard_of, only_on_shard_of
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias


class _InstancesInExpressions(Query):
    """A query in which an expression such as ``When(album=album, …)`` may compare with an instance.

    Django compares only the primary key, and on another shard, a different album may have the same
    id. So such a query may be sent only to the shard of the instance. If it would be sent to
    another shard, it raises an error.

    This class finds such comparisons in :meth:`build_filter`. Django calls it with
    ``split_subq=False`` only for conditions inside an expression or a ``FilteredRelation``.
    """

    # Django passes split_subq=False in Q.resolve_expression() and in
    # FilteredRelation.resolve_expression().

    def _add_q(self, q_object: Q, *args: Any, **kwargs: Any) -> Any:
        # Overrides Query._add_q(), which Django calls for each Q. A Q inside an expression is
        # resolved twice. An iterator among its values would be empty the second time, so replace it
        # by a list.
        if not kwargs.get("split_subq", True):
            _read_iterators(q_object)
        return super()._add_q(q_object, *args, **kwargs)  # type: ignore[misc]  # missing in Django's type stubs

    def build_filter(
        self,
        filter_expr: Any,
        branch_negated: bool = False,
        current_negated: bool = False,
        can_reuse: Any = None,
        allow_joins: bool = True,
        split_subq: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        built = super().build_filter(
            filter_expr,
            branch_negated,
            current_negated,
            can_reuse,
            allow_joins,
            split_subq,
            *args,
            **kwargs,
        )
        if not split_subq and isinstance(filter_expr, tuple):
            _refuse_other_shards(self.model, filter_expr, built[0])
        return built


class ShardedQuery(_InstancesInExpressions, BoundKeyQuery):
    """The query of a sharded model. To a condition such as ``album=album``, it adds the album's shard.

    Django compiles such a condition to a comparison of the primary key, which does not determine
    the shard. So this class overrides :meth:`add_q`. It receives all conditions that limit the
    rows, not only those of ``filter()``. Related managers and prefetches of Django also call it,
    and bypass the queryset.
    """

    def add_q(self, q_object: Q, reuse_all: bool = False) -> None:
        if any(map(_has_iterator, q_object.children)):
            q_object = _without_iterators(q_object)
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
        allow_joins: bool = True,
        split_subq: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # A shortcut, because nearly every query has a condition on the shard key. For a column of
        # the model's own table and a plain value, Django's build_filter() has nothing to resolve,
        # join or trim, and would build the same condition, but slower.
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
            filter_expr,
            branch_negated,
            current_negated,
            can_reuse,
            allow_joins,
            split_subq,
            *args,
            **kwargs,
        )

    def chain(self, klass: Any = None) -> Any:
        # Overrides Query.chain(), by which update() makes its UpdateQuery. Django resolves the new
        # values on that query, so it must check their expressions, too.
        return super().chain(ShardedUpdateQuery if klass is UpdateQuery else klass)


class ShardedUpdateQuery(_InstancesInExpressions, UpdateQuery):
    """The query of an UPDATE of a sharded model."""

    def get_related_updates(self) -> Any:
        # Overrides UpdateQuery.get_related_updates(), which returns a query for each table of a
        # parent in multi-table inheritance. Change the class of these queries, so that they, too,
        # check the expressions among the new values.
        queries: Any = super().get_related_updates()
        for query in queries:
            query.__class__ = ShardedUpdateQuery
        return queries


_PLAIN = frozenset({int, str, bool, float, Decimal, UUID, date, datetime})


@lru_cache(maxsize=1024)
def own_columns(model: Any) -> dict[str, Any]:
    """Map names to the fields of the model's own table that are not relations.

    For example, ``{"title": title, "id": id, "pk": id}``.
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


def _with_shard_conditions(
    options: ShardOptions, condition: Any, *, is_negated: bool = False
) -> Any:
    if isinstance(condition, Q):
        if not any(map(_mentions_instance, condition.children)):
            return condition
        changed = Q()
        # Add the condition on the shard to a negated condition, too. Otherwise exclude(album=album)
        # would also exclude rows of other shards whose album has the same id. (A negated condition
        # does not choose the shards to which the query is sent.)
        changed.connector, changed.negated = condition.connector, condition.negated
        is_negated = is_negated or condition.negated
        changed.children = [
            _with_shard_conditions(options, child, is_negated=is_negated)
            for child in condition.children
        ]
        return changed
    by_alias = _instances_by_alias(options, condition)
    if not by_alias:
        return condition
    name, value = condition
    on_shard = partial(
        on_shard_of, options, ids_are_unique=_compares_unique_ids(options.model, name)
    )
    if isinstance(value, Model):
        return Q(condition) & Q(on_shard([value]))
    # Compare each instance on its own shard only, because rows of two shards may have the same id.
    # Compare other values, such as ids, on all shards. Ignore None in the list, as Django does: no
    # value is equal to NULL. But exclude() with None in the list also excludes rows with NULL
    # (since Django 6.1).
    located = {id(instance) for rows in by_alias.values() for instance in rows}
    others = [
        item for item in value if id(item) not in located and (item is not None or is_negated)
    ]
    if len(by_alias) == 1 and not others:
        (instances,) = by_alias.values()
        return Q(condition) & Q(on_shard(instances))
    parts = [Q((name, rows)) & Q(on_shard(rows)) for rows in by_alias.values()]
    if others:
        parts.append(Q((name, others)))
    return Q(*parts, _connector=Q.OR)


def _refuse_other_shards(model: Any, condition: Any, built: WhereNode) -> None:
    """Make the query raise an error if it would be sent to a shard without the compared instances.

    On another shard, the comparison would be wrong, because a different row may have the same id.

    :param model: the model of the query.
    :param condition: a condition inside an expression, such as ``("album", album)``.
    :param built: Django's compiled form of ``condition``. A condition that checks the shard is
        added to it.
    """
    options = shard_options(model) if _mentions_instance(condition) else None
    by_alias = {} if options is None else _instances_by_alias(options, condition)
    if by_alias and not _compares_unique_ids(model, condition[0]):
        assert options is not None
        for instances in by_alias.values():
            built.add(only_on_shard_of(options, instances), AND)


@lru_cache(maxsize=1024)
def _compares_unique_ids(model: Any, name: str) -> bool:
    """Whether the condition ``name`` compares ids that are unique over all shards.

    :param name: the keyword in ``filter()``, such as ``album`` or ``album__in``. If it begins with
        the name of an annotation, the result is False.
    """
    query: Any = Query(model)
    try:
        _, _, targets, _ = query.names_to_path(name.split(LOOKUP_SEP), query.get_meta())
    except FieldError:
        return False
    return all(map(is_unique_over_shards, targets))


def _instances_by_alias(options: ShardOptions, condition: Any) -> dict[str, list[Any]]:
    """Map the alias of each shard to the instances in ``condition`` that are on this shard.

    The caller adds conditions on these shards to the query. Instances that are on no shard of the
    group are left out. The result is empty if ``condition`` is right without conditions on shards.
    """
    if not _mentions_instance(condition):
        return {}
    name, value = condition
    lookup = name.rpartition(LOOKUP_SEP)[2]
    if isinstance(value, Model):
        if lookup in ("gt", "gte", "lt", "lte"):
            # Add no condition to a comparison by order, such as ``album__gt``, because rows before or
            # after the instance may be on any shard.
            return {}
        value = [value]
    if _names_shard(options, name):
        # The compared value, such as the id of a user, determines the shard of the rows. So add no
        # condition on the shard of the instance. If the program has changed the value since the
        # instance was read, the new value may determine another shard, and the query must go to
        # that shard.
        return {}
    by_alias: dict[str, list[Any]] = {}
    for instance in value:
        if isinstance(instance, Model):
            alias = colocated_alias(options, instance)
            if alias is not None:
                by_alias.setdefault(alias, []).append(instance)
    return by_alias


def _names_shard(options: ShardOptions, name: str) -> bool:
    """Return whether ``name`` compares a field that determines the shard, by ``=`` or ``IN``.

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
    if type(value) in _PLAIN:
        return False
    if isinstance(value, Model):
        return True
    if _is_list(value):
        # Look at the types first: there may be many values, but few types.
        kinds = set(map(type, value))
        return any(issubclass(kind, Model | LazyObject) for kind in kinds) and any(
            isinstance(item, Model) for item in value
        )
    return False


def _is_list(value: Any) -> bool:
    """Whether ``value`` is a collection of values to compare with, as in ``album__in=[1, 2]``."""
    if (
        isinstance(value, str | bytes)
        or not isinstance(value, Iterable)
        or hasattr(value, "resolve_expression")
    ):
        return False
    try:
        # Some single values have __iter__() as well, such as a SimpleLazyObject of a number.
        iter(value)
    except TypeError:
        return False
    return True


def _has_iterator(child: Any) -> bool:
    if isinstance(child, Q):
        return any(map(_has_iterator, child.children))
    return (
        isinstance(child, tuple) and type(child[1]) not in _PLAIN and isinstance(child[1], Iterator)
    )


def _without_iterators(condition: Any) -> Any:
    """Return ``condition`` with a list in place of each iterator, which can be read only once."""
    if isinstance(condition, Q):
        changed = Q()
        changed.connector, changed.negated = condition.connector, condition.negated
        changed.children = [_without_iterators(child) for child in condition.children]
        return changed
    return (condition[0], list(condition[1])) if _has_iterator(condition) else condition


def _read_iterators(condition: Q) -> None:
    """Replace each iterator among the values of ``condition`` by a list.

    The library resolves some expressions to check them, and Django resolves them again. The second
    time, an iterator would be empty. So change the condition itself and not a copy.
    """
    for position, child in enumerate(condition.children):
        if _has_iterator(child) and not isinstance(child, Q):
            condition.children[position] = _without_iterators(child)
