"""What is left of moves that have ended: fences of old sessions, rows that are kept, and what a process
could not remove because it was killed, paused or in the way of others.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from sharded_orm.operations.moves.record import MoveRecord
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs.journal import one_line

#: For how long a fence stays where the database does not tell which sessions are open.
FENCE_KEPT: Final = timedelta(days=1)
_LOOK_UPS = 500


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


def remove_leftovers(group: str, shards: Iterable[int]) -> CleanupReport:
    """Remove fences that no old session needs, and old rows that were kept for long enough.

    On ``shards`` also remove copies and fences of moves that have ended otherwise, and the triggers
    if no fence is there any more. Can be repeated. What cannot be removed becomes a note, because
    nothing of this stands in the way of the application.

    :param shards: the numbers of shards on which moves have worked.

    Costs some statements for each move that has something left, and for each of ``shards``.
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
        for shard in sorted(shards):
            alias = runtime.shard(group, shard).alias
            if alias in unreachable:
                continue
            try:
                _sweep(shard, sessions, report)
            except Error as exc:
                unreachable[alias] = one_line(exc)
            sessions.close()  # Do not hold a session on each shard.
    if left:
        report.notes.append(
            f"{left} fences of moved keys stay: sessions of before the switch are open, or the database"
            f" does not tell. 'manage.py keys repair {group}' removes them later"
        )
    report.notes += [
        f"{alias} was not cleaned, which changes nothing for its keys ({why.rstrip('.')}): 'manage.py"
        f" keys repair {group}' does so later"
        for alias, why in unreachable.items()
    ]
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


def _sweep(shard: int, sessions: ShardSessions, report: CleanupReport) -> None:
    """Remove what the records of moves do not account for, and triggers without a fence."""
    copy, capture = sessions.copy(shard), sessions.capture(shard)
    # Look at the shard first. So whatever belongs to a move that has just begun has a record, and
    # that record is in flight.
    copies = copy.copies()
    is_prepared = capture.is_prepared()
    fences = set(capture.fences()) if is_prepared else set()
    for row in _ended(copies | fences):
        is_source = row.phase == record.SETTLED and row.source == shard
        if row.pk in copies and not (is_source and row.position["kept_until"]):
            copy.discard_everywhere(row.pk)
            report.copies += 1
        if row.pk in fences and not (is_source and row.position["fenced"]):
            _remove_fence(row, shard, sessions)
            report.fences += 1
    if is_prepared and not capture.fences():
        capture.uninstall(TRIGGER_PATIENCE)


def _ended(numbers: Iterable[int]) -> Iterable[KeyMove]:
    for batch in batched(sorted(numbers), _LOOK_UPS):
        yield from record.rows().filter(pk__in=batch, in_flight=None)


def _remove_fence(row: KeyMove, shard: int, sessions: ShardSessions) -> None:
    capture = sessions.capture(shard)
    capture.prepare()
    former = None
    if row.phase == record.ABORTED and row.target == shard:
        former = MoveRecord(row, None).former_fence()
    if former is None:
        capture.unwatch(row.pk)
    else:
        sessions.copy(shard).withdraw((), row.pk, None, former)
