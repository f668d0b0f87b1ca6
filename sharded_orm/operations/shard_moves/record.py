"""The record of a shard's move in the journal: how far the move has come.

If the process is killed, another process reads the record, and completes or undoes the move. A move
is committed at the moment when the topology with the shard's new node is published.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, Final

from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.operations.shard_change import ShardChangeRecord
from sharded_orm.operations.shard_moves.plan import ShardToMove

#: The first phase of a shard's move. The site uses the tables on the source. They may have triggers
#: that record changes. The target may have an incomplete copy in *hidden* tables: these are
#: renamed, so that no statement of the site finds them.
COPYING: Final = "copying"
#: The second phase. The shard is still on the source, but its tables there may be hidden, so that
#: statements of the site wait.
HIDING: Final = "hiding"
#: The third phase. The new topology is being published. If the process is killed, only the source
#: of the topology, the place where it is stored, knows whether the move is committed.
PUBLISHING: Final = "publishing"


class ShardMoveRecord(ShardChangeRecord[ShardToMove]):
    """The record of one move of a shard.

    :param run: the run that moves the shard. This process holds it.
    :param number: a random number that identifies the move on both nodes.
    """

    noun = "the move"

    def __init__(self, run: JournalRun, move: ShardToMove, number: int) -> None:
        super().__init__(run, move)
        #: A random number that identifies the move on both nodes. If a process is paused during the
        #: move and continues after somebody else has ended the move, it cannot harm the next move
        #: of the shard, which has a different number.
        self.number = number
        #: The time, from ``time.monotonic()``, at which this process has hidden the tables on the
        #: source. None before that, and again when the tables on the target can be used.
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
        """Return the record of the move that an earlier process has left unfinished, if any."""
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
        """Record that the move is complete, and that the source keeps the old tables for a while.

        :param keep: how long the source keeps the old tables.
        :param replica: a node that replicates from the source. The old tables are not dropped while
            it replicates, because the drop would be repeated on that node.
        """
        self._run.note(current=None, left=self._left_with(self.change.source, keep, replica))

    def end(self, *, look_after: timedelta | None = None) -> None:
        """Record that the move was undone, so the shard is on its source as before.

        :param look_after: the time after which a later run looks for a copy of the shard on the
            target, and removes it. None if no copy can be left there.
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
