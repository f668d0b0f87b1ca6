"""The record of a shard's move: its phase, and the publication that commits the move.

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

#: The first phase of a shard's move. The shard is on the source, whose tables may have triggers
#: that record changes. The target may have an incomplete copy, in hidden (renamed) tables.
COPYING: Final = "copying"
#: The second phase of a shard's move. The shard is on the source, but its tables there may be
#: hidden (renamed, so that no statement finds them).
HIDING: Final = "hiding"
#: The third phase of a shard's move. The topology is being published. If the process is killed,
#: only the source of the topology knows whether it was published.
PUBLISHING: Final = "publishing"


class ShardMoveRecord:
    """The record of one move of a shard.

    :param run: the run that moves the shard. This process holds it.
    :param number: a random number that identifies the move on both nodes.
    """

    def __init__(self, run: JournalRun, move: ShardToMove, number: int) -> None:
        self._run = run
        self.move = move
        #: A random number that identifies the move on both nodes. A paused process may continue
        #: after others have ended its move. That process does no harm to a later move, because the
        #: later move has another number.
        self.number = number
        #: The time at which this process has hidden (renamed) the tables, by ``time.monotonic()``.
        #: None if the tables are not hidden by this process.
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
        """Return the record of the move that an earlier process has left unfinished; None if there
        is none.
        """
        current = run.arguments.get("current")
        if current is None:
            return None
        return cls(run, ShardToMove.from_json(current["move"]), current["number"])

    @property
    def phase(self) -> str:
        return str(self._run.arguments["current"]["phase"])

    def enter(self, phase: str) -> None:
        """Record that ``phase`` of the move begins. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        current = {"move": self.move.to_json(), "number": self.number, "phase": phase}
        self._run.note(current=current)

    def confirm(self) -> None:
        """Check that this process still holds the run. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note()

    def prepare(self) -> None:
        """Make and check the topology that :meth:`publish` will publish.

        This is done before statements on the shard begin to wait, so that they wait less.

        :raises: the errors of :meth:`publish`. Nothing was published.
        """
        self._prepared = topology.prepare(self.move.publish_in)

    def publish(self) -> None:
        """Publish the topology with the shard on its target. This commits the move.

        When the method returns, this process may still use the former topology.

        :raises LeaseLost: another process has taken over the run.
        :raises TopologyError: the topology was not published, or it is not known whether it was.
        :raises MoveRefused: the topology has the shard on another node.
        """
        move = self.move

        def edit(document: Document) -> Document:
            # Another process may take over the run after this check. That process publishes a new
            # version of the topology, so that the publication of this document is refused.
            self.confirm()
            return move.publish_in(document)

        comment = f"{move} moved from {move.source} to {move.target}"
        if self._prepared is not None:
            # The source refuses the prepared document if a newer version was published meanwhile,
            # for example by a process that has taken over the run. Then continue below: ``edit``
            # checks whether the run was taken over.
            with suppress(TopologyConflict):
                topology.publish_prepared(self._prepared, comment)
                return
        topology.change(edit, comment)

    def rule_out(self) -> bool:
        """Ensure that the move will never be published, even if a process has sent the changed
        topology a moment ago.

        Return True if the move is ruled out, False if it is published already.

        :raises TopologyError: the source of the topology does not answer.
        """
        return topology.rule_out(self.move.is_published, f"the move of {self.move} broken off")

    def keep_until(self, keep: timedelta, *, replica: str | None = None) -> None:
        """Record that the move is complete, and how long the source keeps the old tables.

        :param keep: the time for which the source keeps the old tables.
        :param replica: a node that replicates from the source. While it replicates, the old tables
            are kept in any case.
        """
        self._run.note(current=None, left=self._left_with(self.move.source, keep, replica))

    def end(self, *, look_after: timedelta | None = None) -> None:
        """Record that the move was undone, so the shard is on its source as before.

        :param look_after: the time after which a later run looks for a copy on the target, and
            removes it; None if there can be no copy.
        """
        if look_after is None:
            self._run.note(current=None)
        else:
            self._run.note(current=None, left=self._left_with(self.move.target, look_after, None))

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
