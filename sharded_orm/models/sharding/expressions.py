"""Every expression of a query, wherever Django lets one stand: which queries are inside it.

A subquery hides in more places than an expression lists as its sources: in the values of a
lookup, in the condition of a joined relation, in an attribute that a later Django adds. So the
walk does not ask expressions for their sources. It goes through all that an object holds, and
refuses what it does not know: a class that writes SQL of its own, and SQL as text that selects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, TypeVar
from uuid import UUID

from django.db.models import Field, Model, QuerySet
from django.db.models.expressions import (  # type: ignore[attr-defined]  # not all in the stubs
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
from sharded_orm.routing.where import is_from_django, writes_own_sql

#: Attributes of queries that can hold expressions.
HOLDS_EXPRESSIONS = frozenset(
    {
        "alias_map", "annotations", "combined_queries", "extra", "extra_order_by", "extra_tables",
        "group_by", "inner_query", "related_updates", "select", "values", "where",
    }
)  # fmt: skip
#: Attributes that hold names which Django turns into expressions when it compiles:
#: :mod:`sharded_orm.models.sharding.ordering` does so before.
HOLDS_NAMES = frozenset({"distinct_fields", "order_by"})
#: The other attributes: flags, numbers, names of what stands elsewhere, rows, and copies.
HOLDS_NONE = frozenset(
    {
        "_annotation_select_cache", "_constructor_args", "_db", "_extra_select_cache",
        # Only the joins that use one are compiled; they hold a copy of its condition.
        "_filtered_relations",
        "_lookup_joins", "alias_cols", "alias_prefix", "alias_refcount", "annotation_select_mask",
        "base_table", "combinator", "combinator_all", "compiler", "default_cols",
        "default_ordering", "deferred_loading", "distinct", "empty_result_set_value",
        "explain_info", "external_aliases", "extra_select_mask", "fields", "filter_is_sticky",
        "high_mark", "low_mark", "max_depth", "model", "objs", "on_conflict", "raw",
        "related_ids", "select_for_no_key_update", "select_for_update",
        "select_for_update_nowait", "select_for_update_of", "select_for_update_skip_locked",
        "select_related", "selected", "standard_ordering", "subq_aliases", "subquery",
        "table_map", "unique_fields", "update_fields", "used_aliases", "values_select",
    }
)  # fmt: skip

# Nor are parts of a union looked at here: they are queries of their own.
_PASSED_OVER = HOLDS_NONE | HOLDS_NAMES | {"combined_queries"}
# Types whose values hold no expression.
_PLAIN = frozenset(
    {
        bool, bytes, date, datetime, Decimal, float, int, str, time, timedelta, type(None), UUID,
    }
)  # fmt: skip
_LISTS = frozenset({frozenset, list, set, tuple})
# How expressions were called, before they were resolved.
_CONSTRUCTION = frozenset({"_constructor_args", "identity"})
_SELECTS = re.compile(r"\b(select|table)\b", re.IGNORECASE)
_registered: set[type] = set()
_known: dict[type, bool] = {}

_Class = TypeVar("_Class", bound=type)


def reads_own_row(cls: _Class) -> _Class:
    """Declare that the SQL of ``cls`` reads nothing but the expressions it is given.

    ::

        @reads_own_row
        class NotEqual(Lookup):
            lookup_name = "ne"

            def as_sql(self, compiler, connection): ...

    For lookups, transforms, functions and other expressions of a project that override a method
    which writes SQL. Without it a query on shards that uses them is refused
    (:exc:`UnknownExpression`): it could read rows that are on another shard. Subclasses that
    override such a method need it again.
    """
    _registered.add(cls)
    _known.clear()
    return cls


@dataclass(frozen=True, slots=True)
class Nested:
    """A query inside of another one.

    :param query: resolved, so its references to the outer query are columns.
    :param compared: for ``column IN (query)``: what is compared; else None.
    :param certain: "unknown" and "false" come to the same where it stands: in a condition that
        is not negated.
    :param not_null: columns that are not NULL where the comparison counts.
    """

    query: Query
    compared: Any = None
    certain: bool = False
    not_null: tuple[Col, ...] = ()


def nested_queries(query: Query, *more: Any, trusted: bool = False) -> Iterator[Nested]:
    """The queries inside ``query`` and the expressions ``more``; not those inside of these.

    :param trusted: whether SQL that nobody can read is passed over: on the global database, which
        has all rows of its tables.
    :raises UnknownExpression: what it holds might read other rows, and nobody can tell.
    """
    for name, value in vars(query).items():
        if not value or name in _PASSED_OVER:
            continue
        if name == "where":
            yield from _in_where(value, certain=True, not_null=(), trusted=trusted)
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
            yield from _inside(value, trusted=trusted)
    yield from _in_each(more, trusted)


def demanded(where: WhereNode) -> Iterator[Any]:
    """The conditions that every row meets which meets ``where``."""
    if where.negated or (where.connector != AND and len(where.children) != 1):
        return
    for child in where.children:
        if isinstance(child, WhereNode):
            yield from demanded(child)
        else:
            yield child


def columns(expression: Any) -> tuple[Col, ...]:
    """The columns that ``expression`` consists of; none if it is anything else."""
    if type(expression) is Col:
        return (expression,)
    if type(expression) is ColPairs:
        return tuple(expression.get_cols())
    return ()


def is_known(kind: type) -> bool:
    """Whether the SQL of an expression or lookup of this class shows in what it holds."""
    known = _known.get(kind)
    if known is None:
        known = _known[kind] = _shows_its_sql(kind)
    return known


def is_plain_value(value: Any) -> bool:
    """Whether it is a value, or a list of values, of a type that holds no expression."""
    # Lists of keys are long, and hold values of few types.
    kind = type(value)
    return kind in _PLAIN or (kind in _LISTS and _PLAIN.issuperset(map(type, value)))


def _shows_its_sql(kind: type) -> bool:
    for cls in kind.__mro__:
        if cls in _registered:
            return True  # With all that it inherits.
        if writes_own_sql(cls):
            return False
    return True


def _in_where(
    node: Any, *, certain: bool, not_null: tuple[Col, ...], trusted: bool
) -> Iterator[Nested]:
    if not isinstance(node, WhereNode):
        yield from _inside(node, certain=certain, not_null=not_null, trusted=trusted)
        return
    if not node.children:
        return
    certain = certain and not node.negated and node.connector != XOR
    if node.connector == AND:
        guards = (
            child
            for child in node.children
            if isinstance(child, IsNull) and is_from_django(child) and child.rhs is False
        )
        not_null = (*not_null, *(column for guard in guards for column in columns(guard.lhs)))
    child: Any
    for child in node.children:
        # The ordinary condition, a column against a value or a list, holds no query.
        if (
            type(getattr(child, "lhs", None)) is Col
            and is_plain_value(child.rhs)
            and is_known(type(child))
        ):
            continue
        yield from _in_where(child, certain=certain, not_null=not_null, trusted=trusted)


def _inside(
    value: Any, *, trusted: bool, certain: bool = False, not_null: tuple[Col, ...] = ()
) -> Iterator[Nested]:
    kind = type(value)
    if kind is Col or kind is Value or is_plain_value(value):
        return
    if isinstance(value, dict):
        yield from _in_each(value.values(), trusted)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _in_each(value, trusted)
    elif isinstance(value, QuerySet):
        yield Nested(value.query)
    elif isinstance(value, Query):
        yield Nested(value)
    elif isinstance(value, Field | Model | F | Star | NothingNode):
        return
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
            yield Nested(rhs, value.lhs, certain, not_null)
        for name, part in vars(value).items():
            if name in _CONSTRUCTION or (compares and name == "rhs"):
                continue
            yield from _inside(part, trusted=trusted)
    elif not trusted and (hasattr(kind, "as_sql") or hasattr(kind, "resolve_expression")):
        raise _unknown(value)


def _in_each(values: Iterable[Any], trusted: bool) -> Iterator[Nested]:
    for value in values:
        yield from _inside(value, trusted=trusted)


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
