"""The shard keys of rows that an INSERT adds, or replaces as an upsert."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from django.db.models import AutoField, CompositePrimaryKey, UniqueConstraint


def returned_keys(compiler: Any, objs: Sequence[Any], key: Any, result: Any) -> list[Any] | None:
    """Values of ``key`` that the INSERT returned, in the order of ``objs``."""
    returned = list(compiler.returning_fields or ())
    names = [field.attname for field in returned]
    if key.attname not in names or len(result) != len(objs):
        return None
    position = names.index(key.attname)
    return [row[position] for row in result]


def conflicts_within(query: Any, key: str) -> bool:
    """Whether a stored row that conflicts with a new one must have the same ``key``."""
    meta = query.get_meta()
    # A primary key that the database generates conflicts with no stored one.
    generates_pk = isinstance(meta.pk, AutoField) and meta.pk not in query.fields
    return all(
        key in names
        for names in _unique_sets(query.model)
        if not (generates_pk and meta.pk.name in names)
    )


@lru_cache(maxsize=1024)
def _unique_sets(model: Any) -> tuple[frozenset[str], ...]:
    """The names of fields that are unique together; empty for a constraint of expressions."""
    meta = model._meta
    unique_sets = [frozenset(names) for names in meta.unique_together]
    if isinstance(meta.pk, CompositePrimaryKey):
        unique_sets.append(frozenset(part.name for part in meta.pk.fields))
    unique_sets += [frozenset({field.name}) for field in meta.local_concrete_fields if field.unique]
    for constraint in meta.constraints:
        if isinstance(constraint, UniqueConstraint):
            unique_sets.append(frozenset(constraint.fields))
    return tuple(unique_sets)
