"""The record of a shard's move: its phase, and the publication that commits the move.

The record is a part of the run in the journal. So if another process takes over the run, this
process can record nothing more. A move is committed at the moment when the new topology is
published.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, Final

from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.operations.shard_change import ShardChangeRecord
from sharded_orm.operations.shard_moves.plan import ShardToMove

#: The first phase of a shard's move. The shard is on the source, whose tables may have triggers
#: that record changes. The target may have an incomplete copy, in hidden (renamed) tables.
COPYING: Final = "copying"
#: The second phase of a shard's move. The shard is on the source, but its tables there may be
#: hidden (renamed, so that no statement finds them).
HIDING: Final = "hiding"
#: The third phase of a shard's move. The topology is being published. If the process is killed,
#: only the source of the topology knows whether it was published.
PUBLISHING: Final = "publishing"


class ShardMoveRecord(ShardChangeRecord[ShardToMove]):
    """The record of one move of a shard.

    :param run: the run that moves the shard. This process holds it.
    :param number: a random number that identifies the move on both nodes.
    """

    noun = "the move"

    def __init__(self, run: JournalRun, move: ShardToMove, number: int) -> None:
        super().__init__(run, move)
        #: A random number that identifies the move on both nodes. A process that was paused during
        #: the move may continue after its end, and cannot harm a later move, which has another
        #: number.
        self.number = number
        #: The time at which this process has hidden (renamed) the tables, by ``time.monotonic()``.
        #: None if the tables are not hidden by this process.
        self.hidden_at: float | None = None

    @classmethod
    def begin(cls, run: JournalRun, move: ShardToMove) -> ShardMoveRecord:
        if run.arguments.get("current") is not None:
            raise MoveFailed(f"{move} was not moved: an earlier move was not ended.")
        record = cls(run, move, secrets.randbits(62))
        record.enter(COPYING)
        return record

    @classmethod
    def unfinished(cls, run: JournalRun) -> ShardMoveRecord | None:
        """Return the record of the move that an earlier process has left unfinished; None if there
        is none.
        """
        current = run.arguments.get("current")
        if current is None:
            return None
        return cls(run, ShardToMove.from_json(current["move"]), current["number"])

    def enter(self, phase: str) -> None:
        """Record that ``phase`` of the move begins. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        current = {"move": self.change.to_json(), "number": self.number, "phase": phase}
        self._run.note(current=current)

    @property
    def comment(self) -> str:
        return f"{self.change} moved from {self.change.source} to {self.change.target}"

    def keep_until(self, keep: timedelta, *, replica: str | None = None) -> None:
        """Record that the move is complete, and how long the source keeps the old tables.

        :param keep: the time for which the source keeps the old tables.
        :param replica: a node that replicates from the source. As long as it replicates, the old
            tables are kept even after ``keep``.
        """
        self._run.note(current=None, left=self._left_with(self.change.source, keep, replica))

    def end(self, *, look_after: timedelta | None = None) -> None:
        """Record that the move was undone, so the shard is on its source as before.

        :param look_after: the time after which a later run removes a copy that may be on the
            target; None if there can be no copy.
        """
        if look_after is None:
            self._run.note(current=None)
        else:
            self._run.note(current=None, left=self._left_with(self.change.target, look_after, None))

    def _left_with(self, node: str, keep: timedelta, replica: str | None) -> list[dict[str, Any]]:
        number = self.change.number
        left = {
            "shard": number,
            "node": node,
            "number": self.number,
            "until": (self._run.now() + keep).isoformat(),
            "replica": replica,
        }
        others = self._run.arguments.get("left", ())
        return [o for o in others if (o["shard"], o["node"]) != (number, node)] + [left]
