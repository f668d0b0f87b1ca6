"""Checks expressions outside the query of a statement: aggregates, and values to be written.

Django resolves them when it sends the statement. Here they are resolved earlier, on copies, and
checked by the same rule as the query: each shard must have all rows that they read.
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
    """The arguments of ``aggregate()`` by name, as ``QuerySet.aggregate()`` names them."""
    named = dict(kwargs)
    for arg in args:
        try:
            named[arg.default_alias] = arg
        except (AttributeError, TypeError):
            raise TypeError("Complex aggregates require an alias") from None
    return named


def check_aggregates(colocation: Colocation, query: Query, aggregates: Mapping[str, Any]) -> None:
    """Raise unless the database of ``query`` has all rows that ``aggregates`` read."""
    copy = query.chain()
    expressions = []
    # As Query.get_aggregation(): a later aggregate may refer to an earlier one.
    for name, aggregate in aggregates.items():
        if not hasattr(aggregate, "resolve_expression"):
            return  # Django refuses it.
        resolved = aggregate.resolve_expression(copy, allow_joins=True, reuse=None, summarize=True)
        copy.append_annotation_mask([name])
        copy.annotations[name] = resolved
        expressions.append(resolved)
    colocation.check(copy, ordered=query.is_sliced, values=expressions)


def check_values(colocation: Colocation, query: Query, values: Iterable[Any]) -> None:
    """Raise unless the database of ``query`` has all rows that the values of its UPDATE read."""
    expressions = [value for value in values if hasattr(value, "resolve_expression")]
    if not expressions:
        return
    copy: Any = query.chain(UpdateQuery)
    # As UpdateQuery.add_update_fields(). Joins are allowed here because Django updates the table
    # of a multi-table parent by a query of its own; it refuses all other joins.
    resolved = [
        value.resolve_expression(copy, allow_joins=True, for_save=True) for value in expressions
    ]
    colocation.check(copy, ordered=False, values=resolved)


def check_update(
    colocation: Colocation, rows: Sequence[Any], names: Iterable[str] | None = None
) -> None:
    """Raise unless the database has all rows that values of an UPDATE of ``rows`` read.

    :param names: the fields to be saved; None for all.
    """
    values = _expressions(rows, names)
    if values:
        check_values(colocation, Query(type(rows[0])), values)


def check_insert(colocation: Colocation, rows: Sequence[Any]) -> None:
    """Raise unless the database of new rows has all rows that their values read."""
    expressions = _expressions(rows)
    if not expressions:
        return
    query = InsertQuery(type(rows[0]))
    # As SQLInsertCompiler.prepare_value().
    resolved = [
        value.resolve_expression(query, allow_joins=False, for_save=True) for value in expressions
    ]
    colocation.check(query, ordered=False, values=resolved)


def check_constraint(constraint: Any) -> None:
    """Raise if ``constraint`` has a subquery, which would read the rows of one shard only."""
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
        # Looks at types first, because rows are many and their types few.
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
    """Whether ``value`` is the field's ``db_default``, which no database lets read rows."""
    expression = getattr(value, "expression", None)
    return type(value) is DatabaseDefault and expression is field._db_default_expression
