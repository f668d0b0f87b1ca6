"""Remove from shards what moves of keys have left there.

A *fence*, triggers that refuse writes of a moved key, stays on the old shard at first: a session
that was open during the move may still write there. Old rows are kept for some time. A process that
is killed, paused or blocked by a lock may also leave copies, fences and triggers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from django.db import Error
from django.db.models import QuerySet
from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.operations.moves import record
from sharded_orm.operations.moves.key_mover import TRIGGER_PATIENCE
from sharded_orm.operations.moves.record import MoveRecord
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs.journal import one_line

#: A fence must stay on the old shard while a session that was open during the move may still write
#: to the moved key there. If the database cannot list its open sessions, the fence stays for this
#: time instead.
FENCE_KEPT: Final = timedelta(days=1)
_LOOK_UPS = 500


@dataclass
class CleanupReport:
    """The outcome of :func:`remove_leftovers`: which remains of moves were removed, and which were
    not.

    :param fences: number of fences (triggers that refuse writes of a moved key) that were removed.
    :param copies: number of keys whose old rows were deleted.
    :param notes: sentences about leftovers that could not be removed.
    """

    fences: int = 0
    copies: int = 0
    notes: list[str] = field(default_factory=list)


def remove_leftovers(group: str, shards: Iterable[int], *, kill: bool = False) -> CleanupReport:
    """Remove fences that are not needed any more, and old rows that were kept for long enough.

    A fence makes an old shard refuse writes to a moved key, as long as a session that was open
    during the move may write there. An interrupted move may have left copies of rows, fences and
    triggers on ``shards``. If the move has ended since the interruption, these are removed, but the
    triggers only if no fence needs them. Can be repeated. If something cannot be removed, the
    report has a note. No error is raised, because leftovers do not disturb the application.

    :param shards: the numbers of shards on which moves have worked.
    :param kill: whether to end sessions of paused processes that hold a lock there.

    Costs some statements for each move that has something left, and for each of ``shards``.
    """
    report = CleanupReport()
    left = 0
    unreachable: dict[str, str] = {}
    with ShardSessions(group) as sessions:
        rows = record.rows().filter(group=group, phase=record.SETTLED, finished_at=None)
        for on_node in _by_node(group, rows.values_list("source", flat=True).distinct()):
            left += _clean_node(
                group, rows.filter(source__in=on_node), sessions, report, unreachable
            )
        for shard in sorted(shards):
            alias = runtime.shard(group, shard).alias
            if alias in unreachable:
                continue
            try:
                if kill and sessions.capture(shard).end_sessions():
                    report.notes.append(f"a paused session on shard {shard} was ended")
                _sweep(shard, sessions, report)
            except Error as exc:
                unreachable[alias] = one_line(exc)
            sessions.close()
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


def _by_node(group: str, shards: Iterable[int]) -> list[list[int]]:
    nodes: dict[str, list[int]] = {}
    for number in sorted(shards):
        nodes.setdefault(runtime.shard(group, number).node, []).append(number)
    return list(nodes.values())


def _clean_node(
    group: str,
    rows: QuerySet[KeyMove],
    sessions: ShardSessions,
    report: CleanupReport,
    unreachable: dict[str, str],
) -> int:
    """Remove old rows and fences from one node. Return how many fences have to stay.

    Old rows are removed if they were kept for long enough. A fence is removed unless
    :func:`_needed_fences` returns its move.

    :param rows: the records of the moves from shards of the node.
    """
    needed: set[int] | None = None
    for shard, of_shard in groupby(rows.order_by("source", "pk"), key=attrgetter("source")):
        try:
            if needed is None:
                needed = _needed_fences([row for row in rows if row.position["fenced"]], sessions)
            for row in of_shard:
                _clean(row, row.pk in needed, sessions, report)
        except Error as exc:
            unreachable[runtime.shard(group, shard).alias] = one_line(exc)
        # Close the sessions on this shard before the next shard's turn. Otherwise sessions on all
        # shards would be open in the end.
        sessions.close()
    return len(needed or ())


def _clean(row: KeyMove, needs_fence: bool, sessions: ShardSessions, report: CleanupReport) -> None:
    position = dict(row.position)
    if position["kept_until"] and datetime.fromisoformat(position["kept_until"]) <= timezone.now():
        sessions.copy(row.source).discard_everywhere(row.pk)
        position["kept_until"] = None
        report.copies += 1
    capture = sessions.capture(row.source) if position["fenced"] and not needs_fence else None
    if capture is not None:
        capture.prepare()
        capture.unwatch(row.pk)
        position |= {"fenced": False, "sessions": None}
        report.fences += 1
    if position != row.position:
        has_ended = not position["kept_until"] and not position["fenced"]
        record.rows().filter(pk=row.pk).update(
            position=position, finished_at=timezone.now() if has_ended else None
        )
    if capture is not None:
        capture.uninstall(TRIGGER_PATIENCE)


def _needed_fences(rows: Sequence[KeyMove], sessions: ShardSessions) -> set[int]:
    """Return the numbers of the moves whose fences must stay.

    A fence must stay as long as a session that was open during the move may write to the old shard.

    :param rows: the records of moves whose old shards are on one node.
    """
    needed, unknown = set(), dict[int, Any]()
    for row in rows:
        if row.position["sessions"] is not None:
            unknown[row.pk] = row.position["sessions"]
        elif row.switched_at is None or row.switched_at + FENCE_KEPT > timezone.now():
            needed.add(row.pk)
    if unknown:
        # Look for the sessions of all these moves in one call, because a call may take almost a
        # second.
        counts = sessions.capture(rows[0].source).sessions_left(list(unknown.values()))
        needed |= {number for number, count in zip(unknown, counts, strict=True) if count}
    return needed


def _sweep(shard: int, sessions: ShardSessions, report: CleanupReport) -> None:
    """Remove copies and fences that ended moves have left on ``shard``.

    A fence makes triggers on the shard refuse writes to a moved key. A copy or a fence stays if the
    record of its move says that it is still needed. If no fence is left, the triggers are removed.
    """
    copy, capture = sessions.copy(shard), sessions.capture(shard)
    # First read the shard, and then the records of moves. A move is recorded before it leaves
    # anything on a shard. So there is a record for everything that was found, and the record of a
    # move that has just begun says that the move is unfinished.
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
