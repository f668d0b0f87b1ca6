"""What an operator wants to have balanced, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sharded_orm.exceptions import BalanceRefused
from sharded_orm.operations.balancing import measure

#: What has moved within this time stays where it is.
COOL_DOWN = timedelta(days=1)
THRESHOLD = 0.1


@dataclass(frozen=True)
class BalanceOptions:
    """What is balanced, and how far.

    :param by: "bytes", "rows", "keys" or "load".
    :param threshold: by what part of its share a node or shard may have more before it gives
        something away.
    :param goal: by what part it may have more afterwards; None for the threshold.
    :param cool_down: for how long what has moved stays where it is.
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
