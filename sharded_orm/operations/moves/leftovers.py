"""What is left of moves that have ended: fences of old sessions, and the rows that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import Error
from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.operations.moves import record
from sharded_orm.operations.moves.key_mover import TRIGGER_PATIENCE
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.runs.journal import one_line

#: For how long a fence stays where the database does not tell which sessions are open.
FENCE_KEPT: Final = timedelta(days=1)


@dataclass
class CleanupReport:
    """What was removed, and what has to stay.

    :param fences: number of fences that were removed.
    :param copies: number of keys whose old rows were deleted.
    :param notes: sentences about what is left.
    """

    fences: int = 0
    copies: int = 0
    notes: list[str] = field(default_factory=list)


def remove_leftovers(group: str) -> CleanupReport:
    """Remove fences that no old session needs, and old rows that were kept for long enough.

    Can be repeated. Costs some statements for each move that has something left.
    """
    report = CleanupReport()
    left = 0
    unreachable: dict[str, str] = {}
    with ShardSessions(group) as sessions:
        rows = record.rows().filter(group=group, phase=record.SETTLED, finished_at=None)
        for row in rows.order_by("pk").iterator():
            alias = runtime.shard(group, row.source).alias
            if alias in unreachable:
                continue
            try:
                left += _clean(row, sessions, report)
            except Error as exc:
                unreachable[alias] = one_line(exc)
                sessions.close()
    if left:
        report.notes.append(
            f"{left} fences of moved keys stay: sessions of before the switch are open, or the database"
            f" does not tell. 'manage.py keys repair {group}' removes them later"
        )
    report.notes += [f"{alias} was not cleaned: {why}" for alias, why in unreachable.items()]
    return report


def _clean(row: KeyMove, sessions: ShardSessions, report: CleanupReport) -> bool:
    """Return whether the fence of the move has to stay."""
    position = dict(row.position)
    if position["kept_until"] and datetime.fromisoformat(position["kept_until"]) <= timezone.now():
        sessions.copy(row.source).discard_everywhere(row.pk)
        position["kept_until"] = None
        report.copies += 1
    if position["fenced"]:
        capture = sessions.capture(row.source)
        if not _needs_fence(row, capture):
            capture.prepare()
            capture.unwatch(row.pk)
            capture.uninstall(TRIGGER_PATIENCE)
            position |= {"fenced": False, "sessions": None}
            report.fences += 1
    if position != row.position:
        has_ended = not position["kept_until"] and not position["fenced"]
        record.rows().filter(pk=row.pk).update(
            position=position, finished_at=timezone.now() if has_ended else None
        )
    return bool(position["fenced"])


def _needs_fence(row: KeyMove, capture: ChangeCapture) -> bool:
    """Whether a session may still send a write that relies on the shard before the switch."""
    marker: Any = row.position["sessions"]
    if marker is not None:
        return bool(capture.sessions_left(marker))
    assert row.switched_at is not None
    return row.switched_at + FENCE_KEPT > timezone.now()
