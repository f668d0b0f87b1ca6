"""The query whose rows ``count()`` counts: without the parts that do not matter for their number."""

from __future__ import annotations

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


def _mask_annotations(query: Query) -> None:
    """Leave out of SELECT the annotations that Django's ``Query.get_aggregation()`` leaves out.

    For example, the sum of each group does not matter for the number of groups, and may overflow.
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
    ):
        query.set_annotation_mask(())
        return
    # Django counts the rows of a subquery, which may group by these expressions.
    names |= {name for name, part in selected.items() if part.get_group_by_cols()}
    for part in query.group_by if isinstance(query.group_by, tuple) else ():
        names |= part.get_refs()
    # A statement must select something.
    if names or query.select or query.default_cols:
        query.set_annotation_mask(names)
