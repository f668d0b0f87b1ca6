"""Finds the parts of a query that may read rows of another shard.

These parts are subqueries, and conditions on the shard of an instance. Django's
``get_source_expressions()`` does not return all of them. For example, a subquery may be the value
of a lookup, or be in the condition of a joined relation, or in an attribute that a later version of
Django adds. So this module searches all attributes of an object.

It refuses SQL text that contains SELECT or TABLE. It also refuses a project's expression that
generates its own SQL, unless the class has the decorator ``reads_own_row``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from django.db.models import Field, Model, QuerySet
from django.db.models.expressions import (
    BaseExpression,
    Col,
    ColPairs,
    Combinable,
    Exists,
    F,
    Func,
    RawSQL,
    Star,
    Subquery,
    Value,
)
from django.db.models.lookups import In, IsNull
from django.db.models.query_utils import FilteredRelation
from django.db.models.sql import Query
from django.db.models.sql.datastructures import BaseTable, Join
from django.db.models.sql.where import AND, XOR, ExtraWhere, NothingNode, WhereNode
from django.utils.tree import Node

from sharded_orm.exceptions import UnknownExpression
from sharded_orm.routing.where_clause import OnShard, is_from_django, writes_own_sql

#: Attributes of Django's ``Query`` that can contain expressions, so that they must be searched for
#: subqueries.
HOLDS_EXPRESSIONS = frozenset(
    {
        "alias_map", "annotations", "combined_queries", "extra", "extra_order_by", "extra_tables",
        "group_by", "inner_query", "related_updates", "select", "values", "where",
    }
)  # fmt: skip
#: Attributes of ``Query`` that hold names of fields and annotations. Django resolves these names to
#: expressions when it compiles the query. :mod:`sharded_orm.models.sharding.ordering` resolves them
#: earlier, so that the expressions can be searched for subqueries.
HOLDS_NAMES = frozenset({"distinct_fields", "order_by"})
#: Attributes of ``Query`` that need not be searched for subqueries. They contain flags,
#: integers, names of tables and columns, model instances, or copies of expressions in a searched
#: attribute.
HOLDS_NONE = frozenset(
    {
        "_annotation_select_cache", "_constructor_args", "_db", "_extra_select_cache",
        # Do not search this attribute. A filtered relation is compiled only as a part of a join.
        # The join, which is searched, contains a copy of the relation's condition.
        "_filtered_relations",
        "_lookup_joins", "alias_cols", "alias_prefix", "alias_refcount", "annotation_select_mask",
        "base_table", "combinator", "combinator_all", "compiler", "contains_subquery", "default_cols",
        "default_ordering", "deferred_loading", "distinct", "empty_result_set_value",
        "explain_info", "external_aliases", "extra_select_mask", "fields", "filter_is_sticky",
        "high_mark", "low_mark", "max_depth", "model", "objs", "on_conflict", "raw",
        "related_ids", "select_for_no_key_update", "select_for_update",
        "select_for_update_nowait", "select_for_update_of", "select_for_update_skip_locked",
        "select_related", "selected", "standard_ordering", "subq_aliases", "subquery",
        "table_map", "unique_fields", "update_fields", "used_aliases", "values_select",
    }
)  # fmt: skip

# Attributes of ``Query`` that parts_to_check() does not search for subqueries. The parts of a union,
# in "combined_queries", are checked by Colocation.check() like separate queries. It also knows which
# of the "annotations" are in the statement. "bound_key" of BoundKeyQuery is a plain value, and
# "is_limited_by_exists" is a flag.
_SKIPPED = (
    HOLDS_NONE
    | HOLDS_NAMES
    | {"annotations", "bound_key", "combined_queries", "is_limited_by_exists"}
)
# Types whose values cannot contain an expression.
_PLAIN = frozenset(
    {
        bool, bytes, date, datetime, Decimal, float, int, str, time, timedelta, type(None), UUID,
    }
)  # fmt: skip
_LISTS = frozenset({frozenset, list, set, tuple})
# Attributes that contain the arguments of an expression's constructor as they were before Django
# resolved them. They are not searched, because other attributes contain the resolved arguments.
_CONSTRUCTION = frozenset({"_constructor_args", "identity"})
_SELECTS = re.compile(r"\b(select|table)\b", re.IGNORECASE)
_registered: set[type] = set()
_known_kinds: dict[type, bool] = {}

_Class = TypeVar("_Class", bound=type)


def reads_own_row(cls: _Class) -> _Class:
    """Declare, as a class decorator, that an expression's SQL reads only what its arguments read.

    ::

        @reads_own_row
        class NotEqual(Lookup):
            lookup_name = "ne"

            def as_sql(self, compiler, connection): ...

    Without the decorator, a query on shards that uses the class raises :exc:`UnknownExpression`,
    because its SQL could read rows of another shard. Decorate each expression of a project (lookup,
    transform, function, …) that overrides a method that generates SQL. A subclass needs its own
    decorator only if it overrides such a method.
    """
    _registered.add(cls)
    _known_kinds.clear()
    return cls


@dataclass(frozen=True, slots=True)
class ShardCondition:
    """A condition on the shard of an instance.

    :param condition: the condition. For example, ``filter(album=album)`` adds one.
    :param in_expression: False for a condition of the where tree, which limits the rows of the
        query. True for a condition inside an expression, such as ``When(album=album, …)``.
    :param in_xor: whether the condition is in an XOR of the where tree. On other shards, it makes
        the comparison false, where one database may have NULL. An XOR may differ for the two. Also,
        where the database has XOR itself, Django takes an XOR for true if one part is always true.
    """

    condition: OnShard
    in_expression: bool
    in_xor: bool = False


@dataclass(frozen=True, slots=True)
class Nested:
    """A subquery, and where it is in the outer query.

    :param query: the subquery, in which references to the outer query are resolved to columns.
    :param compared: the left side of ``column IN (query)`` if the subquery is the right side;
        otherwise None.
    :param certain: True if it makes no difference whether ``IN`` yields NULL or false. For example,
        ``WHERE ref IN (query)`` excludes the row in both cases. False if it may make a difference,
        such as under NOT.
    :param not_null: columns that are not NULL in the rows of the outer query, because another of
        its conditions excludes NULL.
    """

    query: Query
    compared: Any = None
    certain: bool = False
    not_null: tuple[Col, ...] = ()
    #: Aliases of shards. The where tree joins the subquery by AND to a condition that is true only
    #: on such a shard, an :class:`OnShard` condition. So on other shards, the result of the
    #: subquery does not matter.
    beside: frozenset[str] = frozenset()


def nested_queries(query: Query, *more: Any, trusted: bool = False) -> Iterator[Nested]:
    """Yield the subqueries of ``query``, but not the subqueries inside a subquery.

    Those of all annotations are included. The parameters and errors are those of
    :func:`parts_to_check`.
    """
    for part in parts_to_check(query, *query.annotations.values(), *more, trusted=trusted):
        if isinstance(part, Nested):
            yield part


def selected_annotations(query: Query) -> Iterator[Any]:
    """Yield the annotations that the statement selects."""
    # Django 5.2.0 also selects those of an alias() after values(), which only ``selected`` shows.
    selected = query.selected or {}
    for name, annotation in query.annotations.items():
        if name in query.annotation_select or selected.get(name) == name:
            yield annotation


def parts_to_check(
    query: Query, *more: Any, trusted: bool = False
) -> Iterator[Nested | ShardCondition]:
    """Yield the subqueries of ``query``, and its conditions on the shard of an instance.

    The subqueries themselves are not searched, and neither are the annotations. An annotation may
    be missing in the statement. If it is in WHERE or GROUP BY, these have an own copy of it.

    :param more: other expressions whose subqueries are yielded, too.
    :param trusted: whether to accept SQL that may read any rows. True for the global database,
        which has all rows of its tables.
    :raises UnknownExpression: ``trusted`` is False, and the library cannot know which rows an
        expression reads.
    """
    # Iterate over a copy, because another thread that evaluates the same queryset may add an
    # attribute at the same time.
    for name, value in vars(query).copy().items():
        if not value or name in _SKIPPED:
            continue
        if name == "where":
            yield from _in_where(value, _Position(certain=True), trusted)
        elif name == "alias_map":
            joins = (join for join in value.values() if type(join) is not BaseTable)
            yield from _in_each(joins, trusted)
        elif trusted and name in ("extra_tables", "extra"):
            continue
        elif name == "extra_tables":
            raise UnknownExpression(
                f"extra(tables={list(value)!r}) joins tables that the library cannot place: use"
                " relations, or name a shard with using()."
            )
        elif name == "extra":
            for sql, _ in value.values():
                _check_text(sql)
        else:
            yield from _nested_in(value, trusted=trusted)
    yield from _in_each(more, trusted)


def required_conditions(where: WhereNode) -> Iterator[Any]:
    """Yield the conditions in ``where`` that every matching row must meet.

    Conditions under OR or NOT are left out.
    """
    if where.negated or (where.connector != AND and len(where.children) != 1):
        return
    for child in where.children:
        if isinstance(child, WhereNode):
            yield from required_conditions(child)
        else:
            yield child


def columns(expression: Any) -> tuple[Col, ...]:
    """Return the columns of ``expression`` if it is a single column or a tuple of columns.

    Return ``()`` for any other expression.
    """
    if type(expression) is Col:
        return (expression,)
    if type(expression) is ColPairs:
        return tuple(expression.get_cols())
    return ()


def is_known(kind: type) -> bool:
    """Return whether expressions of class ``kind`` read only what their arguments read.

    Return False for a class of a project that generates its own SQL without the decorator
    :func:`reads_own_row`. Such SQL may read any table.
    """
    known = _known_kinds.get(kind)
    if known is None:
        known = _known_kinds[kind] = _shows_its_sql(kind)
    return known


def is_plain_value(value: Any) -> bool:
    """Return whether ``value`` is a plain value, or a list of such values, and no expression."""
    # A list of keys may be long, but has few types. So compare the distinct types of the values,
    # and not each value.
    kind = type(value)
    return kind in _PLAIN or (kind in _LISTS and _PLAIN.issuperset(map(type, value)))


def _shows_its_sql(kind: type) -> bool:
    for cls in kind.__mro__:
        if cls in _registered:
            return True  # ``cls`` has the decorator reads_own_row, which also covers inherited methods.
        if writes_own_sql(cls):
            return False
    return True


class _Position(NamedTuple):
    """The position of a condition in the where tree; :class:`Nested` describes the attributes."""

    certain: bool = False
    not_null: tuple[Col, ...] = ()
    beside: frozenset[str] = frozenset()
    in_xor: bool = False


_ELSEWHERE = _Position()


def _in_where(node: Any, position: _Position, trusted: bool) -> Iterator[Nested | ShardCondition]:
    if not isinstance(node, WhereNode):
        if isinstance(getattr(node, "lhs", None), OnShard):
            yield ShardCondition(node.lhs, in_expression=False, in_xor=position.in_xor)
        else:
            yield from _nested_in(node, position, trusted=trusted)
        return
    if not node.children:
        return
    certain, not_null, beside, in_xor = position
    certain = certain and not node.negated and node.connector != XOR
    child: Any
    if node.connector == AND:
        guards = (
            child
            for child in node.children
            if isinstance(child, IsNull) and is_from_django(child) and child.rhs is False
        )
        not_null = (*not_null, *(column for guard in guards for column in columns(guard.lhs)))
        for child in node.children:
            if isinstance(getattr(child, "lhs", None), OnShard) and child.rhs is True:
                beside |= {child.lhs.alias}
    position = _Position(certain, not_null, beside, in_xor or node.connector == XOR)
    for child in node.children:
        # The usual condition compares a column with a plain value or a list of plain values. It has
        # no subquery, so skip it.
        if (
            type(getattr(child, "lhs", None)) is Col
            and is_plain_value(child.rhs)
            and is_known(type(child))
        ):
            continue
        yield from _in_where(child, position, trusted)


def _nested_in(
    value: Any, position: _Position = _ELSEWHERE, *, trusted: bool
) -> Iterator[Nested | ShardCondition]:
    kind = type(value)
    if kind is Col or kind is Value or is_plain_value(value):
        return
    inside = _Position(beside=position.beside)
    if isinstance(value, dict):
        yield from _in_each(value.values(), trusted, inside)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _in_each(value, trusted, inside)
    elif isinstance(value, QuerySet):
        yield Nested(value.query, beside=position.beside)
    elif isinstance(value, Query):
        yield Nested(value, beside=position.beside)
    elif isinstance(value, Field | Model | F | Star | NothingNode):
        return
    elif isinstance(value, OnShard):
        yield ShardCondition(value, in_expression=True)
    elif _is_expression(value):
        if not trusted:
            _check(value)
        rhs: Any = value.rhs if isinstance(value, In) else None
        if isinstance(rhs, Subquery) and not isinstance(rhs, Exists):
            if not trusted:
                _check(rhs)
            rhs = rhs.query
        compares = isinstance(rhs, Query) and is_from_django(value)
        if compares:
            yield Nested(rhs, value.lhs, position.certain, position.not_null, position.beside)
        for name, part in vars(value).copy().items():
            if name in _CONSTRUCTION or (compares and name == "rhs"):
                continue
            yield from _nested_in(part, inside, trusted=trusted)
    elif not trusted and (hasattr(kind, "as_sql") or hasattr(kind, "resolve_expression")):
        raise _unknown(value)


def _in_each(
    values: Iterable[Any], trusted: bool, position: _Position = _ELSEWHERE
) -> Iterator[Nested | ShardCondition]:
    for value in values:
        yield from _nested_in(value, position, trusted=trusted)


def _is_expression(value: Any) -> bool:
    return isinstance(
        value, BaseExpression | Combinable | Node | Join | BaseTable | FilteredRelation | ExtraWhere
    )


def _check(expression: Any) -> None:
    if not is_known(type(expression)):
        raise _unknown(expression)
    if isinstance(expression, RawSQL):
        _check_text(expression.sql)
    elif isinstance(expression, ExtraWhere):
        for sql in expression.sqls:
            _check_text(sql)
    elif isinstance(expression, Func | Subquery):
        texts = [getattr(expression, name, None) for name in ("function", "template", "arg_joiner")]
        for text in (*texts, *expression.extra.values()):
            if isinstance(text, str):
                _check_text(text)


def _check_text(sql: str) -> None:
    if _SELECTS.search(sql):
        raise UnknownExpression(
            f"The SQL {sql!r} reads other rows, and the library cannot tell of which shards: write"
            " it with Subquery or Exists, evaluate it first and pass its values, or name a shard"
            " with using()."
        )


def _unknown(expression: Any) -> UnknownExpression:
    name = type(expression).__qualname__
    return UnknownExpression(
        f"{name} writes its own SQL, and the library cannot tell whether it reads other rows than"
        f" those that it is given. If it does not, declare the class so with"
        " @sharded_orm.reads_own_row; else evaluate it first and pass its values, or name a shard"
        " with using()."
    )
