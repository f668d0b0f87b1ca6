"""Reads rows of a mirror and of its source, and finds the shards of their keys."""

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

#: The null of JSON. In instances it is None, like the NULL of SQL, so comparisons use this value.
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
    # Compare JSON values as texts. In Python, True, 1 and 1.0 are equal, but in JSON they are three
    # different values.
    return all(
        row[position] is other[position]
        or _text_of_json(row[position]) == _text_of_json(other[position])
        for position in json_positions
    )


def _text_of_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def wanted_rows(mirror: Mirror) -> Any:
    """Return a queryset of the source's rows that the mirror copies."""
    rows: Any = ShardedQuerySet(mirror.source.model).uncached().order_by()
    rows = rows.exclude(**{f"{mirror.key.attname}__isnull": True})
    return rows if mirror.condition is None else rows.filter(mirror.condition)


def source_rows(mirror: Mirror, source_keys: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return a dict that maps primary keys to pairs (shard key of the source, values). It lacks
    rows that the mirror does not copy.

    :param source_keys: maps primary keys to shard keys of the source. If one of the shard keys is
        None, all shards of the source are queried.
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
    """Return a dict that maps shard keys of the mirror to aliases of shards.

    Keys that have no shard yet are left out.
    """
    group, field = mirror.options.group, mirror.options.key
    assert field is not None
    prepared = {key: field.get_prep_value(key) for key in keys}
    numbers = runtime.strategy(group).locate_many(dict.fromkeys(prepared.values()))
    return {
        key: runtime.shard(group, number).alias
        for key, value in prepared.items()
        if (number := numbers[value]) is not None
    }


def pks_at(mirror: Mirror, alias: str, pks: Iterable[Any]) -> set[Any]:
    """Return those of ``pks`` whose rows the mirror must have on the shard ``alias``.

    Costs one query per shard of the source.
    """
    with unbound():
        rows = wanted_rows(mirror).filter(pk__in=list(pks)).scatter()
        found = list(rows.values_list(mirror.source.pk.attname, mirror.key.attname))
    homes = aliases_of(mirror, {key for _, key in found})
    return {pk for pk, key in found if homes.get(key) == alias}


def rows_of_id(mirror: Mirror, pk: Any, source_keys: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the rows of the source with the id ``pk``, as a dict from shard keys (as text) to
    values.

    There are several if the same id exists under different shard keys. Rows that the mirror does
    not copy are left out. Costs one query per shard.

    :param source_keys: the shard keys of the source to look under.
    """
    field = mirror.source.key
    with unbound():
        rows = wanted_rows(mirror).filter(**{f"{field.attname}__in": list(source_keys), "pk": pk})
        found = values_of(mirror, rows, (*mirror.names, field.attname))
        return {text_of(field, key): tuple(values) for *values, key in found}
