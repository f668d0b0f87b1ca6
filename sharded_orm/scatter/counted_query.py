"""The queries that ``count()`` and ``aggregate()`` send: without the parts that do not matter for them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from django.db.models.sql import Query


def counted_query(query: Query) -> Query:
    """Return a copy of ``query`` without the parts that Django's ``count()`` leaves out."""
    query = query.clone()
    # Remove the ORDER BY in the cases in which Django's count() does so. A sliced query keeps it
    # (force=False), because it matters for the count: it may join rows, and DISTINCT also compares
    # the columns of ORDER BY.
    query.clear_ordering(force=False)
    # As Django's count() does: select_related() of a FilteredRelation leaves rows out.
    query.select_related = False
    _mask_annotations(query)
    return query


def aggregated_query(query: Query, aggregates: Mapping[str, Any]) -> Query:
    """Return a copy of ``query`` without the annotations that Django's ``aggregate()`` leaves out.

    An annotation stays if one of ``aggregates`` names it.
    """
    kept, resolving = query.clone(), query.chain()
    named: set[str] = set()
    for name, aggregate in aggregates.items():
        if not hasattr(aggregate, "resolve_expression"):
            return kept  # The argument is no aggregate, so Django will raise an error.
        # An aggregate may refer to an earlier one.
        resolved = aggregate.resolve_expression(
            resolving, allow_joins=True, reuse=None, summarize=True
        )
        named |= resolved.get_refs()
        resolving.append_annotation_mask([name])
        resolving.annotations[name] = resolved
    _mask_annotations(kept, named & kept.annotations.keys())
    return kept


def _mask_annotations(query: Query, named: Set[str] = frozenset()) -> None:
    """Leave out of SELECT the annotations that Django's ``Query.get_aggregation()`` leaves out.

    For example, the sum of each group does not matter for the number of groups, and may overflow.

    :param named: the names of annotations to which the aggregates refer.
    """
    if not query.annotations or query.distinct or query.combinator:
        return
    _, having, window = query.where.split_having_qualify()
    if window:
        return
    selected = query.annotation_select
    names = {name for name, part in selected.items() if getattr(part, "set_returning", False)}
    if not (
        names
        or having
        or query.is_sliced
        or isinstance(query.group_by, tuple)
        or any(part.contains_aggregate for part in query.annotations.values())
        or any(_needs_subquery(query.annotations[name]) for name in named)
    ):
        query.set_annotation_mask(named)
        return
    # Django counts the rows of a subquery, which may group by these expressions.
    names |= {name for name, part in selected.items() if part.get_group_by_cols()}
    names |= named
    for part in query.group_by if isinstance(query.group_by, tuple) else ():
        names |= part.get_refs()
    # A statement must select something.
    if names or query.select or query.default_cols:
        query.set_annotation_mask(names)


def _needs_subquery(annotation: Any) -> bool:
    """Whether Django aggregates the values of ``annotation`` over the rows of a subquery."""
    return getattr(annotation, "contains_subquery", False) or getattr(
        annotation, "contains_over_clause", True
    )
