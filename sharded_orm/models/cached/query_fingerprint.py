"""Makes the text under which the cache stores the result of a query (Yupoo, Y14).

As long as no row changes, queries with equal texts have equal results. Yupoo uses the md5 of the
SQL. But compiling the SQL takes half of the time of a query. So this module makes the text of a
simple query from the query object, without the SQL. A simple query compares columns of the model
with plain values, orders by such columns, and may have limits. For any other query, the text is the
SQL.

Two kinds of queries have no text, and are not cached: those that read other tables, and those whose
results can change while no row changes, such as a query with ``Now()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Choices, lookups
from django.db.models.expressions import Col, Func, RawSQL, Subquery
from django.db.models.fields import related_lookups
from django.db.models.functions import Now
from django.db.models.lookups import Exact, In, Lookup
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm import compat
from sharded_orm.models.sharding.ordering import own_names
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.routing.where_clause import OnShard

# The types of values that the text of a query may contain. The text contains repr() of each value.
# For these types, repr() shows the whole value and its type, so two different values have different
# texts. Subclasses of these types are not accepted, because they may have another repr().
IMMUTABLE = frozenset(
    {
        int, str, bool, float, bytes, type(None), Decimal, UUID,
        date, datetime, time, timedelta,
    }
)  # fmt: skip

#: The query classes for which this module makes texts that identify a query. Queries of other
#: classes are not cached.
QUERIES = frozenset({Query, ShardedQuery})

# The attributes of a Query object that this module reads, or that do not change the result. If a
# query has set any other attribute, this module does not know its effect, and the query is not
# cached.
_READ_HERE = frozenset(
    {
        "model", "alias_refcount", "alias_map", "alias_cols", "external_aliases", "table_map",
        "used_aliases", "where", "annotations", "extra", "_filtered_relations", "base_table",
        "_annotation_select_cache", "_extra_select_cache", "_lookup_joins", "filter_is_sticky",
        "order_by", "default_ordering", "standard_ordering", "low_mark", "high_mark",
        "bound_key",  # Not read: "where" already has the condition on the bound key.
    }
)  # fmt: skip


@dataclass(slots=True)
class QueryFingerprint:
    """The text that identifies a query, and its conditions of the form ``column = value``.

    :param conditions: the conditions as nested tuples, such as ``("AND", False, [("Exact",
        "user_id", 1)])``: connector, whether it is negated, and a list of conditions. None if only
        the SQL can identify the query.
    :param order: the columns by which the rows are ordered, such as ``("-stars", "id")``.
    :param limits: the bounds of a slice: (0, 10) for ``[:10]``, (0, None) without a slice.
    :param equal: the conditions of the form ``column = value`` that every row of the result must
        meet. Maps each column to its values, such as ``{"user_id": [1]}``.
    :param only_equal: True if ``equal`` contains all conditions of the query, if none of them
        occurs twice in the query, and if the query has no offset. A limit other than 0 is allowed.
    """

    conditions: Any
    order: Any
    limits: tuple[int, int | None]
    equal: dict[str, list[Any]]
    only_equal: bool

    @property
    def text(self) -> str | None:
        """The text that identifies the result of the query.

        None if only the SQL can identify it. Then call :func:`compiled_text`.
        """
        if self.conditions is None:
            return None
        return repr((self.conditions, self.order, *self.limits))


def fingerprint_of(query: Query, *, ordered: bool = True) -> QueryFingerprint | str:
    """Return the fingerprint of ``query``, or the reason as a str if the query cannot be cached.

    :param ordered: whether the order of the rows matters (the default). False for ``count()`` and
        ``exists()``.
    """
    if type(query) not in QUERIES:
        return "a query of another class"
    state = query.__dict__
    if not state.keys() <= _READ_HERE:
        for name in state.keys() - _READ_HERE:
            if state[name] != getattr(Query, name, None):
                return name
    if query.annotations or query.extra or query._filtered_relations or query.external_aliases:  # type: ignore[attr-defined]  # missing in Django's type stubs
        return "annotations"
    if len(query.alias_map) > 1 and _joins(query):
        return "joins"

    equal: dict[str, list[Any]] = {}
    where = query.where
    # Do not use Query.base_table, because it is a cached property, and would keep the value None
    # for a query whose table is not in alias_map yet.
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
        return QueryFingerprint(None, None, (low, high), equal, False)
    return QueryFingerprint(
        parts,
        order,
        (low, high),
        equal,
        not low and (high is None or high > 0) and _is_flat(where, equal),
    )


def _is_flat(where: WhereNode, equal: dict[str, list[Any]]) -> bool:
    return len(where.children) == sum(map(len, equal.values())) and not any(
        isinstance(child, WhereNode) for child in where.children
    )


def _joins(query: Any) -> bool:
    # alias_map may contain a table that is not joined. For example, Django finds that
    # filter(album__id=7) needs no join. It then sets the reference count of the table to 0, but
    # leaves the table in alias_map.
    return any(
        query.alias_refcount[alias] for alias in query.alias_map if alias != query.base_table
    )


class _Conditions:
    """Reads a tree of conditions, and collects the ``column = value`` conditions in it.

    :param base: the alias of the table of the query's model.
    :param equal: a dict to which the collected conditions are added; see
        :class:`QueryFingerprint` for its format.
    """

    def __init__(self, base: str | None, equal: dict[str, list[Any]]) -> None:
        self._base = base
        self._equal = equal

    def read(self, node: WhereNode, required: bool) -> tuple[Any, ...] | None:
        """Return the conditions in ``node`` as tuples; None if one of them is of an unknown kind.

        :param required: whether every row of the result must meet the conditions in ``node``.
        """
        required = required and not node.negated and node.connector == AND
        parts: list[Any] = []
        unknown = False
        child: Any
        for child in node.children:
            kind = type(child)
            part: Any
            if kind is WhereNode:
                part = self.read(child, required)
            elif kind in _KNOWN or _is_known(kind):
                part = self._lookup(kind, child, required)
            else:
                part = None
            if part is None:
                # The kind of this condition is unknown, so the text of this query must be its SQL.
                # Still read the other conditions, because one of them may be the condition on the
                # shard key. If none were found, the query would not be cached.
                unknown = True
            else:
                parts.append(part)
        return None if unknown else (node.connector, node.negated, parts)

    def _lookup(self, kind: Any, lookup: Any, required: bool) -> Any:
        column, value = lookup.lhs, lookup.rhs
        if type(column) is not Col:
            if isinstance(column, OnShard) and value is True:
                # This condition only selects the shard to which the query is sent, and is not part
                # of the SQL. Put the alias of the shard into the text, because the same query has
                # another result on another shard.
                return ("shard", column.alias)
            return None
        if column.alias != self._base or lookup.bilateral_transforms:
            return None
        if type(value) in (list, tuple):
            value = list(map(_plain_value, value))
            if not IMMUTABLE.issuperset(map(type, value)):
                return None
            if issubclass(kind, In):
                # In.process_rhs() drops values that occur twice.
                value = list(dict.fromkeys(value))
        elif type(value := _plain_value(value)) not in IMMUTABLE:
            return None
        elif required and value is not None and issubclass(kind, Exact):
            name: Any = column.target.column
            values = self._equal.setdefault(name, [])
            # Add each value only once, because a related manager and the caller may both add a
            # condition on the same shard key.
            if value not in values:
                values.append(value)
        return (kind.__name__, column.target.column, value)


def _plain_value(value: Any) -> Any:
    """Return the plain value of a member of ``TextChoices`` or another enumeration of choices.

    Any other value is returned unchanged.
    """
    return value.value if isinstance(value, Choices) else value


# Remembers the classes for which _is_known() has returned True: Django's lookup classes that
# queries have used so far. The SQL of such a lookup depends only on the class, the column and the
# value.
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
    columns = []
    for name in ordering:
        if type(name) is not str:
            return None
        column = names.get(name[1:] if name[:1] in "-+" else name)
        if column is None:
            return None
        columns.append(f"-{column}" if name[0] == "-" else column)
    return tuple(columns)


# -- Texts of compiled queries -----------------------------------------------------


def compiled_text(query: Any, using: str) -> str | None:
    """Compile ``query`` and return the text that identifies it: its SQL and the parameters.

    Return None if the query cannot be cached.

    :param using: the alias of the database where the query would run.
    """
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
    params = tuple(map(_plain_value, params))
    # If the driver is psycopg, Django wraps each integer in a subclass of int for the column's
    # size. The repr() of such an object shows the whole value, too.
    integers = getattr(connections[using].ops, "integerfield_type_map", {}).values()
    if " JOIN " in sql or not IMMUTABLE.union(integers).issuperset(map(type, params)):
        # The query reads another table (even the ordering may cause a join), or has a parameter
        # whose repr() may not show the whole value. So the query is not cached.
        return None
    return repr((sql, params))


_OWN_SQL = ("function", "template")
_UNSTEADY: tuple[type[Any], ...] = (Now, *compat.RANDOM_FUNCTIONS, RawSQL, Subquery)


def _is_steady(node: Any) -> bool:
    """Whether the value of ``node`` depends only on the row for which it is computed.

    True only for Django's own expressions. False for ``Now``, ``Random``, ``RawSQL``, ``Subquery``,
    functions whose SQL name or template the project gives (``Func(function=…)``), and expressions
    of other packages.

    :param node: an expression, a condition or a tree of conditions.
    """
    if isinstance(node, WhereNode):
        return all(map(_is_steady, node.children))
    if not hasattr(node, "get_source_expressions"):
        return False
    kind: Any = type(node)
    if not kind.__module__.startswith("django.db.models.") or issubclass(kind, _UNSTEADY):
        return False
    if issubclass(kind, Func) and (kind is Func or not node.extra.keys().isdisjoint(_OWN_SQL)):
        # The project has chosen the function's SQL, which may read anything.
        return False
    if isinstance(node, Lookup) and not _is_value(node.rhs) and not _is_steady(node.rhs):
        return False
    return all(
        source is None or _is_value(source) or _is_steady(source)
        for source in node.get_source_expressions()
    )


def _is_value(node: Any) -> bool:
    return not hasattr(node, "resolve_expression") and not hasattr(node, "as_sql")
