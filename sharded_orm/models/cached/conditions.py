"""Finds the values that the conditions of a query allow in columns of its main table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.db.models.expressions import Col
from django.db.models.sql.where import NothingNode

from sharded_orm.models.sharding.expressions import required_conditions
from sharded_orm.routing.where_clause import compared_columns, is_equality, plain_values


def all_pinned(query: Any, columns: Collection[str | None]) -> dict[str, list[Any]]:
    """Return a dict that maps a column to the values that it can have in rows that match ``query``.

    For example, ``filter(user_id=1, album_id__in=[7, 8])`` gives ``{"user_id": [1], "album_id": [7,
    8]}``. A column is in the dict only if a condition that every row must meet compares the column
    with plain values, by equality or ``__in``. Each value is listed once, as ``get_prep_value()``
    of the field returns it; NULL is never listed. If the list of a column is empty, no row can
    match.

    :param query: a :class:`~django.db.models.sql.Query` of any kind; it is not changed.
    :param columns: names of database columns, as in ``Field.column``; None is ignored.
    """
    pinned: dict[str, list[Any]] = {}
    # Do not use Query.base_table, because it is a cached property, and would keep the value None
    # for a query whose table is not in alias_map yet.
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
            name: Any = column.target.column
            if name not in columns:
                continue
            values = plain_values(compared, column.target)
            if values is not None and (name not in pinned or len(values) < len(pinned[name])):
                pinned[name] = values
    return pinned
