"""Reads the rows of a mirror and of its source, and the shards on which the rows belong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from django.db.models import F, JSONField, Value
from django.db.models.lookups import IsNull

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror, text_of
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound

#: The null of JSON, as the ORM writes it. The ORM reads it as None, like the NULL of SQL.
JSON_NULL: Final = Value(None, JSONField())


def values_of(mirror: Mirror, rows: Any, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the values of ``rows``, with :data:`JSON_NULL` for the null of JSON. One query per shard.

    :param rows: a queryset of the mirror or of its source.
    :param names: the attributes of all copied fields, followed by any other attributes.
    """
    positions = mirror.json_positions
    if not positions:
        return list(rows.values_list(*names))
    found = []
    for row in rows.values_list(*names, *are_null(names[position] for position in positions)):
        values = list(row[: len(names)])
        for position, is_null in zip(positions, row[len(names) :], strict=True):
            if values[position] is None and not is_null:
                values[position] = JSON_NULL
        found.append(tuple(values))
    return found


def are_null(names: Iterable[str]) -> list[IsNull]:
    """Return expressions that are true if the database has the NULL of SQL in these fields."""
    return [IsNull(F(name), True) for name in names]


def is_same(row: Sequence[Any], other: Sequence[Any], json_positions: Iterable[int]) -> bool:
    """Whether two rows have the same values. The null of JSON is :data:`JSON_NULL` in both."""
    if row != other and not all(
        # If a value differs from itself, it is a NaN. Two NaNs count as equal.
        a == b or (a != a and b != b)
        for a, b in zip(row, other, strict=True)
    ):
        return False
    # Compare JSON values as texts: in Python, True equals 1, and 1 equals 1.0, but in JSON these
    # are three values.
    return all(
        row[position] is other[position]
        or _text_of_json(row[position]) == _text_of_json(other[position])
        for position in json_positions
    )


def _text_of_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def wanted_rows(mirror: Mirror) -> Any:
    """Return a queryset of the source's rows that belong in the mirror."""
    rows: Any = ShardedQuerySet(mirror.source.model).uncached().order_by()
    rows = rows.exclude(**{f"{mirror.key.attname}__isnull": True})
    return rows if mirror.condition is None else rows.filter(mirror.condition)


def source_rows(mirror: Mirror, source_keys: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return the shard key and values of the rows that the mirror is to have, by primary key.

    :param source_keys: the shard keys of the source, by primary key. If the shard key of any row is
        None, all shards are queried.
    """
    source = mirror.source
    texts = {
        pk: None if key is None else text_of(source.key, key) for pk, key in source_keys.items()
    }
    with unbound():
        rows = wanted_rows(mirror).filter(pk__in=list(source_keys))
        if None in source_keys.values():
            rows = rows.scatter()
        else:
            rows = rows.filter(**{f"{source.key.attname}__in": list(set(source_keys.values()))})
        names = (*mirror.names, source.pk.attname, source.key.attname)
        return {
            pk: (key, tuple(values))
            for *values, pk, key in values_of(mirror, rows, names)
            # The source may have several rows with the same id, under different shard keys. Only
            # the row with the wanted shard key is returned.
            if texts.get(pk) in (None, text_of(source.key, key))
        }


def aliases_of(mirror: Mirror, keys: Iterable[Any]) -> dict[Any, str]:
    """Return the alias of the mirror's shard for each shard key. Keys without a shard are left out."""
    group, field = mirror.options.group, mirror.options.key
    assert field is not None
    prepared = {key: field.get_prep_value(key) for key in keys}
    numbers = runtime.strategy(group).locate_many(dict.fromkeys(prepared.values()))
    return {
        key: runtime.shard(group, number).alias
        for key, value in prepared.items()
        if (number := numbers[value]) is not None
    }


def rows_of_id(mirror: Mirror, pk: Any, source_keys: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values of the source's rows with the id ``pk``, by the text of their shard key.

    Only rows that belong in the mirror are returned. There are several if rows with different shard
    keys have the id. One query per shard.

    :param source_keys: the shard keys of the source under which the id may exist.
    """
    field = mirror.source.key
    with unbound():
        rows = wanted_rows(mirror).filter(**{f"{field.attname}__in": list(source_keys), "pk": pk})
        found = values_of(mirror, rows, (*mirror.names, field.attname))
        return {text_of(field, key): tuple(values) for *values, key in found}
