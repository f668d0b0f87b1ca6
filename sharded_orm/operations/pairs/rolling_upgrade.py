"""A rolling upgrade: the shards of a pair get a new schema while the application writes (Yupoo, Y10).

For each round of the plan, the side that is passive for some shards gets the new schema, executes what
it lacks, and is compared with the active side. Then it becomes the active side, and the other side gets
the new schema.

While only one side has the new schema, rows flow only from the old schema to the new one: before the
switch from the active side, which has the old one, and after the switch not at all, because the other
side only receives them and waits. Nothing that is written during the upgrade is replicated but rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from sharded_orm import runtime
from sharded_orm.operations.exceptions import OperationStopped, PairRefused
from sharded_orm.operations.migrate.applied_state import applied_state
from sharded_orm.operations.migrate.migration_run import MigrationRequest, Progress, migrate
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.pairs import KIND as SWITCH
from sharded_orm.operations.pairs import replication_check, runner, side_comparison
from sharded_orm.operations.pairs.pair_servers import PairServers, open_pair, shards_of
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, UpgradeRound, find_plan
from sharded_orm.operations.pairs.side_switch import close_side
from sharded_orm.operations.pairs.side_topology import only_on
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.operations.pairs.state import pair_states
from sharded_orm.operations.pairs.upgrade_state import KIND, STEPS
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING, refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping, Waves
from sharded_orm.operations.selection import Selected

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

#: The default number of seconds in which a side must execute what it lacks.
TIMEOUT: Final = 600.0


@dataclass(frozen=True)
class RollingOptions:
    """The options of a rolling upgrade.

    :param until: the step after which the upgrade stops, to be continued later; "" for none.
    :param timeout: seconds in which a side must execute what it lacks.
    """

    migrate: MigrateOptions
    until: str = ""
    timeout: float = TIMEOUT
    waves: Waves = field(default_factory=Waves)


@dataclass(frozen=True)
class RollingReport:
    """The outcome of a rolling upgrade of one pair.

    :param next_step: the step with which the same command goes on; "" if the upgrade is finished.
    """

    plan: RollingPlan
    next_step: str


def upgrade(
    first: str,
    second: str,
    options: RollingOptions,
    progress: Progress,
    stopping: Stopping,
    tell: Callable[[str], None],
) -> RollingReport:
    """Bring all shards of a pair to a new schema, one side after the other. Return the report.

    After any interruption, another call goes on with the step that was interrupted.

    :param tell: called with a line for the operator before each step.
    :raises RollingRefused: a migration must not run on one side first.
    :raises PairRefused: the pair is not in order, or the sides differ.
    :raises SwitchRefused: the sides could not be switched later.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises OperationHeld: another process works on the shards.
    :raises OperationStopped: ``stopping`` was set. Another call goes on.
    """
    with journal.hold_run(KIND, EVERYTHING, {"pair": [first, second]}) as run:
        # The upgrade itself ends a switch that was broken off in its step "switch".
        refuse_conflicts(run, within=SWITCH if "done" in run.arguments else None)
        if "done" in run.arguments:
            plan = _require_same(run, first, second, options)
        else:
            try:
                replication_check.require_sound(first, second)
                _require_fences(first, second)
                plan = find_plan(first, second, options.migrate)
                _require_switches(plan)
            except Exception as exc:
                # An unfinished run would refuse all other operations.
                run.finish("refused", journal.one_line(exc))
                raise
            run.note(**plan.to_json(), done=0)
        with open_pair(first, second) as servers:
            upgrade = _Upgrade(run, plan, servers, options, progress, stopping, tell)
            return RollingReport(plan, upgrade.proceed())


def _require_fences(first: str, second: str) -> None:
    """Check that the passive sides refuse writes. Otherwise both sides could be written.

    :raises PairRefused: a passive side accepts writes, or an active side refuses them.
    """
    problems = [p for state in pair_states(shards_of(first, second)) for p in state.problems]
    if problems:
        raise PairRefused(problems)


def _require_switches(plan: RollingPlan) -> None:
    """Check that each round can switch its shards. Once a side has the new schema, there is no way back.

    :raises: the errors of :func:`runner.check_switch`.
    """
    for each in plan.rounds:
        for group, numbers in each.numbers.items():
            runner.check_switch(group, numbers, to_side=each.passive)


def _require_same(
    run: journal.JournalRun, first: str, second: str, options: RollingOptions
) -> RollingPlan:
    plan = RollingPlan.from_json(run.arguments)
    if {plan.first, plan.second} != {first, second} or plan.options != options.migrate:
        raise PairRefused(
            [
                f"the rolling upgrade of {plan.first!r} and {plan.second!r} to"
                f" {_target(plan)} was broken off: finish it first, by the same command"
            ]
        )
    return plan


def _target(plan: RollingPlan) -> str:
    return " ".join(filter(None, plan.options.targets)) or "all migrations"


def describe(step: str, upgrade_round: UpgradeRound) -> str:
    """Return what a step of a round does, for people."""
    active, passive = upgrade_round.active, upgrade_round.passive
    return {
        "migrate-passive": f"{upgrade_round} on {passive}, which keeps replicated rows for later",
        "compare": f"{passive} executes what it lacks, and is compared with {active}",
        "switch": f"{upgrade_round} become active on {passive}; {active} keeps replicated rows for later",
        "migrate-other": f"{upgrade_round} on {active}",
        "finish": f"{active} executes what it lacks, and is compared with {passive}",
    }[step]


class _Upgrade:
    """Executes the steps of one rolling upgrade, from the step that comes next in the journal."""

    def __init__(
        self,
        run: journal.JournalRun,
        plan: RollingPlan,
        servers: PairServers,
        options: RollingOptions,
        progress: Progress,
        stopping: Stopping,
        tell: Callable[[str], None],
    ) -> None:
        self._run = run
        self._plan = plan
        self._sides = {side.name: side for side in servers.both}
        self._servers = servers
        self._options = options
        self._progress = progress
        self._stopping = stopping
        self._tell = tell

    def proceed(self) -> str:
        """Execute the steps up to ``options.until``, or all. Return the name of the next step."""
        total = len(self._plan.rounds) * len(STEPS)
        while (done := int(self._run.arguments["done"])) < total:
            self._check()
            number, step = divmod(done, len(STEPS))
            name, upgrade_round = STEPS[step], self._plan.rounds[number]
            self._require_placement(upgrade_round, is_switched=step > STEPS.index("switch"))
            self._tell(f"{name}: {describe(name, upgrade_round)}")
            self._execute(name, upgrade_round)
            self._run.note(done=done + 1)
            if name == self._options.until and done + 1 < total:
                return STEPS[(done + 1) % len(STEPS)]
        self._run.finish()
        return ""

    def _check(self) -> None:
        self._run.check()
        if self._stopping():
            raise OperationStopped("Stopped. The same command goes on from here.")

    def _require_placement(self, upgrade_round: UpgradeRound, *, is_switched: bool) -> None:
        if problems := list(replication_check.server_problems(self._servers)):
            raise PairRefused(problems)
        # Another process may have published another topology.
        runtime.refresh()
        expected = upgrade_round.passive if is_switched else upgrade_round.active
        elsewhere = [shard.alias for shard in upgrade_round.shards() if shard.node != expected]
        # An interrupted switch may have moved some shards already.
        interrupted = self._run.arguments["done"] % len(STEPS) == STEPS.index("switch")
        if elsewhere and not interrupted:
            raise PairRefused(
                [
                    f"{', '.join(elsewhere[:3])} should be active on {expected!r} at this step: somebody"
                    f" has switched them. Switch them back to {expected!r}, and run the command again"
                ]
            )

    # ##### Steps: each can be executed again after an interruption #####

    def _execute(self, name: str, upgrade_round: UpgradeRound) -> None:
        active, passive = self._sides[upgrade_round.active], self._sides[upgrade_round.passive]
        if name == "migrate-passive":
            self._hold(passive, active)
            self._migrate(upgrade_round, passive)
        elif name == "compare":
            self._catch_up(passive, active)
            self._compare(upgrade_round, active, passive, upgraded=False)
        elif name == "switch":
            self._hold(active, passive)
            self._switch(upgrade_round)
        elif name == "migrate-other":
            self._hold(active, passive)
            self._migrate(upgrade_round, active)
        else:
            self._catch_up(active, passive)
            self._compare(upgrade_round, passive, active, upgraded=True)

    def _hold(self, replica: MySQLPairSide, source: MySQLPairSide) -> None:
        """Let ``replica`` only receive from ``source``, and execute nothing."""
        link = replica.link_from(source)
        if link is None:
            raise PairRefused(replica.follow_problems(source))
        replica.pause(link)

    def _migrate(self, upgrade_round: UpgradeRound, side: MySQLPairSide) -> None:
        request = MigrationRequest(self._plan.options, self._options.waves, side=side.name)
        with only_on(side, (self._plan.first, self._plan.second)):
            for selected in upgrade_round.selected():
                self._check()
                self._require_planned(selected)
                report = migrate(selected, request, self._progress, self._stopping)
                if report.stopped and not report.failures:
                    raise OperationStopped("Stopped. The same command goes on from here.")
                if not report.ok:
                    raise PairRefused(
                        [
                            *(f"{failure.alias}: {failure.error}" for failure in report.failures),
                            *(f"{shard.alias} does not exist" for shard in report.missing),
                        ]
                    )
        # New tables have no fence yet on the side that is passive.
        for shard in upgrade_round.shards():
            if shard.node != side.name:
                with open_fence(replace(shard, node=side.name), self._run.check) as fence:
                    close_side(fence)

    def _require_planned(self, selected: Selected) -> None:
        """Check that only migrations run that were examined when the upgrade began.

        Another release may have come to this machine since then.
        """
        planner = Planner(self._plan.options)
        applied_state(planner, selected.shards)
        units = {str(unit) for plan in planner.plans for unit in plan.units}
        if others := sorted(units - set(self._plan.migrations)):
            raise PairRefused(
                [
                    f"{', '.join(others)} would run, too, and it was not planned when this upgrade began:"
                    " finish the upgrade from a machine that has the release with which it began"
                ]
            )

    def _catch_up(self, replica: MySQLPairSide, source: MySQLPairSide) -> None:
        link = replica.link_from(source)
        if link is not None:
            replica.resume(link)
        replication_check.await_events(replica, source, self._options.timeout, self._check)

    def _compare(
        self,
        upgrade_round: UpgradeRound,
        active: MySQLPairSide,
        passive: MySQLPairSide,
        *,
        upgraded: bool,
    ) -> None:
        side_comparison.compare(
            active,
            passive,
            [shard.schema for shard in upgrade_round.shards()],
            upgraded=upgraded,
            timeout=self._options.timeout,
            check=self._check,
        )

    def _switch(self, upgrade_round: UpgradeRound) -> None:
        options = SwitchOptions(is_upgrade=True)
        for group, numbers in upgrade_round.numbers.items():
            report = runner.switch_sides(
                group,
                numbers,
                to_side=upgrade_round.passive,
                options=options,
                stopping=self._stopping,
                tell=self._tell,
            )
            if report.failures:
                raise PairRefused(
                    f"shard {number} of group {group!r}: {why}"
                    for number, why in report.failures.items()
                )
            self._check()
