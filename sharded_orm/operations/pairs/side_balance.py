"""Make half of the shards of each pair active on each of its two servers, so that both work (Yupoo,
Y9).

The plan depends on the topology alone, and each of its steps is one call of
:func:`~sharded_orm.operations.pairs.switch_runner.switch_sides`. After an interruption, plan again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sharded_orm import runtime
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs import KIND, switch_runner
from sharded_orm.operations.pairs.pair_servers import shards_by_pair
from sharded_orm.operations.pairs.report import SwitchOptions, SwitchReport, Tell
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.topology.model import Shard

#: The largest number of shards of one step. Before each step, all its shards are checked.
BATCH: Final = 64


@dataclass(frozen=True)
class SideStep:
    """Shards of one group that change their active side by one run.

    :param source: the node that is active now.
    :param target: the node that is to be active.
    :param numbers: the numbers of the shards, ascending.
    """

    group: str
    source: str
    target: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class SideBalance:
    """The plan for one pair.

    :param nodes: the two nodes.
    :param before: how many shards are active on each node now.
    :param after: how many shards are active on each node after all steps.
    :param pinned: the number of shards that stay where they are, because their range is pinned.
    """

    nodes: tuple[str, str]
    before: tuple[int, int]
    after: tuple[int, int]
    pinned: int
    steps: tuple[SideStep, ...]


def plan_sides(group: str | None = None) -> list[SideBalance]:
    """Return which shards must change their side, so that each side of a pair is active for half of
    its shards: for half of each group, and for half of all. Sends no query.

    As few shards as possible change. Those of pinned ranges stay.

    :param group: look at the shards of this group only; by default at those of all groups.
    :raises UnknownShard: there is no such group.
    :raises SwitchRefused: no shard is on a pair.
    """
    groups = runtime.topology().groups
    names = list(groups) if group is None else [runtime.group(group).name]
    by_pair = shards_by_pair(shard for name in names for shard in groups[name].shards())
    if not by_pair:
        where = "of the topology" if group is None else f"of group {group!r}"
        raise SwitchRefused(
            [f"no range {where} is on a pair: a range of a pair has 'pair' and 'active'"]
        )
    return [_plan(nodes, by_pair[nodes]) for nodes in sorted(by_pair)]


def _plan(nodes: tuple[str, str], shards: Sequence[Shard]) -> SideBalance:
    topology = runtime.topology()
    sides: dict[str, _GroupSides] = {}
    for shard in shards:
        is_pinned = topology.groups[shard.group].range_of(shard.number).pinned
        sides.setdefault(shard.group, _GroupSides()).add(shard, nodes.index(shard.node), is_pinned)
    for each in sides.values():
        each.move_half()
    # If a group has an odd number of shards, one side has one more. Over several groups, these
    # extra shards must not all be on one side.
    for each in sides.values():
        excess = sum(other.excess for other in sides.values())
        if abs(excess) > 1 and each.excess == (1 if excess > 0 else -1):
            each.move(0 if excess > 0 else 1, 1)
    first = sum(shard.node == nodes[0] for shard in shards)
    moved = sum(len(each.moved[0]) - len(each.moved[1]) for each in sides.values())
    return SideBalance(
        nodes,
        (first, len(shards) - first),
        (first - moved, len(shards) - first + moved),
        sum(each.pinned for each in sides.values()),
        tuple(
            SideStep(group, nodes[side], nodes[1 - side], tuple(numbers))
            for group, each in sides.items()
            for side in (0, 1)
            for numbers in batched(sorted(each.moved[side]), BATCH)
        ),
    )


class _GroupSides:
    """The shards of one group that are active on each side of a pair: side 0 and side 1."""

    def __init__(self) -> None:
        #: The numbers of the shards that may change, ascending, by their active side.
        self._movable: tuple[list[int], list[int]] = ([], [])
        #: The numbers of the shards that change, by the side that they leave.
        self.moved: tuple[list[int], list[int]] = ([], [])
        #: How many shards more are active on side 0 than on side 1.
        self.excess = 0
        self.pinned = 0

    def add(self, shard: Shard, side: int, is_pinned: bool) -> None:
        self.excess += 1 - 2 * side
        if is_pinned:
            self.pinned += 1
        else:
            self._movable[side].append(shard.number)

    def move_half(self) -> None:
        self.move(0 if self.excess > 0 else 1, abs(self.excess) // 2)

    def move(self, side: int, count: int) -> None:
        """Let ``count`` shards leave ``side``, or as many as may.

        The last ones leave side 0, and the first ones leave side 1, so that the topology has few ranges.
        """
        movable = self._movable[side]
        for _ in range(min(count, len(movable))):
            self.moved[side].append(movable.pop(-1 if side == 0 else 0))
            self.excess += -2 if side == 0 else 2


def balance_sides(
    group: str | None,
    *,
    options: SwitchOptions | None = None,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> list[SwitchReport]:
    """Make half of the shards of each pair active on each side, while the site works.

    Ends switches that were broken off first. Stops after a step that fails. If this process is killed,
    call the function again: it goes on.

    :param group: look at the shards of this group only; by default at those of all groups.
    :returns: the report of each step that was begun.
    :raises: the errors of :func:`plan_sides` and of :func:`switch_runner.switch_sides`.
    """
    runtime.refresh()
    reports = []
    stopping = stopping or Stopping()
    for name in _interrupted(plan_sides(group)):
        reports.append(switch_runner.repair(name, tell=tell))
    # A switch that was ended may have changed the side of its shard.
    for step in [step for balance in plan_sides(group) for step in balance.steps]:
        if stopping() or not all(report.ok for report in reports):
            break
        reports.append(
            switch_runner.switch_sides(
                step.group,
                step.numbers,
                to_side=step.target,
                options=options,
                stopping=stopping,
                tell=tell,
            )
        )
    return reports


def _interrupted(balances: Sequence[SideBalance]) -> Iterator[str]:
    """Yield the groups with shards on these pairs in which a switch was broken off."""
    topology, pairs = runtime.topology(), {frozenset(balance.nodes) for balance in balances}
    for name, group in topology.groups.items():
        if any(r.is_pair and {r.primary, r.replica} in pairs for r in group.ranges):
            last = journal.last_run(KIND, name)
            if last is not None and last.finished_at is None:
                yield name
