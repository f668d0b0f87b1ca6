"""The options of a promotion (a replica becomes the primary), and the report on its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sharded_orm.operations.promotion import pause as pauses
from sharded_orm.operations.promotion import topology_change
from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.operations.promotion.preflight import Loss


@dataclass(frozen=True)
class PromotionOptions:
    """The options of a promotion.

    :param force: whether to promote without the old primary, which must be dead. The writes that
        the old primary did not send to the replica are lost.
    :param timeout: the largest number of seconds for each of two waits. In the first wait, the
        replica almost catches up while the old primary still accepts writes. In the second wait,
        the old primary refuses writes, and the replica executes the last ones.
    """

    force: bool = False
    timeout: float = 30.0


@dataclass
class PromotionReport:
    """The result of a promotion, or of a check whether it is possible.

    :param outcome: "promoted", "undone", or "checked" after a check, which promotes nothing.
    :param loss: the writes that a forced promotion loses; None for any other promotion.
    """

    plan: PromotionPlan
    outcome: str
    forced: bool = False
    #: The last position of the old primary's log that the new primary has executed.
    position: str = ""
    #: How long writes were refused; None if the promotion has made no server refuse writes.
    pause: Pause | None = None
    loss: Loss | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def afterwards(self) -> str:
        """Sentences that say what the operator must do after the promotion."""
        texts = self.plan.server_class.texts
        return texts.afterwards.format(old=self.plan.node, new=self.plan.new)

    def to_json(self) -> dict[str, Any]:
        loss = self.loss
        return {
            "outcome": self.outcome,
            "old_primary": self.plan.node,
            "new_primary": self.plan.new,
            "moves": topology_change.as_text(self.plan),
            "forced": self.forced,
            "position": self.position,
            **(self.pause.to_json() if self.pause else pauses.UNKNOWN),
            "loss": loss
            and {"received": loss.received, "executed": loss.executed, "idle": loss.idle},
            "warnings": self.warnings,
        }
