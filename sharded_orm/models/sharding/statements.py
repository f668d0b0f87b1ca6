"""Checks expressions that are not part of a query: aggregates, and values to be written.

Django resolves such an expression when it sends the statement. Here it is resolved earlier, on a
copy of the query, and checked by the query's own rule: each shard must have all rows that the
expression reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db.models.expressions import DatabaseDefault
from django.db.models.sql import InsertQuery, Query, UpdateQuery

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.expressions import nested_queries


def named_aggregates(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``aggregate()`` by name, as ``QuerySet.aggregate()`` names them."""
    named = dict(kwargs)
    for arg in args:
        try:
            named[arg.default_alias] = arg
        except (AttributeError, TypeError):
            raise TypeError("Complex aggregates require an alias") from None
    return named


def check_aggregates(colocation: Colocation, query: Query, aggregates: Mapping[str, Any]) -> None:
    """Raise :exc:`CrossShardRelation` unless each database of ``query`` has all rows ``aggregates`` read."""
    copy = query.chain()
    expressions = []
    # Like Query.get_aggregation(): a later aggregate may refer to an earlier one.
    for name, aggregate in aggregates.items():
        if not hasattr(aggregate, "resolve_expression"):
            return  # It is no aggregate. Django raises the error.
        resolved = aggregate.resolve_expression(copy, allow_joins=True, reuse=None, summarize=True)
        copy.append_annotation_mask([name])
        copy.annotations[name] = resolved
        expressions.append(resolved)
    colocation.check(copy, ordered=query.is_sliced, values=expressions)


def check_values(colocation: Colocation, query: Query, values: Iterable[Any]) -> None:
    """Raise :exc:`CrossShardRelation` unless each updated database has all rows that ``values`` read.

    :param query: the query whose rows are updated.
    """
    expressions = [value for value in values if hasattr(value, "resolve_expression")]
    if not expressions:
        return
    copy: Any = query.chain(UpdateQuery)
    # Like UpdateQuery.add_update_fields(). Joins are allowed here, because Django updates the table of a
    # multi-table parent by a query of its own. Django refuses all other joins.
    resolved = [
        value.resolve_expression(copy, allow_joins=True, for_save=True) for value in expressions
    ]
    colocation.check(copy, ordered=False, values=resolved)


def check_update(
    colocation: Colocation, rows: Sequence[Any], names: Iterable[str] | None = None
) -> None:
    """Raise :exc:`CrossShardRelation` if new values of ``rows`` read rows that their database lacks.

    :param names: the fields to be saved; None for all.
    """
    values = _expressions(rows, names)
    if values:
        check_values(colocation, Query(type(rows[0])), values)


def check_insert(colocation: Colocation, rows: Sequence[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if values of new ``rows`` read rows that their database lacks."""
    expressions = _expressions(rows)
    if not expressions:
        return
    query = InsertQuery(type(rows[0]))
    # Like SQLInsertCompiler.prepare_value().
    resolved = [
        value.resolve_expression(query, allow_joins=False, for_save=True) for value in expressions
    ]
    colocation.check(query, ordered=False, values=resolved)


def check_constraint(constraint: Any) -> None:
    """Raise if ``constraint`` has a subquery, because that would see the rows of one shard only."""
    query = Query(None)
    if any(True for _ in nested_queries(query, *vars(constraint).values())):
        raise CrossShardRelation(
            f"The constraint {constraint.name!r} has a subquery, which sees the rows of one shard"
            " only. Check this in clean(), with a query that names its shards."
        )


def _expressions(rows: Sequence[Any], names: Iterable[str] | None = None) -> list[Any]:
    if not rows:
        return []
    selected = None if names is None else set(names)
    expressions = []
    for field in rows[0]._meta.concrete_fields:
        name = field.attname
        if selected is not None and field.name not in selected and name not in selected:
            continue
        # Looks at the types of the values first, because rows are many and types are few.
        kinds = {type(row.__dict__.get(name)) for row in rows}
        if any(hasattr(kind, "resolve_expression") for kind in kinds):
            values = (row.__dict__.get(name) for row in rows)
            expressions += [
                value
                for value in values
                if hasattr(value, "resolve_expression") and not _is_default(field, value)
            ]
    return expressions


def _is_default(field: Any, value: Any) -> bool:
    """Whether ``value`` is the field's ``db_default``. No database lets a default read rows."""
    expression = getattr(value, "expression", None)
    return type(value) is DatabaseDefault and expression is field._db_default_expression
