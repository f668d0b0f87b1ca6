"""The steps of a plan that balances nodes or shards. An operator makes each step by one command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile

from sharded_orm.operations.balancing.problem import BalanceMove, percent


@dataclass(frozen=True)
class BalanceStep:
    """Consecutive moves of a balancing plan that an operator makes together, by one command.

    All moves of a step are within one group, and have the same source and the same target. If
    shards move, these are two nodes. If keys move, they are two shards.
    """

    group: str
    source: str
    target: str
    moves: tuple[BalanceMove, ...]

    @property
    def reason(self) -> str:
        """The reason for the step: how full its two nodes (or shards) are before and after the step.

        For example ``db1 has 131% of the mean, then 109%; db2 has 70%, then 92%``.
        """
        first, last = self.moves[0], self.moves[-1]
        return (
            f"{self.source} has {percent(first.source_before)} of the mean, then"
            f" {percent(last.source_after)}; {self.target} has {percent(first.target_before)}, then"
            f" {percent(last.target_after)}"
        )


def steps_of(
    moves: Iterable[BalanceMove], group_of: Callable[[BalanceMove], str]
) -> Iterator[BalanceStep]:
    """Yield ``moves`` as steps, in their order.

    Consecutive moves between the same two nodes, or shards, are one step.

    :param group_of: a function that returns the name of a move's group.
    """

    def place(move: BalanceMove) -> tuple[str, str, str]:
        return group_of(move), move.source, move.target

    for (group, source, target), together in groupby(moves, key=place):
        yield BalanceStep(group, source, target, tuple(together))


def apply_steps(
    steps: Iterable[BalanceStep], apply: Callable[[BalanceStep], bool]
) -> list[BalanceStep]:
    """Call ``apply`` for each step, in order, until one fails. Return the steps that were made.

    Each single step is an improvement, so it is safe to stop after any step.

    :param apply: a function that makes a step, and returns whether the whole step was made.
    """
    return list(takewhile(apply, steps))
