"""Index rows that a writer has written late.

In the meantime, others may have changed the entity, and a cleaner may have repaired its rows. Then
the late rows are stale, but the entity is not marked for the cleaner any more. So the entity is
marked again.
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
    """Mark an entity, so that the cleaner removes those of ``rows`` that are stale. Costs one
    statement.

    If the row of a deleted entity is gone, nothing is marked. Only the cleaner's pass over all
    index rows then finds the stale rows.

    :param rows: pairs of an index and a row of the entity in it, at least one.
    """
    index, row = rows[0]
    condition = {"id": row.entity_id, index.store.key_name: row.key}
    pending = with_rows([(index, row.values) for index, row in rows], is_late=True)
    with unbound():
        entity: Any = index.store.model._default_manager.filter(**condition)
        entity.update(marked_at=timezone.now(), pending=pending)
