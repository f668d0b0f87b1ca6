"""The options of a promotion, and the report on its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sharded_orm.operations.promotion import pause as pauses
from sharded_orm.operations.promotion import switchover
from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.operations.promotion.preflight import Loss


@dataclass(frozen=True)
class PromotionOptions:
    """The options of a promotion.

    :param force: the old primary is dead; events that it did not send are lost.
    :param timeout: seconds that the replica may take to come near, and again, after the fence, to
        catch up.
    """

    force: bool = False
    timeout: float = 30.0


@dataclass
class PromotionReport:
    """The result of a promotion. ``outcome`` is "promoted", "undone" or "checked"."""

    plan: PromotionPlan
    outcome: str
    forced: bool = False
    #: The last position of the old primary, which the new one has reached.
    position: str = ""
    #: How long writes were refused; None if the promotion has fenced nothing.
    pause: Pause | None = None
    loss: Loss | None = None
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        loss = self.loss
        return {
            "outcome": self.outcome,
            "old_primary": self.plan.node,
            "new_primary": self.plan.new,
            "moves": switchover.as_text(self.plan),
            "forced": self.forced,
            "position": self.position,
            **(self.pause.to_json() if self.pause else pauses.UNKNOWN),
            "loss": loss
            and {"received": loss.received, "executed": loss.executed, "idle": loss.idle},
            "warnings": self.warnings,
        }
