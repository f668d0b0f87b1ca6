"""Index rows that were written late: others may have changed the entity, and a cleaner repaired its rows.

Then these rows are stale, and no mark shows it. So the entity is marked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from sharded_orm import unbound
from sharded_orm.contrib.entities.pending_rows import PendingRows

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.index_rows import IndexRow

#: The number of attempts to mark an entity that others change all the time. They mark it, too.
ATTEMPTS = 5


def mark(rows: Sequence[tuple[Index, IndexRow]]) -> None:
    """Mark an entity, so that the cleaner removes those of ``rows`` that are stale.

    If the entity was deleted and its row is gone, only the pass over all index rows finds them. Costs
    two statements, and two more each time others change the entity meanwhile.

    :param rows: pairs of an index and a row of the entity in it, at least one.
    """
    index, row = rows[0]
    condition = {"id": row.entity_id, index.store.key_name: row.key}
    with unbound():
        entity: Any = index.store.model._default_manager.filter(**condition)
        for _ in range(ATTEMPTS):
            state = entity.values_list("version", "marked_at", "pending").first()
            if state is None:
                return
            version, marked_at, text = state
            pending = PendingRows(text)
            for index, row in rows:
                pending.add(index, row.values)
            # Whoever changes the column ``pending`` also changes one of the other two columns.
            same = entity.filter(version=version, marked_at=marked_at)
            if same.update(marked_at=timezone.now(), pending=pending.text):
                return
