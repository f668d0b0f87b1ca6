"""How far a promotion has come: its phase in the journal, and whether its map is published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.promotion import publication, switchover
from sharded_orm.operations.promotion.pause import moment
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.operations.promotion.preflight import Loss
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.runs import journal

Tell = Callable[[str], None]


class PromotionRecord:
    """A promotion that has passed the checks, as the journal run ``run`` records it.

    :param tell: called with a line for each phase.
    """

    def __init__(self, run: journal.JournalRun, options: PromotionOptions, tell: Tell) -> None:
        self.run = run
        self.options = options
        self.tell = tell
        self.plan = PromotionPlan.from_json(run.arguments)
        #: The name of the replication connection on the new primary.
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

    def warn(self, warning: str) -> None:
        """Add a warning to the report."""
        self.report.warnings.append(warning)

    def begin(self, phase: str, line: str, **details: Any) -> None:
        """Enter a phase: the journal records it first.

        :param line: the phase, for people.
        :param details: values that the journal keeps as well.
        :raises LeaseLost: another process may have the run, so nothing may be done here.
        """
        self.run.check()
        self.run.note(phase=phase, **details)
        self.tell(line)

    def is_published(self) -> bool:
        """Whether the source of the topology holds the new map.

        :raises PromotionFailed: the source does not answer.
        """
        return publication.was_switched(
            self.plan, forced=self.options.force, check=self.run.check, tell=self.tell
        )

    def rule_out(self) -> bool:
        """Make sure that a switch which some process may have sent is never published.

        Returns False if the switch is published already.

        :raises PromotionFailed: the source does not answer.
        """
        if self.is_published():
            return False
        try:
            return switchover.rule_out(self.plan)
        except (TopologyError, OSError) as exc:
            raise publication.unsettled_error(self.plan, exc, forced=self.options.force) from exc

    def note_published(self) -> None:
        """Record that another process had published the map, at a time that it did not record."""
        self.begin(
            "switched",
            f"{self.plan.new} is the primary: the map had been published",
            switched=[self.run.arguments["publishing_at"], moment(self.run)],
        )
