"""Balance shards between nodes: read a snapshot, and plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.exceptions import BalanceRefused
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.fleet import FleetSnapshot, balance_problem
from sharded_orm.operations.balancing.planner import plan_balance
from sharded_orm.operations.balancing.problem import BalancePlan
from sharded_orm.operations.balancing.recent_moves import recent_moves
from sharded_orm.operations.balancing.step import BalanceStep, steps_of
from sharded_orm.topology.model import Shard, Topology

#: Shards that have moved within this time stay where they are.
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


@dataclass(frozen=True)
class ShardBalance:
    """A plan for shards.

    :param bytes: the bytes of each shard, by alias.
    :param recent: aliases of shards that stay because they have moved a short time ago.
    """

    plan: BalancePlan
    steps: tuple[BalanceStep, ...]
    shards: dict[str, Shard]
    bytes: dict[str, int]
    recent: frozenset[str]


def plan_shards(group: str | None = None, options: BalanceOptions | None = None) -> ShardBalance:
    """Plan moves of shards between nodes. Changes nothing.

    :param group: the group whose shards may move; None for all groups. The others count, but stay.
    :raises BalanceRefused: there is no plan; every reason is listed.
    :raises UnknownShard: there is no such group.
    :raises TopologyError: the source of the topology does not answer.

    Costs one query per node. By keys, one query of the directory in addition. The cool-down costs one
    round trip to the source of the topology for each version of that time.
    """
    options = options or BalanceOptions()
    topology = runtime.topology()
    groups = [runtime.group(group).name] if group is not None else list(topology.groups)
    sizes = measure.shard_sizes(topology)
    measured = {
        measure.BYTES: lambda: {alias: float(size.bytes) for alias, size in sizes.items()},
        measure.ROWS: lambda: measure.rows_of(sizes),
        measure.KEYS: lambda: measure.key_counts(dict.fromkeys(groups)),
        measure.LOAD: lambda: measure.read_load(
            options.load or "", lambda name: topology.resolve(name) is not None
        ),
    }[options.by]()
    snapshot = FleetSnapshot(
        topology, measured, recent_moves(topology, timezone.now(), options.cool_down)
    )
    return balance_fleet(snapshot, groups, options, {n: s.bytes for n, s in sizes.items()})


def balance_fleet(
    snapshot: FleetSnapshot,
    groups: Collection[str],
    options: BalanceOptions,
    shard_bytes: dict[str, int],
) -> ShardBalance:
    """Return the plan for a snapshot. A pure function."""
    problem = balance_problem(snapshot, groups, threshold=options.threshold, goal=options.reach)
    plan = plan_balance(problem)
    shards = _shards(snapshot.topology, plan)
    return ShardBalance(
        plan,
        tuple(steps_of(plan.moves, lambda move: shards[move.item].group)),
        shards,
        shard_bytes,
        snapshot.recent,
    )


def _shards(topology: Topology, plan: BalancePlan) -> dict[str, Shard]:
    shards = {move.item: topology.resolve(move.item) for move in plan.moves}
    return {alias: shard for alias, shard in shards.items() if shard is not None}
