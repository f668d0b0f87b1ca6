"""Checks expressions that are not part of a query: aggregates, and values to be written.

Django resolves such an expression only when it sends the statement. This module resolves it
earlier, on a copy of the query, and checks that each shard has all rows that the expression reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.core.exceptions import FieldError
from django.db.models import Model
from django.db.models.base import ModelState
from django.db.models.expressions import CombinedExpression, DatabaseDefault, F, Value
from django.db.models.sql import InsertQuery, Query, UpdateQuery
from django.utils.functional import LazyObject

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.expressions import is_plain_value, nested_queries
from sharded_orm.models.sharding.query import ShardedQuery, own_columns

# The types that most attributes of an instance have. Values of these types are no expressions.
_NO_EXPRESSIONS = frozenset({
    int, str, bool, float, Decimal, datetime, date, time, timedelta, UUID, bytes, dict, list, type(None),
    ModelState,
})  # fmt: skip


def named_aggregates(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map names to the arguments of ``aggregate()``. Unnamed ones get Django's default names.

    For example, ``aggregate(Sum("stars"))`` gives ``{"stars__sum": Sum("stars")}``.
    """
    named = dict(kwargs)
    for arg in args:
        try:
            named[arg.default_alias] = arg
        except (AttributeError, TypeError):
            raise TypeError("Complex aggregates require an alias") from None
    return named


def check_aggregates(colocation: Colocation, query: Query, aggregates: Mapping[str, Any]) -> None:
    """Raise :exc:`CrossShardRelation` if ``aggregates`` read rows that may be in another database.

    Each database to which ``query`` is sent must have all rows that the aggregates read there.
    """
    copy = query.chain()
    expressions = []
    # An aggregate may refer to an earlier one. So add each aggregate to the query before the next
    # is resolved, as Query.get_aggregation() does.
    for name, aggregate in aggregates.items():
        if not hasattr(aggregate, "resolve_expression"):
            return  # The argument is no aggregate, so let Django raise its error.
        resolved = aggregate.resolve_expression(copy, allow_joins=True, reuse=None, summarize=True)
        copy.append_annotation_mask([name])
        copy.annotations[name] = resolved
        expressions.append(resolved)
    colocation.check(copy, ordered=query.is_sliced, values=expressions)


def check_values(colocation: Colocation, query: Query, values: Iterable[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if an expression in ``values`` may read rows of another database.

    Each database to which the update is sent must have all rows that these expressions read.

    :param query: the query for the rows to update.
    :param values: the new values, some of which may be expressions.
    """
    expressions = [
        value
        for value in values
        if hasattr(value, "resolve_expression") and not _reads_own_columns(query, value)
    ]
    if not expressions:
        return
    copy: Any = query.chain(UpdateQuery)
    # Resolve the values as UpdateQuery.add_update_fields() does, but allow joins. The only join
    # that Django accepts here leads to a multi-table parent, whose table it updates by a separate
    # query.
    resolved = [
        value.resolve_expression(copy, allow_joins=True, for_save=True) for value in expressions
    ]
    colocation.check(copy, ordered=False, values=resolved)


def has_expressions(row: Any) -> bool:
    """Return whether a value of ``row`` is an expression, or a lazy object that may contain one.

    If not, :func:`check_update` and :func:`check_insert` have nothing to check.
    """
    kinds = set(map(type, row.__dict__.values()))
    return not kinds <= _NO_EXPRESSIONS and any(map(may_be_expression, kinds))


def has_lazy(values: Iterable[tuple[Any, Any, Any]]) -> bool:
    """Return whether one of the new values for ``Model._do_update()`` is a lazy object."""
    return any(issubclass(type(value), LazyObject) for _, _, value in values)


def may_be_expression(kind: type) -> bool:
    """Return whether a value of the type ``kind`` is an expression, or may contain one.

    A lazy object may contain an expression. This is known only when it is evaluated.
    """
    return hasattr(kind, "resolve_expression") or issubclass(kind, LazyObject)


def check_update(
    colocation: Colocation,
    rows: Sequence[Any],
    names: Iterable[str] | None = None,
    *,
    lazy: bool = True,
) -> None:
    """Raise :exc:`CrossShardRelation` if new values of ``rows`` read rows of another database.

    A new value may be an expression, such as ``F("width") * 2``. The database that stores the row
    computes it, so it must not read rows of other databases.

    :param names: the names of the fields to be saved; None for all fields.
    :param lazy: whether to check lazy objects, too. The check evaluates them. So pass False if
        Django has not evaluated them yet.
    """
    values = _expressions(rows, names, lazy)
    if values:
        check_values(colocation, ShardedQuery(type(rows[0])), values)


def check_insert(colocation: Colocation, rows: Sequence[Any]) -> None:
    """Raise :exc:`CrossShardRelation` if values of the new ``rows`` read rows of another database.

    A value may be an expression. The database that stores the row computes it, so it must not read
    rows of other databases.
    """
    expressions = _expressions(rows)
    if not expressions:
        return
    query = InsertQuery(type(rows[0]))
    # Resolve the values as SQLInsertCompiler.prepare_value() does.
    resolved = [
        value.resolve_expression(query, allow_joins=False, for_save=True) for value in expressions
    ]
    colocation.check(query, ordered=False, values=resolved)


def check_found_or_created(
    colocation: Colocation,
    model: type[Model],
    changed: Mapping[str, Any] | None,
    new: Mapping[str, Any] | None,
) -> None:
    """Raise :exc:`CrossShardRelation` if values to be written read rows of another database.

    ``get_or_create()`` and ``update_or_create()`` call this before they look up the row. ``save()``
    makes the same check, but after the look-up. This function raises no error for an expression
    that Django itself refuses, because Django raises an error when it uses the value.

    :param changed: new values of the row, if it exists.
    :param new: values of the row, if it does not exist.
    """
    for query, values in ((UpdateQuery(model), changed), (InsertQuery(model), new)):
        resolved = []
        for value in (values or {}).values():
            # Look at the type only. hasattr(value, ...) would evaluate a lazy object, although
            # save() may not need it. If save() writes the value, it evaluates and checks it.
            if hasattr(type(value), "resolve_expression"):
                with suppress(FieldError):
                    allow_joins = isinstance(query, UpdateQuery)
                    resolved.append(
                        value.resolve_expression(query, allow_joins=allow_joins, for_save=True)
                    )
        if resolved:
            colocation.check(query, ordered=False, values=resolved)


def check_constraint(constraint: Any) -> None:
    """Raise an error if ``constraint`` has a subquery, which would see only the rows of one shard."""
    query = Query(None)
    if any(True for _ in nested_queries(query, *vars(constraint).values())):
        raise CrossShardRelation(
            f"The constraint {constraint.name!r} has a subquery, which sees the rows of one shard"
            " only. Check this in clean(), with a query that names its shards."
        )


def _reads_own_columns(query: Query, expression: Any) -> bool:
    """Return whether ``expression`` has only columns of the updated row and plain values.

    For example, ``F("stars") + 1``. Such an expression need not be checked further. The result is
    False if this is uncertain, for example because a name may be that of an annotation.
    """
    kind = type(expression)
    if kind is F:
        return expression.name in own_columns(query.model) and not query.annotations
    if kind is Value:
        return is_plain_value(expression.value)
    return kind is CombinedExpression and all(
        _reads_own_columns(query, side) for side in expression.get_source_expressions()
    )


def _expressions(
    rows: Sequence[Any], names: Iterable[str] | None = None, lazy: bool = True
) -> list[Any]:
    # Usually, no value is an expression. So look at the types of all values first, and return at
    # once if none can be an expression.
    types = {type(value) for row in rows for value in row.__dict__.values()}
    if types <= _NO_EXPRESSIONS or not any(map(may_be_expression, types)):
        return []
    selected = None if names is None else set(names)
    expressions = []
    for field in rows[0]._meta.concrete_fields:
        name = field.attname
        if selected is not None and field.name not in selected and name not in selected:
            continue
        # Examine the distinct types of the field's values first: there are many rows, but few
        # types.
        kinds = {type(row.__dict__.get(name)) for row in rows}
        if any(map(may_be_expression, kinds)):
            values = (row.__dict__.get(name) for row in rows)
            expressions += [
                value
                for value in values
                if (lazy or not issubclass(type(value), LazyObject))
                and hasattr(value, "resolve_expression")
                and not _is_default(field, value)
            ]
    return expressions


def _is_default(field: Any, value: Any) -> bool:
    """Whether ``value`` is the ``db_default`` of ``field``.

    Such a value need not be checked, because no database allows a default that reads rows.
    """
    expression = getattr(value, "expression", None)
    return type(value) is DatabaseDefault and expression is field._db_default_expression
