"""The record of a switch of one shard in the journal, and the publication that commits the switch."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from sharded_orm.exceptions import TopologyConflict
from sharded_orm.operations import topology
from sharded_orm.operations.pairs.plan import SideChange
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.topology.document import Document

#: The first phase of a switch. The old side takes writes. It may have triggers that refuse nothing.
PREPARING: Final = "preparing"
#: The second phase. The old side may refuse writes, and the new side still does.
FENCING: Final = "fencing"
#: The third phase. The topology is being published. After a kill, only its source knows whether it was.
PUBLISHING: Final = "publishing"
#: The last phase. The topology is published, and the new side may refuse writes for a moment still.
OPENING: Final = "opening"


class SwitchRecord:
    """The record of the switch of one shard. It is a part of the run in the journal.

    So if another process takes over the run, this process can record nothing more. The switch is
    committed at the moment when the new topology is published.

    :param run: the run, which this process holds.
    """

    def __init__(self, run: JournalRun, change: SideChange) -> None:
        self._run = run
        self.change = change
        self._prepared: topology.PreparedChange | None = None

    @classmethod
    def unfinished(cls, run: JournalRun) -> SwitchRecord | None:
        """Return the record of the switch that an earlier process has left unfinished; None if there
        is none.
        """
        current = run.arguments.get("current")
        return None if current is None else cls(run, SideChange.from_json(current["move"]))

    @property
    def phase(self) -> str:
        return str(self._run.arguments["current"]["phase"])

    def enter(self, phase: str) -> None:
        """Record that ``phase`` begins. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note(current={"move": self.change.to_json(), "phase": phase})

    def confirm(self) -> None:
        """Check that this process still holds the run. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note()

    def end(self) -> None:
        """Record that the switch is complete, or undone."""
        self._run.note(current=None)

    def prepare(self) -> None:
        """Make and check the topology that :meth:`publish` will publish, before writes begin to wait.

        :raises: the errors of :meth:`publish`. Nothing was published.
        """
        self._prepared = topology.prepare(self.change.publish_in)

    def publish(self) -> int:
        """Publish the topology in which the new side is active. This commits the switch.

        Return the version of the topology. This process may still use an earlier one.

        :raises LeaseLost: another process has taken over the run.
        :raises TopologyError: the topology was not published, or it is not known whether it was.
        :raises SwitchRefused: the topology has the shard elsewhere by now.
        """
        change = self.change

        def edit(document: Document) -> Document:
            # Another process may take over the run after this check. That process publishes a new
            # version of the topology, so that the publication of this document is refused.
            self.confirm()
            return change.publish_in(document)

        comment = f"{change} active on {change.target} in place of {change.source}"
        if self._prepared is not None:
            # The source refuses the prepared document if a newer version was published meanwhile, for
            # example by a process that has taken over the run.
            with suppress(TopologyConflict):
                topology.publish_prepared(self._prepared, comment)
                return self._prepared.after.version
        return topology.change(edit, comment).version

    def rule_out(self) -> bool:
        """Ensure that the switch will never be published, even if a process has sent the changed
        topology a moment ago.

        Return True if the switch is ruled out, False if it is published already.

        :raises TopologyError: the source of the topology does not answer.
        """
        return topology.rule_out(self.change.is_published, f"switch of {self.change} broken off")
