"""Finds the shard keys of the rows that an INSERT stores.

An upsert (INSERT … ON CONFLICT) may also update stored rows. :func:`conflicts_within` tells whether
these have the same shard keys as the new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.db.models import AutoField, CompositePrimaryKey, UniqueConstraint


def returned_keys(compiler: Any, objs: Sequence[Any], key: Any, result: Any) -> list[Any] | None:
    """Return the shard keys of new rows, if an INSERT returned them from the database.

    :param compiler: the compiler of the INSERT.
    :param objs: the instances that were inserted.
    :param key: the field of the shard key.
    :param result: the rows that the INSERT returned.
    :returns: the shard keys in the order of ``objs``; None if the INSERT did not return them.
    """
    returned = list(compiler.returning_fields or ())
    names = [field.attname for field in returned]
    if key.attname not in names or len(result) != len(objs):
        return None
    position = names.index(key.attname)
    return [row[position] for row in result]


def conflicts_within(query: Any, key: str) -> bool:
    """Whether every stored row that conflicts with a new row has the shard key of the new row.

    True if the shard key is a part of each unique constraint that the new row can violate.

    :param query: the query of the INSERT.
    :param key: the name of the field of the shard key.
    """
    meta = query.get_meta()
    # If the database generates the primary key, its value is always new, so no stored row has it.
    # Leave the unique constraint of the primary key out in this case.
    generates_pk = isinstance(meta.pk, AutoField) and meta.pk not in query.fields
    return all(
        key in names
        for names in _unique_sets(query.model)
        if not (generates_pk and meta.pk.name in names)
    )


@lru_cache(maxsize=1024)
def _unique_sets(model: Any) -> tuple[frozenset[str], ...]:
    """Return, for each unique constraint of ``model``, the names of its fields.

    The names of one constraint are a set. It is empty if the constraint is on expressions.
    """
    meta = model._meta
    unique_sets = [frozenset(names) for names in meta.unique_together]
    if isinstance(meta.pk, CompositePrimaryKey):
        unique_sets.append(frozenset(part.name for part in meta.pk.fields))
    unique_sets += [frozenset({field.name}) for field in meta.local_concrete_fields if field.unique]
    for constraint in meta.constraints:
        if isinstance(constraint, UniqueConstraint):
            unique_sets.append(frozenset(constraint.fields))
    return tuple(unique_sets)
