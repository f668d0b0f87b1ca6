"""Resolves the names in ORDER BY and DISTINCT ON before Django compiles the query.

For example, ``order_by("album__title")`` needs a join to the table of albums. Django adds it only
when it compiles the query. But :mod:`sharded_orm.models.sharding.colocation` checks all joins and
subqueries before that. So this module looks up the names earlier, on a copy of the query.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from django.db import connections
from django.db.models.constants import LOOKUP_SEP
from django.db.models.sql import Query


def is_plain(query: Query) -> bool:
    """Return whether ``query`` can be sorted without another join.

    This is so if ``query`` has no ordering, or if it is ordered only by columns of its model and by
    its annotations.
    """
    if query.distinct_fields or query.extra_order_by:
        return False
    names = _names(query)
    if not names:
        return True
    own_columns, annotations = own_names(query.model), query.annotations
    for name in names:
        if type(name) is not str:
            return False
        column = name[1:] if name[:1] in "-+" else name
        # Accept a name of an annotation. Django has resolved the annotation already, so ordering
        # by it adds no join.
        if column not in own_columns and column not in annotations and name != "?":
            return False
    return True


def annotations_in_order(query: Query) -> list[Any]:
    """Return the annotations by whose names ``query`` is ordered.

    They are in the statement also if it does not select them, as those of ``alias()``.
    """
    if not query.annotations:
        return []
    names = {name.lstrip("-+") for name in _names(query) if isinstance(name, str)}
    return [query.annotations[name] for name in names & query.annotations.keys()]


def _names(query: Query) -> Any:
    if query.order_by:
        return query.order_by
    return query.model._meta.ordering if query.default_ordering and query.model else ()


@lru_cache(maxsize=1024)
def own_names(model: Any) -> dict[str, str]:
    """Map each name for ``order_by()`` that stands for one column of the model to this column.

    For example, ``{"title": "title", "album_id": "album_id"}``. Columns of parents in multi-table
    inheritance are included.
    """
    meta = model._meta
    columns = {}
    for field in meta.concrete_fields:
        if field.is_relation:
            # Leave out the name of a relation, because it may stand for other columns: order_by()
            # with this name orders by Meta.ordering of the related model, if there is one.
            if field.attname != field.name:
                columns[field.attname] = field.column
        else:
            columns[field.name] = field.column
    if meta.pk.column is not None and not meta.pk.is_relation:
        columns["pk"] = meta.pk.column
    return columns


def resolved(query: Query, alias: str) -> tuple[Query, list[Any]]:
    """Return a copy of ``query``, and a list of the resolved expressions of its ORDER BY.

    The copy has all joins that ORDER BY and DISTINCT ON need. No query is sent.

    :param alias: the alias of a database for which the query can be compiled.
    :raises FieldError: a name in ORDER BY or DISTINCT ON does not exist. Django raises this error.
    """
    copy = query.chain()
    compiler: Any = connections[alias].ops.compiler("SQLCompiler")(copy, connections[alias], alias)
    expressions: Iterable[Any]
    if copy.combinator:
        # The ORDER BY of a union may contain names and expressions. A name is a column of the
        # result and needs no join. An expression may need joins, because Django adds it to each
        # part of the union. So return only the expressions.
        return copy, [name for name in copy.order_by if hasattr(name, "resolve_expression")]
    # Resolve the names as SQLCompiler.get_order_by() and get_distinct() do. Django cannot order by a
    # Q, which has no asc(), and raises AttributeError. But it raises no error if the statement has no
    # ORDER BY in the end, as an UPDATE on most databases.
    is_possible = all(
        hasattr(name, "asc") for name in _names(copy) if hasattr(name, "resolve_expression")
    )
    expressions = [
        pair[0].resolve_expression(copy, allow_joins=True, reuse=None)
        for pair in (compiler._order_by_pairs() if is_possible else ())
    ]
    for name in copy.distinct_fields:
        if name not in copy.annotation_select:
            _, targets, _, joins, path, _, _ = compiler._setup_joins(
                name.split(LOOKUP_SEP), copy.get_meta(), None
            )
            copy.trim_joins(targets, joins, path)
    return copy, list(expressions)
