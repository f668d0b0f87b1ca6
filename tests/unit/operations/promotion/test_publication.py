"""How long a silent source is asked whether a map was published."""

from __future__ import annotations

import pytest

from sharded_orm.exceptions import TopologyUnavailable
from sharded_orm.operations.exceptions import PromotionFailed
from sharded_orm.operations.promotion import publication, topology_change
from sharded_orm.operations.promotion.plan import Move, PromotionPlan
from tests.clock import Clock

PLAN = PromotionPlan(
    "db1", "db2", (Move("photos", 0, 15, "db1", "db2"),), "sharded_orm.backends.mysql"
)


class Source:
    """Takes ``seconds`` for each answer, and answers from the time ``up``."""

    def __init__(self, clock: Clock, seconds: float, up: float = float("inf")) -> None:
        self.clock, self.seconds, self.up = clock, seconds, up
        self.lines: list[str] = []

    def was_switched(self, plan: PromotionPlan) -> bool:
        if self.clock.now >= self.up:
            return True
        self.clock.now += self.seconds
        raise TopologyUnavailable(f"it does not answer within {self.seconds:g} s.")

    def sleep(self, seconds: float) -> None:
        # The line is written before the wait.
        assert self.lines
        self.clock.now += seconds

    def ask(self, monkeypatch: pytest.MonkeyPatch, forced: bool = False) -> bool:
        monkeypatch.setattr(topology_change, "was_switched", self.was_switched)
        return publication.was_switched(
            PLAN,
            forced=forced,
            check=lambda: None,
            tell=self.lines.append,
            clock=self.clock,
            sleep=self.sleep,
        )


@pytest.mark.parametrize("seconds", [0.0, 1.0, 5.0, 7.0, 14.9, 40.0])
def test_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = Clock()
    begun = clock.now
    with pytest.raises(PromotionFailed) as caught:
        Source(clock, seconds).ask(monkeypatch)
    elapsed = clock.now - begun
    # One answer takes its time; a second one is not requested if it would be too late.
    assert elapsed <= max(publication.LOOK_UP, seconds)
    assert f"it was asked for {elapsed:.0f} s" in str(caught.value)
    assert not caught.value.settled


def test_what_it_means_for_writers_is_said_at_once_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    source = Source(clock, 1.0, up=clock.now + 6)
    assert source.ask(monkeypatch)
    (line,) = source.lines
    assert "it does not answer within 1 s." in line
    assert "'db1' is read only: writes to photos 0-15 are refused until" in line
    assert f"asks for up to {publication.LOOK_UP:g} s" in line


def test_the_error_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromotionFailed) as caught:
        Source(Clock(), 5.0).ask(monkeypatch)
    error = str(caught.value)
    assert "writes to photos 0-15 are refused until that is settled" in error
    assert "'manage.py shards promote db1' to finish" in error
    assert "'manage.py shards promote db1 --abort' to go back" in error
    with pytest.raises(PromotionFailed, match="promote db1 --force' to finish"):
        Source(Clock(), 5.0).ask(monkeypatch, forced=True)
