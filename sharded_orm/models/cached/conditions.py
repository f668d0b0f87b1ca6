"""What a query says of its own table's columns, read from its where tree."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any

from django.db.models.expressions import Col, ColPairs, Value  # type: ignore[attr-defined]  # not in the stubs
from django.db.models.lookups import In
from django.db.models.sql.where import AND, NothingNode, WhereNode

from sharded_orm.routing.where import are_prepared, is_equality


def pinned(query: Any, column: str) -> tuple[Any, ...] | None:
    """The values that ``column`` of the query's own table can have in rows that match.

    They are as the field's ``get_prep_value`` gives them, each once; NULL is not among
    them. None if the query does not bound the column by equality or ``__in`` with plain
    values, in conjunction with all the rest. No values at all: no row can match.

    :param query: a :class:`~django.db.models.sql.Query` of any kind; it is not changed.
    :param column: a database column, as ``Field.column``.
    """
    found: tuple[Any, ...] | None = all_pinned(query, (column,)).get(column)
    return found


def all_pinned(query: Any, columns: Collection[str | None]) -> dict[str, tuple[Any, ...]]:
    """The same for several columns; those that are not bound are left out, and so is None."""
    # Query.base_table remembers its answer, which may come too early here.
    base = next(iter(query.alias_map), None)
    found: dict[str, tuple[Any, ...]] = {}
    if base is None:
        return found
    nodes = [query.where]
    for node in nodes:
        if isinstance(node, WhereNode):
            # One child is the same under any connector.
            if not node.negated and (node.connector == AND or len(node.children) == 1):
                nodes += node.children
        elif is_equality(node):
            for column in columns:
                values = _compared(node, base, column) if column is not None else None
                if column is None or values is None:
                    continue
                if column not in found or len(values) < len(found[column]):
                    found[column] = values
        elif isinstance(node, NothingNode):
            return {column: () for column in columns if column is not None}
    return found


def _compared(lookup: Any, base: str, column: str) -> tuple[Any, ...] | None:
    lhs, rhs = lookup.lhs, lookup.rhs
    if type(lhs) is Col and (lhs.alias != base or lhs.target.column != column):
        return None
    if not lookup.rhs_is_direct_value() and type(rhs) is not Value:
        return None
    several = isinstance(lookup, In)
    if type(lhs) is ColPairs:  # a composite primary key
        for position, part in enumerate(lhs):
            if part.alias == base and part.target.column == column:
                rows = rhs if several else (rhs,)
                prepare = part.target.get_prep_value
                return _plain([prepare(row[position]) for row in rows], part.target)
        return None
    if type(lhs) is not Col:
        return None
    return _plain(rhs if several else (rhs,), lhs.target)


def _plain(values: Iterable[Any], field: Any) -> tuple[Any, ...] | None:
    found: dict[Any, None] = {}
    for value in values:
        if type(value) is Value:
            # Django prepares plain values only; the database converts this one in its own way.
            given, value = value.value, field.get_prep_value(value.value)
            if type(given) is not type(value):
                return None
        if value is None:
            continue  # Equality with NULL holds for no row.
        if hasattr(value, "resolve_expression") or hasattr(value, "as_sql"):
            return None
        if not isinstance(value, Hashable):
            return None
        found[value] = None
    return tuple(found) if are_prepared(found, field.get_prep_value) else None
