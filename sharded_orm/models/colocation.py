"""Refuses queries that join rows of another database.

A join, ``select_related`` or a subquery is run by the one database that holds the
shard, so every table in it must belong to the query's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models.expressions import Col
from django.db.models.sql import Query
from django.db.models.sql.where import WhereNode

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.options import shard_options


def check_colocated(query: Query, group: str | None) -> None:
    """Raise :exc:`CrossShardRelation` if ``query`` reaches outside ``group``.

    :param group: None for the global database.

    Costs next to nothing for a query on one table.
    """
    if len(query.alias_map) > 1:
        tables: dict[str, Any] = query.alias_map
        for alias, join in tables.items():
            # A join that Django has trimmed stays in the map, unreferenced.
            if join.parent_alias is not None and query.alias_refcount[alias]:
                _check_model(query, join.join_field.related_model, group, "joins")
    if query.select_related:
        _check_select_related(query, query.get_meta(), query.select_related, group)
    for _, inner in subqueries(query):
        if inner.model is not None:
            _check_model(query, inner.model, group, "has a subquery on")
        check_colocated(inner, group)


def _check_model(query: Query, model: Any, group: str | None, verb: str) -> None:
    options = shard_options(model)
    if (options.group if options is not None else None) == group:
        return
    where = "in the global database" if options is None else f"in group {options.group!r}"
    home = "global" if group is None else f"group {group!r}"
    raise CrossShardRelation(
        f"The query on {query.get_meta().object_name} ({home}) {verb} {model.__name__}, which is"
        f" {where}. One statement cannot reach both: query them one after the other"
        " (prefetch_related does), or filter by the foreign key's value instead."
    )


def _check_select_related(query: Query, meta: Any, wanted: Any, group: str | None) -> None:
    if wanted is True:
        for field in meta.fields:
            if field.remote_field and not field.null:
                _check_model(query, field.related_model, group, "follows (select_related)")
        return
    names = {f.name: f for f in meta.fields if f.remote_field}
    names |= {o.field.related_query_name(): o for o in meta.related_objects if o.field.unique}
    for name, deeper in wanted.items():
        relation = names.get(name)
        if relation is None or relation.related_model is None:
            continue  # Django reports an unknown name itself, with the choices.
        _check_model(query, relation.related_model, group, "follows (select_related)")
        if deeper:
            _check_select_related(query, relation.related_model._meta, deeper, group)


def subqueries(query: Query) -> Iterator[tuple[Any, Query]]:
    """The queries inside ``query``, each with what it is compared with (None for nothing)."""
    yield from _inside(query.where)
    for annotation in query.annotations.values():
        yield from _inside(annotation)


def _inside(node: Any) -> Iterator[tuple[Any, Query]]:
    if isinstance(node, Query):
        yield None, node
    elif isinstance(node, WhereNode):
        child: Any
        for child in node.children:
            # The ordinary lookup, a column against a value, holds no subquery.
            if type(getattr(child, "lhs", None)) is Col and not hasattr(
                child.rhs, "resolve_expression"
            ):
                continue
            yield from _inside(child)
    elif hasattr(node, "get_source_expressions"):
        rhs = getattr(node, "rhs", None)
        if isinstance(rhs, Query):
            yield node.lhs, rhs
        for source in node.get_source_expressions():
            if source is not None and source is not rhs:
                yield from _inside(source)
