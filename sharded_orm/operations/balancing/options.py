"""The options that an operator sets for a plan of balancing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sharded_orm.operations.balancing import measure
from sharded_orm.operations.exceptions import BalanceRefused

#: The default time during which a shard or key that has moved must not move again.
COOL_DOWN = timedelta(days=1)
THRESHOLD = 0.1


@dataclass(frozen=True)
class BalanceOptions:
    """The options of a plan: what is balanced, and how evenly.

    :param by: "bytes", "rows", "keys" or "load".
    :param threshold: shards move away from a node only if the node exceeds its share by more than
        this fraction, such as 0.1. The share is the size that the plan intends for the node,
        usually in proportion to the node's capacity. If keys are balanced, they move away from a
        shard under the same condition.
    :param goal: from a node (or shard) above the threshold, shards (or keys) move away until it
        exceeds its share by at most this fraction. None means the same fraction as ``threshold``.
    :param cool_down: the time during which a shard or key that has moved must not move again.
    :param load: path of a JSON file with loads, for ``by="load"``.
    """

    by: str = measure.BYTES
    threshold: float = THRESHOLD
    goal: float | None = None
    cool_down: timedelta = COOL_DOWN
    load: str | None = None

    def __post_init__(self) -> None:
        if (self.by == measure.LOAD) != (self.load is not None):
            raise BalanceRefused(
                ["--by load needs the loads: name a JSON file by --load"]
                if self.load is None
                else ["--load names loads, which only --by load uses"]
            )
        if not 0 <= self.reach <= self.threshold:
            raise BalanceRefused(
                [f"the goal {self.reach:.0%} must be from 0% to the threshold {self.threshold:.0%}"]
            )

    @property
    def reach(self) -> float:
        return self.threshold if self.goal is None else self.goal
