"""Make half of the shards of each pair active on each of its two servers, so that both have work
(Yupoo, Y9).

The plan depends on the topology alone. Each of its steps is one call of
:func:`~sharded_orm.operations.pairs.switch_runner.switch_sides`. After an interruption, make a new
plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sharded_orm import runtime
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs import KIND, switch_runner
from sharded_orm.operations.pairs.pair_servers import shards_by_pair
from sharded_orm.operations.pairs.report import SwitchReport, Tell
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.topology.model import Shard

#: The largest number of shards in one step. Before a step, all its shards are checked.
BATCH: Final = 64


@dataclass(frozen=True)
class SideStep:
    """Shards of one group that change their active side in one step.

    :param source: the node that is active now.
    :param target: the node that becomes active.
    :param numbers: the numbers of the shards, ascending.
    """

    group: str
    source: str
    target: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class SideBalance:
    """Which shards of one pair change their active side, so that each server is active for half of
    them.

    :param nodes: the names of the two nodes.
    :param before: how many shards are active on each node now.
    :param after: how many shards are active on each node after all steps.
    :param pinned: the number of shards that must not change, because their range is pinned.
    """

    nodes: tuple[str, str]
    before: tuple[int, int]
    after: tuple[int, int]
    pinned: int
    steps: tuple[SideStep, ...]


def plan_sides(group: str | None = None) -> list[SideBalance]:
    """Plan which shards change their active side, so that each server of a pair is active for half.

    After the change, this is so for the shards of each group, and for all shards together. As few
    shards as possible change. Shards in a pinned range stay as they are. Sends no query.

    :param group: the group whose shards are planned; by default all groups.
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
    # If a group has an odd number of shards, one side gets one more than the other. If there are
    # several such groups, the extra shards must not all be on the same side.
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
    """The shards of one group on one pair. The two sides have the indexes 0 and 1 in the lists."""

    def __init__(self) -> None:
        #: For each side, the numbers of the shards that are active there and may change, ascending.
        self._movable: tuple[list[int], list[int]] = ([], [])
        #: For each side, the numbers of the shards that leave it.
        self.moved: tuple[list[int], list[int]] = ([], [])
        #: The number of shards that are active on side 0, minus the number on side 1.
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
        """Plan that ``count`` shards leave ``side``. If fewer shards are movable, all these leave.

        The shards with the highest numbers leave side 0, and those with the lowest numbers leave
        side 1. So shards with consecutive numbers stay together, and the topology needs few ranges.
        """
        movable = self._movable[side]
        for _ in range(min(count, len(movable))):
            self.moved[side].append(movable.pop(-1 if side == 0 else 0))
            self.excess += -2 if side == 0 else 2


def balance_sides(
    group: str | None,
    *,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> list[SwitchReport]:
    """Make half of the shards of each pair active on each of its servers, while the site works.

    First ends switches that were interrupted. Stops after a step that fails. If this process is
    killed, call the function again.

    :param group: the group whose shards are balanced; by default all groups.
    :returns: the report of each step that was begun.
    :raises: the errors of :func:`plan_sides` and of :func:`switch_runner.switch_sides`.
    """
    runtime.refresh()
    reports = []
    stopping = stopping or Stopping()
    for name in _interrupted(plan_sides(group)):
        reports.append(switch_runner.repair(name, tell=tell))
    # Make the plan anew, because the end of an interrupted switch may have changed the active side
    # of a shard.
    for step in [step for balance in plan_sides(group) for step in balance.steps]:
        if stopping() or not all(report.ok for report in reports):
            break
        reports.append(
            switch_runner.switch_sides(
                step.group,
                step.numbers,
                to_side=step.target,
                stopping=stopping,
                tell=tell,
            )
        )
    return reports


def _interrupted(balances: Sequence[SideBalance]) -> Iterator[str]:
    """Yield the names of groups in which a switch was interrupted.

    Only groups with shards on the pairs of ``balances`` are considered.
    """
    topology, pairs = runtime.topology(), {frozenset(balance.nodes) for balance in balances}
    for name, group in topology.groups.items():
        if any(r.is_pair and {r.primary, r.replica} in pairs for r in group.ranges):
            last = journal.last_run(KIND, name)
            if last is not None and last.finished_at is None:
                yield name
