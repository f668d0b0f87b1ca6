"""Index rows that a writer has written late, for example because its process was paused.

A writer stores and marks an entity, and then writes its index rows. If it is late, another writer
may have changed the entity in the meantime, and a cleaner may have repaired the index rows and
removed the mark. The late rows are then stale, and no cleaner would look for them. So the late
writer marks the entity again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from sharded_orm import unbound
from sharded_orm.contrib.entities.pending_rows import with_rows

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.index_rows import IndexRow


def mark(rows: Sequence[tuple[Index, IndexRow]]) -> None:
    """Mark an entity again, so that a cleaner removes those of ``rows`` that are stale.

    If the entity was deleted and a cleaner has removed its row, there is nothing to mark. The stale
    index rows then stay until the cleaner compares all index rows with their entities. Costs one
    statement.

    :param rows: pairs (index, row of the entity in this index), at least one.
    """
    index, row = rows[0]
    condition = {"id": row.entity_id, index.store.key_name: row.key}
    pending = with_rows([(index, row.values) for index, row in rows], is_late=True)
    with unbound():
        entity: Any = index.store.model._default_manager.filter(**condition)
        entity.update(marked_at=timezone.now(), pending=pending)
