"""The record of a promotion: how far it has come, and whether its new topology is published.

The record is in the journal, so that another process can resume or undo the promotion. The *source*
is the place where the topology document is stored.
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
        #: The phase that an earlier process of this promotion has reached; "checked" if there was
        #: no earlier process.
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
        """Whether the new topology document is published, as far as the journal says.

        If it is, the promotion cannot be undone any more.
        """
        return self.phase in PUBLISHED

    def warn(self, warning: str) -> None:
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
        """Query the source whether the topology with the new primary is published.

        :raises PromotionFailed: the source of the topology does not answer.
        :raises LeaseLost: another process may have taken over the run.
        """
        return publication.was_switched(
            self.plan, forced=self.options.force, check=self.run.check, tell=self.tell
        )

    def rule_out(self) -> bool:
        """Ensure that the topology with the new primary will never be published.

        An earlier process may have sent it a moment ago, so that it could still arrive at the
        source. After this call, the source refuses it. Return False if it is published already.

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
        """Record that the new topology is published, if this was not recorded at once.

        For example, the answer to the publication got lost, or the process was killed. The exact
        time is not known. So the journal stores two times between which the publication happened:
        the time when a process was about to publish, and the time now.
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
        """Record the phase ``promoting``, which only PostgreSQL has.

        The new topology document is published, but the server that it names as the primary is still
        a replica.
        """
        texts = self.plan.server_class.texts
        self.begin(
            "promoting",
            texts.opens.format(node=self.plan.new),
            promoting_at=moment(self.run),
        )

    def note_switched(self, span: list[str]) -> None:
        """Record that the new primary takes writes.

        :param span: two times in ISO format. The new primary began to accept writes between them.
        """
        self.begin(
            "switched",
            f"{self.plan.new} is the primary of {', '.join(map(str, self.plan.moves))}",
            switched=span,
        )
