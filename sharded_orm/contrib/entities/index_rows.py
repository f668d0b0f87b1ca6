"""Reads and writes rows of indexes.

A row is never changed but for its version, that of the entity which has written it last. Whoever
removes a row says how high its version may be. So a cleaner that is late removes no row that a later
version of the entity needs, in whatever order the statements arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import IntegrityError, router

from sharded_orm import runtime, unbound
from sharded_orm.models.sharding.options import required_options

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index

logger = logging.getLogger("sharded_orm.entities")


@dataclass(frozen=True)
class IndexRow:
    """A row of an index.

    :param values: the values of the index's properties.
    :param key: the shard key of the entity.
    """

    values: tuple[Any, ...]
    entity_id: UUID
    key: Any
    version: int


def follow(rows: Iterable[tuple[Index, IndexRow]]) -> None:
    """Write the rows of an entity that was committed.

    What cannot be written is left to the cleaner: the entity is marked. It may be that the transaction was
    not committed after all, as when a savepoint that was made by hand was rolled back. Then the rows
    are stale, which does no harm. So rows are removed only by the cleaner, which reads the entity first.
    """
    for index, row in rows:
        try:
            insert(index, row)
        except Exception as exc:  # The entity is committed, whatever is wrong with its row.
            logger.warning(
                "the row of entity %s in index %s is left to the cleaner: %s",
                row.entity_id,
                index.label,
                exc,
                exc_info=True,
            )


def insert(index: Index, row: IndexRow) -> None:
    """Insert ``row``, or raise its version if it is there. One or two statements."""
    with unbound():
        # If there is such a row, a cleaner that is late may be about to remove it.
        if row.version > 1 and raise_version(index, row):
            return
        try:
            instance_of(index, row).save(force_insert=True)
        except IntegrityError:
            # Another process has inserted it just now.
            raise_version(index, row)


def raise_version(index: Index, row: IndexRow) -> bool:
    """Raise the version of ``row`` to that of its entity. Return whether it was lower."""
    same = same_rows(index, row.values, row.entity_id)
    return bool(same.filter(version__lt=row.version).update(version=row.version))


def remove(index: Index, values: tuple[Any, ...], entity_id: UUID, *, up_to: int) -> int:
    """Remove the row unless its version is higher than ``up_to``. Return the number of removed rows."""
    with unbound():
        rows = same_rows(index, values, entity_id).filter(version__lte=up_to)
        return int(rows.delete()[0])


def same_rows(index: Index, values: tuple[Any, ...], entity_id: UUID | None = None) -> Any:
    """Return a query of the rows with these values, or of the one of an entity."""
    condition: dict[str, Any] = dict(zip(index.names, values, strict=True))
    if entity_id is not None:
        condition["entity_id"] = entity_id
    return index.model._default_manager.filter(**condition)


def instance_of(index: Index, row: IndexRow) -> Any:
    store = index.store
    columns = dict(zip(index.names, row.values, strict=True))
    if store.shard_on is not None:
        columns[store.shard_on] = row.key
    return index.model(**columns, entity_id=row.entity_id, version=row.version)


def alias_of(index: Index, value: Any) -> str:
    """Return the alias of the shard whose rows have ``value`` in the property ``shard_on``.

    Like a write, it gives a value that has no shard one.
    """
    return router.db_for_write(index.model, instance=index.model(**{index.shard_on: value}))


def aliases_of(index: Index, keys: Collection[Any]) -> tuple[dict[Any, str], dict[Any, Exception]]:
    """Return the aliases of the shards of ``keys``, and why some have none.

    Like a write, it gives a key that has no shard one.
    """
    options, field = required_options(index.model), index.store.fields[index.shard_on]
    try:
        prepared = {key: field.get_prep_value(key) for key in keys}
        numbers = options.place_keys(dict.fromkeys(prepared.values()))
    except Exception as exc:  # Of one of them: find out of which.
        if len(keys) < 2:
            return {}, dict.fromkeys(keys, exc)
        aliases: dict[Any, str] = {}
        unplaced: dict[Any, Exception] = {}
        for key in keys:
            placed, refused = aliases_of(index, [key])
            aliases |= placed
            unplaced |= refused
        return aliases, unplaced
    group = runtime.group(options.group)
    return {
        key: runtime.shard_in(group, numbers[value]).alias for key, value in prepared.items()
    }, {}


def rows_on(
    index: Index, alias: str, keys: Sequence[Any], entity_ids: Sequence[UUID]
) -> list[IndexRow]:
    """Return the rows of entities under ``keys`` on a shard. One query."""
    manager: Any = index.model._default_manager
    condition = {f"{index.shard_on}__in": keys, "entity_id__in": entity_ids}
    with unbound():
        return rows_from(index, manager.using(alias).filter(**condition).order_by())


def rows_from(index: Index, rows: Any) -> list[IndexRow]:
    """Return the rows of a query of ``index``. One query."""
    names = (*index.names, "entity_id", index.store.key_name_in_indexes, "version")
    return [IndexRow(row[:-3], *row[-3:]) for row in rows.values_list(*names)]


def remove_all(index: Index, alias: str, rows: Sequence[IndexRow]) -> int:
    """Remove ``rows``, which are on one shard, whatever their versions are. One statement."""
    manager: Any = index.model._default_manager
    with unbound():
        same = manager.using(alias).filter(
            **{
                f"{index.shard_on}__in": {
                    row.values[index.names.index(index.shard_on)] for row in rows
                },
                "entity_id__in": {row.entity_id for row in rows},
            }
        )
        return int(same.delete()[0])
