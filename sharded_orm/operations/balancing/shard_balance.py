"""Read a snapshot of the shards on their nodes, and plan moves that balance the shards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from django.utils import timezone

from sharded_orm import runtime
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.fleet import FleetSnapshot, balance_problem
from sharded_orm.operations.balancing.options import BalanceOptions
from sharded_orm.operations.balancing.planner import plan_balance
from sharded_orm.operations.balancing.problem import BalancePlan
from sharded_orm.operations.balancing.recent_moves import recent_moves
from sharded_orm.operations.balancing.step import BalanceStep, steps_of
from sharded_orm.topology.model import Shard, Topology


@dataclass(frozen=True)
class ShardBalance:
    """A plan to move shards between nodes.

    :param bytes: maps the alias of each shard to its size in bytes.
    :param recent: aliases of shards that stay because they have moved a short time ago.
    """

    plan: BalancePlan
    steps: tuple[BalanceStep, ...]
    shards: dict[str, Shard]
    bytes: dict[str, int]
    recent: frozenset[str]


def plan_shards(group: str | None = None, options: BalanceOptions | None = None) -> ShardBalance:
    """Plan moves of shards between nodes. Changes nothing.

    :param group: the group whose shards may move; None for all groups. The shards of other groups
        stay, but their sizes count.
    :raises BalanceRefused: there is no plan; every reason is listed.
    :raises UnknownShard: there is no such group.
    :raises TopologyError: the source of the topology does not answer.

    Cost:

    - One query per node.
    - If the size of a shard is its number of keys, one query of the directory (the table that
      records the shard of each key).
    - To find recent moves, one round trip to the source of the topology for each version of the
      topology within the cool-down.
    """
    options = options or BalanceOptions()
    # Refresh first, because this process might use an outdated copy of the topology, from its disk.
    runtime.refresh()
    topology = runtime.topology()
    groups = [runtime.group(group).name] if group is not None else list(topology.groups)
    sizes = measure.shard_sizes(topology)
    measured = {
        measure.BYTES: lambda: {alias: float(size.bytes) for alias, size in sizes.items()},
        measure.ROWS: lambda: measure.rows_of(sizes),
        measure.KEYS: lambda: measure.key_counts(groups),
        measure.LOAD: lambda: measure.shard_loads(topology, options.load or ""),
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
    """Return the plan for balancing the shards of ``groups`` in ``snapshot``. A pure function."""
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
