"""What the journal records about the switch of one shard: the phase that it is in."""

from __future__ import annotations

from typing import Final

from sharded_orm.operations.pairs.plan import SideChange
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.operations.shard_change import ShardChangeRecord

#: The first phase of a switch: triggers are created on the old side, which takes writes as before.
#: The triggers can refuse writes later, but do not refuse any yet.
PREPARING: Final = "preparing"
#: The second phase: the old side begins to refuse writes. The new side refuses them, too.
FENCING: Final = "fencing"
#: The third phase: the new topology is being published. If the process is killed now, only the
#: source of the topology tells whether it was published.
PUBLISHING: Final = "publishing"
#: The last phase: the new topology is published, and the fence of the new side is being opened. So
#: the new side takes writes now, or in a moment.
OPENING: Final = "opening"


class SwitchRecord(ShardChangeRecord[SideChange]):
    """What the journal records about the switch of one shard."""

    noun = "switch"
    _is_published = False

    @classmethod
    def unfinished(cls, run: JournalRun) -> SwitchRecord | None:
        """Return the record of a switch that an earlier process has left unfinished, or None."""
        current = run.arguments.get("current")
        return None if current is None else cls(run, SideChange.from_json(current["move"]))

    def enter(self, phase: str) -> None:
        """Record that ``phase`` begins. One query.

        :raises LeaseLost: another process has taken over the run.
        """
        self._run.note(current={"move": self.change.to_json(), "phase": phase})

    def publish(self) -> int:
        version = super().publish()
        self._is_published = True
        return version

    def confirm_new_side(self) -> None:
        """Check that this process may change the fence of the new side, as :meth:`confirm` does.

        If the new topology is published, also record that the new side may take writes from now on.
        This matters if this process is killed and somebody publishes the earlier topology again. A
        later process then opens the new side and not the old one, because of this record.
        """
        if self._is_published:
            self.enter(OPENING)
        else:
            self.confirm()

    def end(self) -> None:
        """Record that the switch is complete, or undone."""
        self._run.note(current=None)

    @property
    def comment(self) -> str:
        return f"{self.change} active on {self.change.target} in place of {self.change.source}"
