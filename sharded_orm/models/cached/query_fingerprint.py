"""What a query asks, as text: two queries with equal text have equal results (Yupoo, Y14).

Yupoo takes the md5 of the SQL. Compiling SQL is half of the time of a query, so the text is
read from the query itself where every part of it is known exactly: comparisons of the
model's own columns with plain values, ordering by own columns, limits. Conditions that are
only known to Django are compiled; what is not sure to give the same result twice, or reads
other tables, has no text and is not cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.exceptions import EmptyResultSet
from django.db.models import Choices, lookups
from django.db.models.expressions import Col, Func, RawSQL, Subquery
from django.db.models.fields import related_lookups
from django.db.models.functions import Now, Random
from django.db.models.lookups import Exact, Lookup
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm.models.sharding.ordering import own_names
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.routing.where import OnShard

# repr() of these says all that they are, and tells one type from another. The type is exact:
# a subclass may look like something else.
IMMUTABLE = frozenset(
    {
        int, str, bool, float, bytes, type(None), Decimal, UUID,
        date, datetime, time, timedelta,
    }
)  # fmt: skip

#: The classes of queries that are read here.
QUERIES = frozenset({Query, ShardedQuery})

# What sets up a query, or is read below. Whatever else stands in a query's __dict__ has been
# changed by somebody, and counts unless it is as it was.
_READ_HERE = frozenset(
    {
        "model", "alias_refcount", "alias_map", "alias_cols", "external_aliases", "table_map",
        "used_aliases", "where", "annotations", "extra", "_filtered_relations", "base_table",
        "_annotation_select_cache", "_extra_select_cache", "_lookup_joins", "filter_is_sticky",
        "order_by", "default_ordering", "standard_ordering", "low_mark", "high_mark",
    }
)  # fmt: skip


@dataclass(slots=True)
class QueryFingerprint:
    """What a query asks.

    :param text: see the module; None if the conditions have to be compiled.
    :param equal: by column: the values that conditions in conjunction with all others demand.
    :param only_equal: there is nothing else but these conditions, and no limit matters.
    """

    text: str | None
    equal: dict[str, list[Any]]
    only_equal: bool


def asked(query: Query, *, ordered: bool = True) -> QueryFingerprint | str:
    """What ``query`` asks of its own table; a reason if that cannot be cached.

    :param ordered: whether the order of the rows is a part of the result.
    """
    if type(query) not in QUERIES:
        return "a query of another class"
    state = query.__dict__
    if not state.keys() <= _READ_HERE:
        for name in state.keys() - _READ_HERE:
            if state[name] != getattr(Query, name, None):
                return name
    if query.annotations or query.extra or query._filtered_relations or query.external_aliases:  # type: ignore[attr-defined]  # not in the stubs
        return "annotations"
    if len(query.alias_map) > 1 and _joins(query):
        return "joins"

    equal: dict[str, list[Any]] = {}
    where = query.where
    # Query.base_table remembers its answer, which comes too early for a condition without columns.
    base = next(iter(query.alias_map), None)
    parts: Any = _Conditions(base, equal).read(where, True) if where.children else ()
    order: Any = ()
    if ordered:
        ordering: Any = query.order_by
        if not ordering and query.default_ordering:
            ordering = query.get_meta().ordering
        if ordering:
            order = _order(query, ordering)
            if order is not None and not query.standard_ordering:
                order = (order, "reversed")
    low, high = query.low_mark, query.high_mark
    if parts is None or order is None:
        return QueryFingerprint(None, equal, False)
    return QueryFingerprint(
        repr((parts, order, low, high)),
        equal,
        not low and (high is None or high > 0) and _is_flat(where, equal),
    )


def _is_flat(where: WhereNode, equal: dict[str, list[Any]]) -> bool:
    return len(where.children) == sum(map(len, equal.values())) and not any(
        isinstance(child, WhereNode) for child in where.children
    )


def _joins(query: Any) -> bool:
    # A join that Django has trimmed (album_id=) stays in the map, unreferenced.
    return any(
        query.alias_refcount[alias] for alias in query.alias_map if alias != query.base_table
    )


class _Conditions:
    """Reads a where tree. ``None`` means that something in it is not known here."""

    def __init__(self, base: str | None, equal: dict[str, list[Any]]) -> None:
        self._base = base
        self._equal = equal

    def read(self, node: WhereNode, required_conditions: bool) -> tuple[Any, ...] | None:
        """:param demanded: every row of the result meets the conditions in ``node``."""
        required_conditions = required_conditions and not node.negated and node.connector == AND
        parts: list[Any] = []
        unknown = False
        child: Any
        for child in node.children:
            kind = type(child)
            part: Any
            if kind is WhereNode:
                part = self.read(child, required_conditions)
            elif kind in _KNOWN or _is_known(kind):
                part = self._lookup(kind, child, required_conditions)
            else:
                part = None
            if part is None:
                # Goes on: what is demanded beside it tells the scope all the same.
                unknown = True
            else:
                parts.append(part)
        return None if unknown else (node.connector, node.negated, parts)

    def _lookup(self, kind: Any, lookup: Any, required_conditions: bool) -> Any:
        column, value = lookup.lhs, lookup.rhs
        if type(column) is not Col:
            if type(column) is OnShard and value is True:
                return ("shard", column.alias)  # No condition in SQL.
            return None
        if column.alias != self._base or lookup.bilateral_transforms:
            return None
        if type(value) in (list, tuple):
            value = list(map(_chosen, value))
            if not IMMUTABLE.issuperset(map(type, value)):
                return None
        elif type(value := _chosen(value)) not in IMMUTABLE:
            return None
        elif required_conditions and value is not None and issubclass(kind, Exact):
            self._equal.setdefault(column.target.column, []).append(value)
        return (kind.__name__, column.target.column, value)


def _chosen(value: Any) -> Any:
    """The value that a member of ``TextChoices`` or the like stands for."""
    return value.value if isinstance(value, Choices) else value


# Lookup classes of Django whose SQL follows from their class, column and value.
_KNOWN: dict[type, bool] = {}


def _is_known(kind: type) -> bool:
    known = issubclass(kind, Lookup) and kind.__module__ in (
        lookups.__name__,
        related_lookups.__name__,
    )
    if known:
        _KNOWN[kind] = True
    return known


def _order(query: Any, ordering: Any) -> tuple[str, ...] | None:
    names = own_names(query.model)
    found = []
    for name in ordering:
        if type(name) is not str:
            return None
        column = names.get(name[1:] if name[:1] in "-+" else name)
        if column is None:
            return None
        found.append(f"-{column}" if name[0] == "-" else column)
    return tuple(found)


# -- By SQL ------------------------------------------------------------------------


def compiled(query: Any, using: str) -> str | None:
    """The text of a query whose conditions have to be compiled; None if it must not be cached."""
    if not _is_steady(query.where):
        return None
    for expression in (
        query.order_by or (query.default_ordering and query.model._meta.ordering) or ()
    ):
        if hasattr(expression, "resolve_expression"):
            resolved = expression.resolve_expression(query.clone())
            if not _is_steady(resolved):
                return None
        elif expression == "?":
            return None
    try:
        sql, params = query.clone().get_compiler(using).as_sql()
    except EmptyResultSet:
        return None
    params = tuple(map(_chosen, params))
    if " JOIN " in sql or not IMMUTABLE.issuperset(map(type, params)):
        # The order may join, too.
        return None
    return repr((sql, params))


_OWN_SQL = ("function", "template")
_UNSTEADY = (Now, Random, RawSQL, Subquery)


def _is_steady(node: Any) -> bool:
    """Whether ``node`` gives the same for the same rows, and reads no others: made of parts of
    Django of which that is known."""
    if isinstance(node, WhereNode):
        return all(map(_is_steady, node.children))
    if not hasattr(node, "get_source_expressions"):
        return False
    kind: Any = type(node)
    if not kind.__module__.startswith("django.db.models.") or issubclass(kind, _UNSTEADY):
        return False
    if issubclass(kind, Func) and (kind is Func or not node.extra.keys().isdisjoint(_OWN_SQL)):
        return False  # Some function of the database that the project names.
    if isinstance(node, Lookup) and not _is_value(node.rhs) and not _is_steady(node.rhs):
        return False
    return all(
        source is None or _is_value(source) or _is_steady(source)
        for source in node.get_source_expressions()
    )


def _is_value(node: Any) -> bool:
    return not hasattr(node, "resolve_expression") and not hasattr(node, "as_sql")
