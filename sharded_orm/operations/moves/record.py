"""The record of a key's move: a row of the table of key moves.

The record has the phase of the move, which only ever goes forward. A process changes the phase only
if the record still has the phase that the process knows. Suppose that a process is paused, and
another process ends its move meanwhile. Then the paused process cannot continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.exceptions import MoveFailed, MoveRefused
from sharded_orm.models.tables.directory import Placement
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.operations.moves.request import KeyToMove, keys_text

ANNOUNCED: Final = "announced"
COPYING: Final = "copying"
SWITCHING: Final = "switching"
SWITCHED: Final = "switched"
SETTLED: Final = "settled"
ABORTED: Final = "aborted"
#: The phase of one special row among the records of moves. The row stands for no move and serves
#: only as a lock: a process locks it while it announces moves, so that others wait.
QUEUE: Final = "queue"
# The name of an entry in a record's JSON column ``position``. The value is the number of seconds
# for which old rows are kept.
_KEPT_FOR: Final = "kept_for"
#: The phases of a move in which the source, the old shard, still owns the key.
BEFORE_SWITCH: Final = (ANNOUNCED, COPYING, SWITCHING)


def rows() -> QuerySet[KeyMove]:
    return KeyMove.objects.using(runtime.config().directory)


def in_flight(group: str) -> QuerySet[KeyMove]:
    """Return the records of the unfinished moves of ``group``, as a query set.

    An unfinished move is under way, or was broken off.
    """
    return rows().filter(group=group, in_flight=True).order_by("pk")


def shards_of(group: str) -> set[int]:
    """Return the numbers of all shards from or to which keys of ``group`` were ever moved. Two
    queries.
    """
    moves = rows().filter(group=group)
    return {
        number
        for column in ("source", "target")
        for number in moves.values_list(column, flat=True).distinct()
    }


def announce(group: str, keys: Sequence[KeyToMove], keep: timedelta) -> list[MoveRecord]:
    """Create the records of new moves, in the phase "announced". Four statements.

    Either all moves are announced, or none.

    :param keep: the time for which the old rows are kept. It is stored in the records, because
        another process may have to end the moves.
    :raises MoveRefused: an unfinished move of one of the keys exists already.
    """
    moves = [
        KeyMove(
            group=group,
            key=key.text,
            value=str(key.value),
            source=key.source,
            target=key.target,
            phase=ANNOUNCED,
            in_flight=True,
            position={_KEPT_FOR: keep.total_seconds()},
        )
        for key in keys
    ]
    alias = runtime.config().directory
    try:
        _create_queue_row()
        with transaction.atomic(using=alias):
            # This write locks the queue row. So processes announce moves one after the other, and
            # moves become visible in the order of their numbers. It must be the first statement: on
            # SQLite, a transaction waits for others only if it begins with a write.
            _queue_row().update(phase=QUEUE)
            rows().bulk_create(moves)
    except IntegrityError as exc:
        taken = in_flight(group).filter(key__in=[key.text for key in keys])
        names = list(taken.values_list("value", flat=True))
        raise MoveRefused(
            [f"another process moves {keys_text(names) or 'one of the keys'} at this time"]
        ) from exc
    numbers = dict(
        in_flight(group).filter(key__in=[key.text for key in keys]).values_list("key", "pk")
    )
    return [
        MoveRecord(_with_number(move, numbers[move.key]), key.value)
        for move, key in zip(moves, keys, strict=True)
    ]


def _queue_row() -> QuerySet[KeyMove]:
    """Return the one row that stands for no move and serves only as a lock.

    A process locks it while it announces moves, so that others wait.
    """
    return rows().filter(group="", key="", in_flight=False)


def _create_queue_row() -> None:
    if not _queue_row().exists():
        row = KeyMove(group="", key="", source=0, target=0, phase=QUEUE, in_flight=False)
        # Another process may create the row at the same time. Then the unique constraint lets only
        # one insert succeed, and the other is ignored.
        rows().bulk_create([row], ignore_conflicts=True)


def _with_number(move: KeyMove, number: int) -> KeyMove:
    # Set the primary key, because bulk_create() does not set it on every database.
    move.pk = number
    return move


def moves_in_flight(group: str) -> list[MoveRecord]:
    """Return the unfinished moves of ``group``. One query.

    The attribute ``value`` of each record is None, because the table stores the key as text only.
    The caller must set it to the value that the key's field sends to the database.
    """
    return [MoveRecord(row, None) for row in in_flight(group)]


class MoveRecord:
    """The record of one move of a key. To be used by one thread at a time.

    :param row: the row of the table of key moves.
    :param value: the key, as the value that its field sends to the database.
    """

    def __init__(self, row: KeyMove, value: Any) -> None:
        self.number: int = row.pk
        self.group = row.group
        self.key = row.key
        self.text = row.value
        self.value = value
        self.source = row.source
        self.target = row.target
        self.phase = row.phase
        self.position: dict[str, Any] = dict(row.position)

    def __str__(self) -> str:
        return f"move {self.number} of {self.text!r} from shard {self.source} to {self.target}"

    def enter(self, phase: str, **changes: Any) -> None:
        """Enter the next phase of the move, if the record still has the phase that this process
        knows.

        :param changes: new values of other columns of the record.
        :raises MoveFailed: another process has ended or aborted the move.
        """
        if not self._row().update(phase=phase, **changes):
            raise self._lost()
        self.phase = phase

    def check(self) -> None:
        """Check that the record still has the phase that this process knows. One query.

        :raises MoveFailed: another process has ended or aborted the move.
        """
        if not self._row().exists():
            raise self._lost()

    def switch(self) -> None:
        """Record that the target owns the key.

        This is one transaction. At the moment of its commit, the key changes its owner.

        :raises MoveFailed: another process has ended or aborted the move, or the directory (the
            table that records the shard of each key) no longer places the key on the source.
            Nothing was changed.
        :raises django.db.Error: it is unknown whether the transaction was committed.
        """
        with transaction.atomic(using=runtime.config().directory):
            self._enter_switched()
            placed = Placement.objects.using(runtime.config().directory).filter(
                group=self.group, key=self.key, shard=self.source
            )
            if placed.update(shard=self.target) != 1:
                raise MoveFailed(
                    f"The directory no longer places {self.text!r} of group {self.group!r} on shard"
                    f" {self.source}, so the {self} was not switched. Somebody has changed the"
                    " directory by hand: find out where the rows of the key are."
                )
        self.phase = SWITCHED

    def _enter_switched(self) -> None:
        if not self._row().update(phase=SWITCHED, switched_at=timezone.now()):
            raise self._lost()

    def settle(self, sessions: Any) -> None:
        """Record that the move is complete: the old rows on the source are in side tables now.

        :param sessions: a value that identifies the sessions that were open on the source when the
            target became the owner, and may still write there. None if the database cannot list its
            sessions.
        """
        keep = timedelta(seconds=self.position[_KEPT_FOR])
        position = {
            **self.position,
            "sessions": sessions,
            "fenced": True,
            "kept_until": (timezone.now() + keep).isoformat(),
        }
        self.enter(SETTLED, in_flight=None, position=position)
        self.position = position

    def was_settled(self) -> bool:
        """Return whether another process has completed the move. If so, this object knows it from
        now on. One query.
        """
        if not rows().filter(pk=self.number, phase=SETTLED).exists():
            return False
        self.phase = SETTLED
        return True

    def abort(self, why: str) -> bool:
        """Abort the move, unless the target owns the key already. Return whether it is aborted.

        If the target owns the key (the move was *switched*), the move cannot be aborted, and must
        be completed.

        :param why: the cause, for the record.
        """
        for phase in BEFORE_SWITCH:
            # Also record the phase in which the move was aborted. If it was "switching", copied
            # rows may be in the real tables of the target, and must be removed there.
            rows().filter(pk=self.number, phase=phase).update(
                phase=ABORTED, error=why[:2000], position={"aborted_in": phase}
            )
        row = rows().get(pk=self.number)
        self.phase, self.position = row.phase, dict(row.position)
        return self.phase == ABORTED

    @property
    def may_be_published(self) -> bool:
        """Whether copied rows of this aborted move may be in the real tables of the target.

        The switch puts them there, so this is possible only if the move was aborted in the phase
        "switching". Before the switch, copied rows are in side tables only.
        """
        return bool(self.position["aborted_in"] == SWITCHING)

    def finish_abort(self) -> None:
        """Record that an aborted move has left nothing on the shards."""
        rows().filter(pk=self.number, phase=ABORTED).update(
            in_flight=None, finished_at=timezone.now()
        )

    def former_fence(self) -> int | None:
        """Return the number of a fence on the target that belongs to an earlier move of this key.

        If the key was moved away from the target before, the target may still refuse writes of the
        key. None if there is no such fence. One query.
        """
        earlier = rows().filter(
            group=self.group, key=self.key, source=self.target, phase=SETTLED, pk__lt=self.number
        )
        left = [row.pk for row in earlier.order_by("-pk") if row.position.get("fenced")]
        return left[0] if left else None

    def _row(self) -> QuerySet[KeyMove]:
        return rows().filter(pk=self.number, phase=self.phase)

    def _lost(self) -> MoveFailed:
        row = rows().filter(pk=self.number).first()
        now = "is gone" if row is None else f"is {row.phase!r} now: {row.error}".rstrip(": ")
        return MoveFailed(
            f"The {self} was taken out of the hands of this process: it {now}. Nothing is lost; look"
            f" at 'manage.py keys status {self.group}'."
        )
