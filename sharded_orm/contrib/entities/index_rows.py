"""Writes rows of indexes.

A row is never changed but for its version, that of the entity which has written it last. Whoever
removes a row says how high its version may be. So a writer that is late removes no row that a later
version of the entity needs, in whatever order their statements arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import Error

from sharded_orm.exceptions import ShardedOrmError

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.pending_rows import PendingRows

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


def follow(
    indexes: Iterable[Index],
    entity_id: UUID,
    version: int,
    stored: Mapping[str, Any],
    pending: PendingRows,
) -> None:
    """Write the rows of an entity that was stored, and remove those of its former versions.

    What cannot be written is left to the cleaner: the entity is marked.
    """
    for index in indexes:
        values = index.values_of(stored)
        key = entity_id if index.store.shard_on is None else stored[index.store.shard_on]
        try:
            if values is not None:
                insert(index, [IndexRow(values, entity_id, key, version)])
            for former in pending.of(index) - {values}:
                remove(index, former, entity_id, below=version)
        except (Error, ShardedOrmError) as exc:
            logger.warning(
                "the row of entity %s in index %s is left to the cleaner: %s",
                entity_id,
                index.label,
                exc,
            )


def insert(index: Index, rows: Sequence[IndexRow]) -> None:
    """Insert ``rows``, or raise the versions of those that are there. Not atomic over several shards.

    Costs a statement per shard, and one for each row whose version is not 1.
    """
    index.model._default_manager.bulk_create(
        [_instance(index, row) for row in rows], ignore_conflicts=True
    )
    for row in rows:
        if row.version > 1:
            # If there was such a row already, a writer that is late may be about to remove it.
            _same(index, row.values, row.entity_id).filter(version__lt=row.version).update(
                version=row.version
            )


def remove(index: Index, values: tuple[Any, ...], entity_id: UUID, *, below: int) -> None:
    """Remove the row unless its version is ``below`` or higher. One statement."""
    _same(index, values, entity_id).filter(version__lt=below).delete()


def _same(index: Index, values: tuple[Any, ...], entity_id: UUID) -> Any:
    condition = dict(zip(index.names, values, strict=True))
    return index.model._default_manager.filter(**condition, entity_id=entity_id)


def _instance(index: Index, row: IndexRow) -> Any:
    store = index.store
    columns = dict(zip(index.names, row.values, strict=True))
    if store.shard_on is not None:
        columns[store.shard_on] = row.key
    return index.model(**columns, entity_id=row.entity_id, version=row.version)
