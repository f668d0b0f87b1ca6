"""The record of a promotion: how far it has come, and whether its new map is published.

The *map* is the topology document, and the *source* is the place where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.promotion import publication, topology_change
from sharded_orm.operations.promotion.pause import moment
from sharded_orm.operations.promotion.plan import PUBLISHED, PromotionPlan
from sharded_orm.operations.promotion.preflight import Loss
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.runs import journal

Tell = Callable[[str], None]


class PromotionRecord:
    """The state of a promotion whose checks have passed, as it is recorded in the journal.

    :param run: the promotion's run in the journal. This process must hold the run's lease, the
        right to work on the run.
    :param tell: called with a line for the operator in each phase.
    """

    def __init__(self, run: journal.JournalRun, options: PromotionOptions, tell: Tell) -> None:
        self.run = run
        self.options = options
        self.tell = tell
        self.plan = PromotionPlan.from_json(run.arguments)
        #: The phase that an earlier process has reached, or "checked".
        self.phase_at_start = self.phase
        #: The name of the replication connection from the old primary to the new one.
        self.link: str = run.arguments["link"]
        loss = run.arguments["loss"]
        self.report = PromotionReport(
            self.plan,
            "promoted",
            options.force,
            loss=loss and Loss(*loss),
            warnings=list(run.arguments["warnings"]),
        )

    @property
    def phase(self) -> str:
        return str(self.run.arguments["phase"])

    @property
    def is_switched(self) -> bool:
        """Whether the journal says that the new map (topology document) is published. Then nothing
        can be undone.
        """
        return self.phase in PUBLISHED

    def warn(self, warning: str) -> None:
        """Add a warning to the report."""
        self.report.warnings.append(warning)

    def begin(self, phase: str, line: str, **details: Any) -> None:
        """Record in the journal that ``phase`` begins, then tell the operator.

        :param line: a description of the phase for people.
        :param details: further values to store in the run's arguments.
        :raises LeaseLost: another process may have taken over the run, so this process must stop.
        """
        self.run.check()
        self.run.note(phase=phase, **details)
        self.tell(line)

    def is_published(self) -> bool:
        """Whether the promotion's change of the topology is published.

        :raises PromotionFailed: the source of the topology does not answer.
        :raises LeaseLost: another process may have taken over the run.
        """
        return publication.was_switched(
            self.plan, forced=self.options.force, check=self.run.check, tell=self.tell
        )

    def rule_out(self) -> bool:
        """Ensure that the promotion's change of the topology will never be published.

        This works even if a process has sent the change a moment ago. Return True if the change is
        ruled out, False if it is published already.

        :raises PromotionFailed: the source of the topology does not answer.
        :raises LeaseLost: another process may have taken over the run.
        """
        if self.is_published():
            return False
        try:
            return topology_change.rule_out(self.plan)
        except (TopologyError, OSError) as exc:
            raise publication.unsettled_error(self.plan, exc, forced=self.options.force) from exc

    def note_published(self) -> None:
        """Record that an earlier process published the promotion's change of the topology.

        That process did not record when. So the journal stores two times between which it happened:
        when that process was about to publish, and now.
        """
        if self.plan.server_class.is_promoted_for_good:
            self.note_promoting()
            return
        self.begin(
            "switched",
            f"{self.plan.new} is the primary: the map had been published",
            switched=[self.run.arguments["publishing_at"], moment(self.run)],
        )

    def note_promoting(self) -> None:
        """Record that the new map (topology document) is published and the replica is still to be
        promoted.
        """
        texts = self.plan.server_class.texts
        self.begin(
            "promoting",
            texts.opens.format(node=self.plan.new),
            promoting_at=moment(self.run),
        )

    def note_switched(self, span: list[str]) -> None:
        """Record that the new primary takes writes.

        :param span: the earliest and the latest moment at which the new primary may have begun to
            accept writes.
        """
        self.begin(
            "switched",
            f"{self.plan.new} is the primary of {', '.join(map(str, self.plan.moves))}",
            switched=span,
        )
