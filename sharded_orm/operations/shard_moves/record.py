"""The record of a shard's move: its phase, and the publication that commits it.

The record is a part of the run in the journal. So if another process takes over the run, this
process can record nothing more. A move is committed at the moment when the new topology is
published.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from sharded_orm.exceptions import MoveFailed, TopologyConflict
from sharded_orm.operations import topology
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.operations.shard_moves.plan import ShardToMove
from sharded_orm.topology.document import Document

#: The source has the shard. Triggers may be on it, and hidden tables on the target.
COPYING: Final = "copying"
#: The source has the shard, but its tables may be hidden.
HIDING: Final = "hiding"
#: The topology is being published. After a kill, only its source knows whether it was.
PUBLISHING: Final = "publishing"


class ShardMoveRecord:
    """The record of one move.

    :param run: the run that moves the shard. This process holds it.
    """

    def __init__(self, run: JournalRun, move: ShardToMove, number: int) -> None:
        self._run = run
        self.move = move
        #: A random number that identifies the move on both nodes. A paused process may go on after
        #: others have ended its move. That process does no harm to a later move, which has another
        #: number.
        self.number = number
        #: When this process has hidden the tables, by ``time.monotonic()``. None if it has not, or if
        #: the tables have their names again.
        self.hidden_at: float | None = None
        self._prepared: topology.PreparedChange | None = None

    @classmethod
    def begin(cls, run: JournalRun, move: ShardToMove) -> ShardMoveRecord:
        if run.arguments.get("current") is not None:
            raise MoveFailed(f"{move} was not moved: an earlier move was not ended.")
        record = cls(run, move, secrets.randbits(62))
        record.enter(COPYING)
        return record

    @classmethod
    def unfinished(cls, run: JournalRun) -> ShardMoveRecord | None:
        """Return the record of the move that a process has left; None if there is none."""
        current = run.arguments.get("current")
        if current is None:
            return None
        return cls(run, ShardToMove.from_json(current["move"]), current["number"])

    @property
    def phase(self) -> str:
        return str(self._run.arguments["current"]["phase"])

    def enter(self, phase: str) -> None:
        """Record that the move goes on to ``phase``. One query.

        :raises LeaseLost: another process has taken the run over.
        """
        current = {"move": self.move.to_json(), "number": self.number, "phase": phase}
        self._run.note(current=current)

    def confirm(self) -> None:
        """Check that this process still holds the run. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note()

    def prepare(self) -> None:
        """Check the topology that :meth:`publish` will publish, before statements begin to wait.

        :raises: the errors of :meth:`publish`. Nothing was published.
        """
        self._prepared = topology.prepare(self.move.publish_in)

    def publish(self) -> None:
        """Publish the topology with the shard on its target: the one commit point.

        This process may still use the former topology on return.

        :raises LeaseLost: another process has taken the run over.
        :raises TopologyError: the topology was not published, or it is not known whether it was.
        :raises MoveRefused: the topology has the shard on another node.
        """
        move = self.move

        def edit(document: Document) -> Document:
            # If another process takes over the run after this check, it publishes a new version of
            # the topology. The publication of this document is then refused.
            self.confirm()
            return move.publish_in(document)

        comment = f"{move} moved from {move.source} to {move.target}"
        if self._prepared is not None:
            # A process that takes the run over publishes a new version. If it has done so since
            # this one has entered the phase, the prepared version is refused, too.
            with suppress(TopologyConflict):
                topology.publish_prepared(self._prepared, comment)
                return
        topology.change(edit, comment)

    def rule_out(self) -> bool:
        """Make sure that the move will never be published, even if it was sent a moment ago.

        Return False if it is published already.

        :raises TopologyError: the source of the topology does not answer.
        """
        return topology.rule_out(self.move.is_published, f"the move of {self.move} broken off")

    def keep_until(self, keep: timedelta, *, replica: str | None = None) -> None:
        """Record that the target has the shard, and until when the old tables are kept.

        :param keep: for how long the source keeps the old tables.
        :param replica: a node that replicates from the source. The old tables are kept at least
            until it no longer does.
        """
        self._run.note(current=None, left=self._left_with(self.move.source, keep, replica))

    def end(self, *, copy_left: bool = False) -> None:
        """Record that the move was undone: the shard is on its source as before.

        :param copy_left: whether the copy on the target could not be removed. A later run removes
            it.
        """
        if copy_left:
            self._run.note(current=None, left=self._left_with(self.move.target, timedelta(0), None))
        else:
            self._run.note(current=None)

    def _left_with(self, node: str, keep: timedelta, replica: str | None) -> list[dict[str, Any]]:
        number = self.move.number
        left = {
            "shard": number,
            "node": node,
            "number": self.number,
            "until": (self._run.now() + keep).isoformat(),
            "replica": replica,
        }
        others = self._run.arguments.get("left", ())
        return [o for o in others if (o["shard"], o["node"]) != (number, node)] + [left]
