"""After an import, make ticket servers hand out only ids that are greater than all imported ids.

A ticket server hands out the ids of new rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.fields import TicketField
from sharded_orm.operations import tickets
from sharded_orm.operations.imports.source_tables import SourceTable


def advance_tickets(tables: Sequence[SourceTable]) -> tuple[list[str], list[str]]:
    """Make the ticket servers give only ids that are greater than all ids of rows in ``tables``.

    Otherwise a new row could get the id of an imported row. Return two lists: sentences about what
    was done, and sentences about problems.
    """
    fields = (column.field for table in tables for column in table.columns)
    names = sorted({f.sequence_name for f in fields if isinstance(f, TicketField)})
    if not names:
        return [], []
    remedy = f"Then run 'manage.py tickets advance {' '.join(names)}', before new rows are stored"
    try:
        behind = [result.name for result in tickets.verify(names) if result.problem]
        moved = tickets.advance(sorted(set(behind))) if behind else []
    except (ShardedOrmError, ValueError) as exc:
        return [], [f"the ticket servers were not moved past the imported ids: {exc} {remedy}"]
    problems = [f"{result.problem} {remedy}" for result in moved if result.problem]
    notes = [
        f"sequence {result.name!r} on {result.alias!r} was moved to {result.after}"
        for result in moved
        if not result.problem and result.after != result.before
    ]
    return notes, problems
