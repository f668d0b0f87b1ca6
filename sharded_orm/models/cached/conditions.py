"""The values that a query's conditions allow in columns of its own table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db.models.expressions import Col
from django.db.models.sql.where import NothingNode

from sharded_orm.models.sharding.expressions import required_conditions
from sharded_orm.routing.where import compared_columns, is_equality, plain_values


def all_pinned(query: Any, columns: Collection[str | None]) -> dict[str, list[Any]]:
    """By column: the values that it can have in rows that match.

    They are as the field's ``get_prep_value`` gives them, each once; NULL is not among them. A
    column is left out unless a condition that every row must meet compares it with plain values,
    by equality or ``__in``. No values at all: no row can match.

    :param query: a :class:`~django.db.models.sql.Query` of any kind; it is not changed.
    :param columns: database columns, as ``Field.column``; None is passed over.
    """
    pinned: dict[str, list[Any]] = {}
    # Query.base_table remembers its answer, which may come too early here.
    base = next(iter(query.alias_map), None)
    if base is None:
        return pinned
    for condition in required_conditions(query.where):
        if isinstance(condition, NothingNode):
            return {column: [] for column in columns if column is not None}
        if not is_equality(condition):
            continue
        for column, compared in compared_columns(condition):
            if type(column) is not Col or column.alias != base:
                continue
            name = column.target.column
            if name not in columns:
                continue
            values = plain_values(compared, column.target)
            if values is not None and (name not in pinned or len(values) < len(pinned[name])):
                pinned[name] = values
    return pinned
