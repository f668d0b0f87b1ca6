"""The steps of a plan: each is one command of an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, takewhile

from sharded_orm.operations.balancing.problem import BalanceMove, percent


@dataclass(frozen=True)
class BalanceStep:
    """Moves that follow each other, of one group, from one node or shard to another."""

    group: str
    source: str
    target: str
    moves: tuple[BalanceMove, ...]

    @property
    def reason(self) -> str:
        """Why, for people: ``db1 has 131% of the mean, then 109%; db2 has 70%, then 92%``."""
        first, last = self.moves[0], self.moves[-1]
        return (
            f"{self.source} has {percent(first.source_before)} of the mean, then"
            f" {percent(last.source_after)}; {self.target} has {percent(first.target_before)}, then"
            f" {percent(last.target_after)}"
        )


def steps_of(
    moves: Iterable[BalanceMove], group_of: Callable[[BalanceMove], str]
) -> Iterator[BalanceStep]:
    """Yield the moves as steps, in their order."""

    def place(move: BalanceMove) -> tuple[str, str, str]:
        return group_of(move), move.source, move.target

    for (group, source, target), together in groupby(moves, key=place):
        yield BalanceStep(group, source, target, tuple(together))


def apply_steps(
    steps: Iterable[BalanceStep], apply: Callable[[BalanceStep], bool]
) -> list[BalanceStep]:
    """Call ``apply`` for each step, in their order, until one fails. Return those that were made.

    Each step by itself improves, so it is safe to stop after any.

    :param apply: makes a step, and returns whether all of it was made.
    """
    return list(takewhile(apply, steps))
