"""The record of a switch of one shard in the journal: its phases."""

from __future__ import annotations

from typing import Final

from sharded_orm.operations.pairs.plan import SideChange
from sharded_orm.operations.runs.journal import JournalRun
from sharded_orm.operations.shard_change import ShardChangeRecord

#: The first phase of a switch. The old side takes writes. The triggers are made that refuse writes
#: later; they refuse nothing yet.
PREPARING: Final = "preparing"
#: The second phase. The old side may refuse writes, and the new side still does.
FENCING: Final = "fencing"
#: The third phase. The topology is being published. After a kill, only its source knows whether it was.
PUBLISHING: Final = "publishing"
#: The last phase. The topology is published, and the new side may refuse writes for a moment still.
OPENING: Final = "opening"


class SwitchRecord(ShardChangeRecord[SideChange]):
    """The record of the switch of one shard."""

    noun = "switch"
    _is_published = False

    @classmethod
    def unfinished(cls, run: JournalRun) -> SwitchRecord | None:
        """Return the record of the switch that an earlier process has left unfinished; None if there
        is none.
        """
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
        """Check the same as :meth:`confirm`, before the new side's fence is changed.

        After the publication, record that the new side may take writes from now on. So a later
        process opens no other side, even if somebody has published the earlier topology again.
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
