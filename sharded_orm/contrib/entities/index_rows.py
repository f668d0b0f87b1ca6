"""Reads and writes rows of indexes.

A row has values of properties, the id of the entity, and a version number. Only the version number
ever changes: when a new version of the entity needs the row, the row gets the number of this
version.

The number protects a row from a process that has read an older version of the entity. For example,
a cleaner has read version 3, which does not need the row. So it removes the row only if the row's
number is 3 or lower. If version 4 needs the row, the row has the number 4, and stays.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import IntegrityError, connections, router
from django.db.models import Q
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from sharded_orm import runtime, unbound
from sharded_orm.backends.write_hooks import compiled_update
from sharded_orm.contrib.entities import late_rows
from sharded_orm.models.moves.repetition import repeated
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.options import required_options
from sharded_orm.operations.relations import batched

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index

logger = logging.getLogger("sharded_orm.entities")

#: Cleaners skip entities that were stored less than this number of seconds ago, because the writer
#: is probably still writing the index rows.
FOLLOW_TIME = 0.2
#: The largest number of rows that one statement changes or removes.
ROWS = 100


@dataclass(frozen=True)
class IndexRow:
    """A row of an index: it says that an entity has certain values.

    :param values: the values of the index's properties, in their order.
    :param key: the shard key of the entity.
    :param version: the version of the entity at the last write of this row.
    """

    values: tuple[Any, ...]
    entity_id: UUID
    key: Any
    version: int


def follow(rows: Sequence[tuple[Index, IndexRow]], marked_at: float) -> None:
    """Write the index rows of an entity after its transaction was committed.

    If a row cannot be written, no error is raised: the entity is marked, so a cleaner writes the
    row later. It may also happen that the entity was not stored after all, because the program has
    rolled back to a savepoint. Then the rows are stale, which does no harm: reads skip them, and a
    cleaner removes them.

    :param rows: pairs (index, row of the entity in this index), at least one.
    :param marked_at: the time when the entity was marked, by ``time.monotonic()``. If this is more
        than :data:`FOLLOW_TIME` seconds ago, a cleaner may have removed the mark already. So the
        entity is marked again, in case these late rows are stale.
    """
    for index, row in rows:
        try:
            insert(index, row)
        # The error is logged and not raised, because the entity is committed.
        except Exception as exc:
            logger.warning(
                "the row of entity %s in index %s is left to the cleaner: %s",
                row.entity_id,
                index.label,
                exc,
                exc_info=True,
            )
    if time.monotonic() - marked_at > FOLLOW_TIME:
        try:
            late_rows.mark(rows)
        except Exception as exc:  # as above
            logger.warning(
                "stale index rows of entity %s may stay for long: %s",
                rows[0][1].entity_id,
                exc,
                exc_info=True,
            )


def insert(index: Index, row: IndexRow) -> None:
    """Insert ``row``. If it is stored already with a lower version, raise the stored version.

    Costs one or two statements.
    """
    with unbound():
        # An earlier version of the entity may have had the same row, and the row may still be
        # stored. Then raise the row's version, because a cleaner removes rows of earlier versions.
        if row.version > 1 and raise_version(index, row):
            return
        try:
            instance_of(index, row).save(force_insert=True)
        except IntegrityError:
            # Another process has inserted the row just now, so only its version has to be raised.
            raise_version(index, row)


def insert_missing(index: Index, rows: Sequence[IndexRow]) -> None:
    """Insert those of ``rows`` that their shards lack. Costs one statement for each shard.

    :raises django.db.Error: a shard does not answer. Some rows may be inserted.
    :raises Exception: the error for which a key has no shard, see :func:`aliases_of`. Nothing is
        inserted then.
    """
    # repeated() calls _insert_missing() again if a shard key has moved to another shard in the
    # meantime. The second call does not change rows that the first one has inserted.
    repeated(index.group, partial(_insert_missing, index, rows))


def _insert_missing(index: Index, rows: Sequence[IndexRow]) -> None:
    model, at = index.model, index.names.index(index.shard_on)
    rows_by_key: dict[Any, list[IndexRow]] = defaultdict(list)
    for row in rows:
        rows_by_key[row.values[at]].append(row)
    aliases, unplaced = aliases_of(index, rows_by_key)
    for exc in unplaced.values():
        raise exc
    rows_by_alias: dict[str, list[IndexRow]] = defaultdict(list)
    for key, of_key in rows_by_key.items():
        rows_by_alias[aliases[key]] += of_key
    fields = model._meta.concrete_fields
    for alias, of_shard in rows_by_alias.items():
        with unbound():
            if compiled_update.is_observed(connections[alias], model):
                objects = [instance_of(index, row) for row in of_shard]
                model._default_manager.bulk_create(objects, ignore_conflicts=True)
                continue
            # Use plain objects and not instances of the model: Django's compiler only reads the
            # values, and making the instances would take most of the time.
            values = [SimpleNamespace(**columns_of(index, row)) for row in of_shard]
            size = connections[alias].ops.bulk_batch_size(fields, values)
            for batch in batched(values, size):
                query: Any = InsertQuery(model, on_conflict=OnConflict.IGNORE)
                query.insert_values(fields, batch, raw=True)
                query.get_compiler(using=alias).execute_sql(())


def raise_version(index: Index, row: IndexRow) -> bool:
    """Set the version of the stored row to ``row.version``, if it is lower.

    Return whether a stored row with a lower version was found.
    """
    same = same_rows(index, row.values, row.entity_id)
    return bool(same.filter(version__lt=row.version).update(version=row.version))


def remove(index: Index, values: tuple[Any, ...], entity_id: UUID, *, up_to: int) -> int:
    """Remove the row unless its version is higher than ``up_to``. Return the number of removed rows."""
    with unbound():
        rows = same_rows(index, values, entity_id).filter(version__lte=up_to)
        return int(rows.delete()[0])


def remove_rows(index: Index, rows: Iterable[IndexRow]) -> int:
    """Remove ``rows``, except those whose version has grown since they were read. Return the number
    of removed rows.

    Costs one statement for 100 rows.

    :param rows: all of them must be on one shard.
    """
    removed = 0
    for batch in batched(rows, ROWS):
        with unbound():
            removed += _any_of(index, batch, has_version=True).delete()[0]
    return removed


def raise_versions(index: Index, rows: Sequence[IndexRow]) -> bool:
    """Give each stored row the version that it has in ``rows``, if the stored version is lower.

    Return True if all of ``rows`` were stored with a lower version. Return False if at least one of
    them is not stored, or is stored with the same or a higher version.

    Costs one statement for 100 rows of the same version.

    :param rows: all of them must be on one shard.
    """
    raised = 0
    rows_by_version: dict[int, list[IndexRow]] = defaultdict(list)
    for row in rows:
        rows_by_version[row.version].append(row)
    for version, same in rows_by_version.items():
        for batch in batched(same, ROWS):
            with unbound():
                lower = _any_of(index, batch).filter(version__lt=version)
                raised += lower.update(version=version)
    return raised == len(rows)


def _any_of(index: Index, rows: Iterable[IndexRow], *, has_version: bool = False) -> Any:
    """Return a queryset of the stored rows that equal one of ``rows``.

    :param has_version: if True, a stored row with a higher version than in ``rows`` is left out.
    """
    condition = Q()
    for row in rows:
        columns: dict[str, Any] = dict(zip(index.names, row.values, strict=True))
        if has_version:
            columns["version__lte"] = row.version
        condition |= Q(**columns, entity_id=row.entity_id)
    return index.model._default_manager.filter(condition)


def same_rows(index: Index, values: tuple[Any, ...], entity_id: UUID | None = None) -> Any:
    """Return a queryset of the index's rows with ``values``.

    :param entity_id: the id of the only entity whose row is wanted; None (the default) for all
        entities.
    """
    condition: dict[str, Any] = dict(zip(index.names, values, strict=True))
    if entity_id is not None:
        condition["entity_id"] = entity_id
    return index.model._default_manager.filter(**condition)


def instance_of(index: Index, row: IndexRow) -> Any:
    return index.model(**columns_of(index, row))


def columns_of(index: Index, row: IndexRow) -> dict[str, Any]:
    columns = dict(zip(index.names, row.values, strict=True))
    if index.store.shard_on is not None:
        columns[index.store.shard_on] = row.key
    columns.update(entity_id=row.entity_id, version=row.version)
    return columns


def alias_of(index: Index, value: Any) -> str:
    """Return the alias of the shard that holds the index rows with this shard key.

    If the key has no shard yet, it is assigned to one, as when a row is written.

    :param value: a value of ``index.shard_on``, the property by which the index is sharded.
    """
    return router.db_for_write(index.model, instance=index.model(**{index.shard_on: value}))


def aliases_of(index: Index, keys: Collection[Any]) -> tuple[dict[Any, str], dict[Any, Exception]]:
    """Find the shards of several shard keys of an index.

    If a key has no shard yet, it is assigned to one, as when a row is written.

    :returns: two dicts. The first one maps each key to the alias of its shard. The second one maps
        each key for which no shard was found to the error.
    """
    options, field = required_options(index.model), index.store.fields[index.shard_on]
    try:
        prepared = {key: field.get_prep_value(key) for key in keys}
        numbers = row_placement.place_keys(options, dict.fromkeys(prepared.values()))
    except Exception as exc:  # One of the keys is the cause: try each key alone.
        if len(keys) < 2:
            return {}, dict.fromkeys(keys, exc)
        aliases: dict[Any, str] = {}
        unplaced: dict[Any, Exception] = {}
        for key in keys:
            alias, refused = aliases_of(index, [key])
            aliases |= alias
            unplaced |= refused
        return aliases, unplaced
    group = runtime.group(options.group)
    placed = {number: runtime.shard_in(group, number).alias for number in {*numbers.values()}}
    return {key: placed[numbers[value]] for key, value in prepared.items()}, {}


def rows_on(
    index: Index, alias: str, keys: Collection[Any], entity_ids: Sequence[UUID]
) -> list[IndexRow]:
    """Return the index rows of these entities on one shard. One query.

    :param keys: only rows with one of these shard keys are returned.
    """
    manager: Any = index.model._default_manager
    at = index.names.index(index.shard_on)
    with unbound():
        rows = rows_from(index, manager.using(alias).filter(entity_id__in=entity_ids).order_by())
    # Query by ids only, and filter by keys in Python: with both conditions, MariaDB would consider
    # every pair of a key and an id.
    return [row for row in rows if row.values[at] in keys]


def rows_from(index: Index, rows: Any) -> list[IndexRow]:
    """Return the rows that the queryset ``rows`` selects, as :class:`IndexRow` objects. One query."""
    names = (*index.names, "version", "entity_id")
    if index.store.shard_on is None:
        # The entity's id is its shard key. Select the column only once, because converting the
        # values takes long.
        return [IndexRow(row[:-2], row[-1], row[-1], row[-2]) for row in rows.values_list(*names)]
    names = (*names, index.store.shard_on)
    return [IndexRow(row[:-3], row[-2], row[-1], row[-3]) for row in rows.values_list(*names)]


def remove_all(index: Index, alias: str, rows: Sequence[IndexRow]) -> int:
    """Remove all index rows of the entities in ``rows`` from a shard, whatever versions the rows
    have. Used when an index is dropped.

    Costs one statement.
    """
    manager: Any = index.model._default_manager
    with unbound():
        same = manager.using(alias).filter(entity_id__in={row.entity_id for row in rows})
        return int(same.delete()[0])
