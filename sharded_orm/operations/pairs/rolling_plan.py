"""Plan a rolling upgrade: which shards get the new schema on which side first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db import router
from django.db.migrations.operations import RunPython, RunSQL

from sharded_orm import runtime
from sharded_orm.operations.exceptions import PairRefused, RollingRefused
from sharded_orm.operations.migrate.applied_state import applied_state
from sharded_orm.operations.migrate.plan import MigrationPlan, Piece, Unit
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.pairs.pair_servers import shards_of
from sharded_orm.operations.pairs.schema_compatibility import PlannedOperation, examine
from sharded_orm.operations.runs.journal import one_line
from sharded_orm.operations.selection import Selected, numbers_text
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class UpgradeRound:
    """The shards that are active on one side of a pair. They get the new schema on the other side
    first.

    :param numbers: maps the name of each group to the numbers of its shards.
    """

    active: str
    passive: str
    numbers: Mapping[str, Sequence[int]]

    def shards(self) -> list[Shard]:
        """Return the shards of the round. Their nodes are those of the present topology."""
        return [shard for selected in self.selected() for shard in selected.shards]

    def selected(self) -> list[Selected]:
        groups = runtime.topology().groups
        return [
            Selected(groups[name], [groups[name].shard(number) for number in numbers])
            for name, numbers in self.numbers.items()
        ]

    def __str__(self) -> str:
        return ", ".join(f"{s.group.name} {numbers_text(s.shards)}" for s in self.selected())


@dataclass(frozen=True)
class RollingPlan:
    """The plan of a rolling upgrade of one pair.

    :param migrations: the names of the migrations that run.
    :param kept_defaults: new columns that keep a default in the database. Old releases, which do
        not know these columns, can then still insert rows.
    :param stop_writes: whether shards refuse writes until both of their sides have the new schema.
    """

    first: str
    second: str
    options: MigrateOptions
    rounds: Sequence[UpgradeRound]
    migrations: Sequence[str]
    kept_defaults: Sequence[str]
    stop_writes: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "pair": [self.first, self.second],
            "targets": list(self.options.targets),
            "rounds": [asdict(each) for each in self.rounds],
            "migrations": list(self.migrations),
            "kept_defaults": list(self.kept_defaults),
            "stop_writes": self.stop_writes,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RollingPlan:
        first, second = content["pair"]
        app, migration = content["targets"]
        return cls(
            first,
            second,
            MigrateOptions(targets=(app, migration)),
            tuple(UpgradeRound(**each) for each in content["rounds"]),
            content["migrations"],
            content["kept_defaults"],
            content.get("stop_writes", False),
        )


def find_plan(
    first: str, second: str, options: MigrateOptions, *, stop_writes: bool = False
) -> RollingPlan:
    """Return the plan that brings all shards of the pair to the target. Changes nothing.

    :param stop_writes: whether shards refuse writes until both of their sides have the new schema.
    :raises RollingRefused: an operation must not run on one side while the other has the old
        schema. The message lists each such operation with the reason and the remedy.
    :raises PairRefused: the topology has no shard on the pair, or a shard does not answer.
    :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.

    Cost: that of :func:`applied_state`.
    """
    shards = shards_of(first, second)
    if not shards:
        raise PairRefused(
            [f"no range has its shards on {first!r} and {second!r}; see 'manage.py topology show'"]
        )
    behind: list[Shard] = []
    problems: list[str] = []
    refused: list[str] = []
    kept: list[str] = []
    migrations: list[str] = []
    plans: list[MigrationPlan] = []
    for group in dict.fromkeys(shard.group for shard in shards):
        planner = Planner(options)
        state = applied_state(planner, [shard for shard in shards if shard.group == group])
        behind += state.behind
        problems += [f"{shard.alias} does not exist" for shard in state.missing]
        problems += [f"{alias}: {one_line(exc)}" for alias, exc in state.unreachable.items()]
        plans += planner.plans
        for plan in planner.plans:
            migrations += map(str, plan.units)
            refusals, kept_defaults = _examine(plan, stop_writes)
            refused += refusals
            kept += kept_defaults
    if problems:
        raise PairRefused(problems)
    if refused:
        if not stop_writes and not any(_examine(plan, True)[0] for plan in plans):
            refused.append(
                "--stop-writes does all of this, and shards refuse writes meanwhile; see its --plan"
            )
        raise RollingRefused(dict.fromkeys(refused))
    rounds = [
        UpgradeRound(active, passive, numbers)
        for active, passive in ((first, second), (second, first))
        if (numbers := _numbers(shard for shard in behind if shard.node == active))
    ]
    return RollingPlan(first, second, options, rounds, _once(migrations), _once(kept), stop_writes)


def _once(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _numbers(shards: Iterator[Shard]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for shard in shards:
        numbers.setdefault(shard.group, []).append(shard.number)
    return numbers


def _examine(plan: MigrationPlan, stops_writes: bool) -> tuple[list[str], list[str]]:
    if plan.backwards:
        return [
            f"{plan.units[0]} would be undone: rows of the new schema do not fit into the old one."
            " Instead, write a migration that leads forward"
        ], []
    compatibility = examine(_operations(plan), stops_writes=stops_writes)
    return list(compatibility.refusals), list(map(str, compatibility.kept_defaults))


def _operations(plan: MigrationPlan) -> Iterator[PlannedOperation]:
    """Yield the operations of the plan that change tables on shards, in their order."""
    for number, unit in enumerate(plan.units):
        for index, piece in enumerate(unit.pieces(plan.state_before(number))):
            if _runs_on_shards(unit, index, piece):
                yield PlannedOperation(unit.migration.app_label, str(unit), piece)


def _runs_on_shards(unit: Unit, index: int, piece: Piece) -> bool:
    operation = piece.operation
    if isinstance(operation, (RunPython, RunSQL)):
        return unit.runs_per_shard(index)
    model = getattr(operation, "model_name", None) or getattr(operation, "name", None)
    if type(operation).__module__.partition(".")[0] != "django" or not isinstance(model, str):
        # The tables that this operation changes are not known. Assume that they are on shards.
        return True
    label = unit.migration.app_label
    return bool(router.allow_migrate(unit.alias, label, model_name=model.lower()))
