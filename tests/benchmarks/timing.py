"""Times two ways to do the same, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

Work = Callable[[], object]
#: Seconds, and those that the processor worked for the process.
Both = tuple[float, float]
# Turns of each side in a round of many short calls.
_TURNS = 12


@dataclass(frozen=True)
class Rounds:
    """How often to measure. ``scale`` below 1 makes a quick run of rough figures."""

    count: int
    scale: float = 1.0

    def of(self, count: int) -> int:
        """Return the repetitions in a round, at least one."""
        return max(1, int(count * self.scale))


@dataclass(frozen=True)
class Measured:
    """Medians over the rounds: the ratio ours / stock of a round, and seconds per call."""

    ratio: float
    ours: float
    stock: float
    spread: tuple[float, float]
    """The quartiles of the ratio."""
    cpu: float | None = None
    """The ratio of the processor time of this process, if it was measured."""


def compare(
    ours: Work,
    stock: Work,
    rounds: Rounds,
    *,
    number: int = 1,
    before: Work | None = None,
) -> Measured:
    """Time ``number`` calls of ``ours`` and of ``stock`` in each round, in short turns.

    The side that goes first alternates, and each ratio compares neighbouring turns. So a machine
    that slows down for a while slows both.

    :param before: runs untimed before each turn.
    """
    for work in (ours, stock):  # warms connections, caches, imports
        _time(work, 1, before)
    turns = _TURNS if number >= _TURNS else 1
    calls = max(1, rounds.of(number) // turns)
    pairs: list[tuple[float, float]] = []
    cpu: list[float] = []
    gc.disable()
    try:
        for _ in range(rounds.count):
            gc.collect()
            seconds = {ours: 0.0, stock: 0.0}
            of_cpu = {ours: 0.0, stock: 0.0}
            for turn in range(turns):
                for work in (ours, stock) if (turn + len(pairs)) % 2 else (stock, ours):
                    wall, processor = _time(work, calls, before)
                    seconds[work] += wall
                    of_cpu[work] += processor
            pairs.append((seconds[ours] / turns / calls, seconds[stock] / turns / calls))
            if of_cpu[stock]:
                cpu.append(of_cpu[ours] / of_cpu[stock])
    finally:
        gc.enable()
    return replace(summary(pairs), cpu=median(cpu) if cpu else None)


def summary(pairs: list[tuple[float, float]]) -> Measured:
    """Summarize pairs of seconds (ours, stock), one pair per round."""
    ratios = [ours / stock for ours, stock in pairs]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Measured(
        median(ratios),
        median(ours for ours, _ in pairs),
        median(stock for _, stock in pairs),
        (low, high),
    )


def summary_of_both(rounds: Sequence[tuple[Both, Both]]) -> Measured:
    """Summarize rounds of two sides, ours and the other, with the seconds per call of each."""
    cpu = median(ours[1] / stock[1] for ours, stock in rounds)
    return replace(summary([(ours[0], stock[0]) for ours, stock in rounds]), cpu=cpu)


def _time(work: Work, number: int, before: Work | None) -> tuple[float, float]:
    """Return the seconds of ``number`` calls, and those that the processor worked for this process."""
    if before is not None:
        before()
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(number):
        work()
    processor = time.process_time() - processor
    return time.perf_counter() - began, processor
