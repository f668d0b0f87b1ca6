"""Times the planner of ``shards balance``: a pure function, so it needs no server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from statistics import median

from sharded_orm.operations.balancing.planner import plan_balance
from sharded_orm.operations.balancing.problem import BalanceProblem, Bin, Item
from tests.benchmarks.report import Line
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds

NODES, SHARDS = 16, 4096
#: To be reached: seconds, fullest node / mean, bytes moved / lower bound.
SECONDS, FULLEST, MOVED = 1.0, 1.1, 1.2


def balance_plan(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Plan fleets with nodes of different age and shards of different sizes, one for each round."""
    seconds: list[float] = []
    fullest: list[float] = []
    moved: list[float] = []
    moves: list[int] = []
    for seed in range(rounds.count):
        problem = _fleet(seed)
        began = time.perf_counter()
        plan = plan_balance(problem)
        seconds.append(time.perf_counter() - began)
        mean = sum(plan.after.values()) / NODES
        fullest.append(max(plan.after.values()) / mean)
        moved.append(plan.moved / plan.least)
        moves.append(len(plan.moves))
    what = f"plan for {SHARDS} shards on {NODES} nodes"
    yield Line(
        what,
        "-",
        f"worst {max(seconds):.2f} s",
        f"< {SECONDS:.0f} s",
        max(seconds) < SECONDS,
        f"median {median(seconds) * 1000:.0f} ms, {median(moves):.0f} moves",
    )
    yield Line(
        f"{what}: fullest node",
        "the mean",
        f"{max(fullest):.3f}x",
        f"<= {FULLEST:.2f}x",
        max(fullest) <= FULLEST,
    )
    yield Line(
        f"{what}: bytes moved",
        "the lower bound",
        f"{max(moved):.3f}x",
        f"<= {MOVED:.2f}x",
        max(moved) <= MOVED,
    )


def _fleet(seed: int) -> BalanceProblem:
    dice = random.Random(seed)
    nodes = [f"db{number}" for number in range(NODES)]
    # One node is new and nearly empty.
    skew = [0.02, *(0.2 + dice.random() for _ in nodes[1:])]
    items = tuple(
        Item(
            f"shard{number}",
            dice.choices(nodes, skew)[0],
            int(dice.lognormvariate(20, 1.0)),
            frozenset(nodes),
        )
        for number in range(SHARDS)
    )
    return BalanceProblem(tuple(map(Bin, nodes)), items)
