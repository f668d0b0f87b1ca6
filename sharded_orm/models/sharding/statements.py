"""Expressions that stand in a statement beside its query: aggregates, and values to be written.

Django resolves them when the statement is sent; here they are resolved before, on copies, and
held to the same rules as the query: each shard must have all rows that they read.
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
    """The arguments of ``aggregate()`` by name, as QuerySet.aggregate() names them."""
    named = dict(kwargs)
    for arg in args:
        try:
            named[arg.default_alias] = arg
        except (AttributeError, TypeError):
            raise TypeError("Complex aggregates require an alias") from None
    return named


def check_aggregates(colocation: Colocation, query: Query, aggregates: Mapping[str, Any]) -> None:
    """Raise unless ``aggregate(**aggregates)`` of ``query`` reads what its database has."""
    copy = query.chain()
    found = []
    # As Query.get_aggregation(), in which later aggregates may refer to earlier ones.
    for name, aggregate in aggregates.items():
        if not hasattr(aggregate, "resolve_expression"):
            return  # Django refuses it, with its own words.
        resolved = aggregate.resolve_expression(copy, allow_joins=True, reuse=None, summarize=True)
        copy.append_annotation_mask([name])
        copy.annotations[name] = resolved
        found.append(resolved)
    colocation.check(copy, ordered=query.is_sliced, values=found)


def check_values(colocation: Colocation, query: Query, values: Iterable[Any]) -> None:
    """Raise unless the values of an UPDATE of the rows of ``query`` are read beside the rows."""
    expressions = [value for value in values if hasattr(value, "resolve_expression")]
    if not expressions:
        return
    copy: Any = query.chain(UpdateQuery)
    # As UpdateQuery.add_update_fields(), which updates the table of a parent by a query on the
    # parent: seen from here its columns are joined. Joins that go further Django refuses itself.
    resolved = [
        value.resolve_expression(copy, allow_joins=True, for_save=True) for value in expressions
    ]
    colocation.check(copy, ordered=False, values=resolved)


def check_update(
    colocation: Colocation, rows: Sequence[Any], names: Iterable[str] | None = None
) -> None:
    """The same of instances, and of their values for the fields ``names``; None: for all."""
    values = _expressions(rows, names)
    if values:
        check_values(colocation, Query(type(rows[0])), values)


def check_insert(colocation: Colocation, rows: Sequence[Any]) -> None:
    """Raise unless the values of new rows are read where the rows will be."""
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
    """Raise if validating ``constraint`` would read rows that its condition selects by itself."""
    query = Query(None)
    if any(True for _ in nested_queries(query, *vars(constraint).values())):
        raise CrossShardRelation(
            f"The constraint {constraint.name!r} has a subquery, which sees the rows of one shard"
            " only. Check this in clean(), with a query that names its shards."
        )


def _expressions(rows: Sequence[Any], names: Iterable[str] | None = None) -> list[Any]:
    if not rows:
        return []
    wanted = None if names is None else set(names)
    found = []
    for field in rows[0]._meta.concrete_fields:
        name = field.attname
        if wanted is not None and field.name not in wanted and name not in wanted:
            continue
        # Rows are many, and the types of their values few.
        kinds = {type(row.__dict__.get(name)) for row in rows}
        if any(hasattr(kind, "resolve_expression") for kind in kinds):
            values = (row.__dict__.get(name) for row in rows)
            found += [
                value
                for value in values
                if hasattr(value, "resolve_expression") and not _is_default(field, value)
            ]
    return found


def _is_default(field: Any, value: Any) -> bool:
    """Whether it is the field's ``db_default``, which no database lets read rows."""
    expression = getattr(value, "expression", None)
    return type(value) is DatabaseDefault and expression is field._db_default_expression
