"""A rolling upgrade: the shards of a pair get a new schema while the application writes (Yupoo,
Y10).

The plan has rounds. In each round, one side is passive for some shards. It gets the new schema,
executes the changes that have arrived meanwhile, and is compared with the active side. Then it
becomes the active side, and the other side gets the new schema.

At first, only one side has the new schema (the new side). Rows of the old schema fit into the new
schema, but rows of the new schema may not fit into the old one. So before the switch, the new side
receives and executes the changes of the old side. After the switch, the old side only receives
changes, and executes them when it also has the new schema. During the upgrade, only changes of rows
are replicated, and no statements that change a schema.

With the option ``stop_writes``, no row flows between two schemas: the shards of a round refuse
writes on both sides until both have the new schema and were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sharded_orm import runtime
from sharded_orm.exceptions import LeaseLost
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.migrate.migration_run import Progress
from sharded_orm.operations.migrate.planner import MigrateOptions
from sharded_orm.operations.pairs import KIND as SWITCH
from sharded_orm.operations.pairs import replication_check, switch_runner
from sharded_orm.operations.pairs.pair_servers import open_pair, shards_of
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, UpgradeRound, find_plan
from sharded_orm.operations.pairs.round_steps import RoundSteps, undoing
from sharded_orm.operations.pairs.status import pair_states
from sharded_orm.operations.pairs.upgrade_state import KIND, steps_of, unfinished
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING, refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping, Waves

#: The default number of seconds in which a side must execute the changes that it does not have yet.
TIMEOUT: Final = 600.0
# How many bytes of a table a server with a slow disk rebuilds in a second, and how many it reads.
# With these numbers, estimate_pauses() estimates for how long writes will wait.
_REBUILT: Final = 20e6
_READ: Final = 100e6


@dataclass(frozen=True)
class RollingOptions:
    """The options of a rolling upgrade.

    :param until: the name of a step: the upgrade stops after it, and the operator continues it
        later. "" means not to stop.
    :param stop_writes: whether shards refuse writes until both of their sides have the new schema.
        Then more kinds of operations are possible.
    :param timeout: seconds in which a side must execute the changes that it does not have yet.
    """

    migrate: MigrateOptions
    until: str = ""
    stop_writes: bool = False
    timeout: float = TIMEOUT
    waves: Waves = field(default_factory=Waves)


@dataclass(frozen=True)
class RollingReport:
    """The outcome of a rolling upgrade of one pair.

    :param next_step: the name of the step with which another call continues; "" if the upgrade is
        finished.
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

    After any interruption, another call continues with the interrupted step.

    :param tell: called with a line for the operator before each step.
    :raises RollingRefused: a migration must not run on one side while the other has the old schema.
    :raises PairRefused: the pair is not in order, or the sides differ.
    :raises SwitchRefused: one step of the upgrade changes the active side of the shards, and this
        is not possible.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises OperationHeld: another process works on the shards.
    :raises OperationStopped: ``stopping`` was set. Another call continues.
    """
    with journal.hold_run(KIND, EVERYTHING, {"pair": [first, second]}) as run:
        # The step "switch" of this upgrade may have been interrupted. An interrupted switch
        # (``within``) does not count as a conflict, because the upgrade itself ends it.
        refuse_conflicts(run, within=SWITCH if "done" in run.arguments else None)
        if "done" in run.arguments:
            plan = _require_same(run, first, second, options)
        else:
            try:
                replication_check.require_sound(first, second)
                _require_fences(first, second)
                plan = find_plan(first, second, options.migrate, stop_writes=options.stop_writes)
                _require_switches(plan)
            except Exception as exc:
                # Finish the run, because an unfinished run makes all other operations refuse to
                # begin.
                run.finish("refused", journal.one_line(exc))
                raise
            run.note(**plan.to_json(), done=0)
        with open_pair(first, second) as servers:
            steps = RoundSteps(
                run, plan, servers, options.waves, options.timeout, progress, stopping, tell
            )
            return RollingReport(plan, _Upgrade(steps).proceed(options.until))


def _require_fences(first: str, second: str) -> None:
    """Check that the passive sides refuse writes. Otherwise the application could write on both
    sides.

    :raises PairRefused: a passive side accepts writes, or an active side refuses them.
    """
    problems = [p for state in pair_states(shards_of(first, second)) for p in state.problems]
    if problems:
        raise PairRefused(problems)


def _require_switches(plan: RollingPlan) -> None:
    """Check that the shards of each round can change their active side later.

    This is checked before the upgrade begins. Otherwise one side could have the new schema already
    when it turns out that this side cannot become active, and the upgrade could not be finished.

    :raises: the errors of :func:`switch_runner.check_switch`.
    """
    for each in plan.rounds:
        for group, numbers in each.numbers.items():
            switch_runner.check_switch(group, numbers, to_side=each.passive)


def _require_same(
    run: journal.JournalRun, first: str, second: str, options: RollingOptions
) -> RollingPlan:
    plan = RollingPlan.from_json(run.arguments)
    if run.arguments.get("given_up"):
        raise PairRefused([unfinished(plan.first, plan.second)])
    if run.arguments.get("aborting"):
        raise PairRefused(["the upgrade is being aborted: finish that by --rolling --abort"])
    if plan.stop_writes != options.stop_writes:
        how = "with" if plan.stop_writes else "without"
        raise PairRefused([f"the upgrade that was broken off was begun {how} --stop-writes"])
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


def estimate_pauses(plan: RollingPlan) -> list[float]:
    """Estimate for how many seconds writes will wait in each round.

    The estimate is rough: it assumes that every table is rebuilt. Two queries for each round.

    :raises PairRefused: no connection to a server can be opened.
    """
    with open_pair(plan.first, plan.second) as servers:
        pauses = []
        for each in plan.rounds:
            schemas = [shard.schema for shard in each.shards()]
            sizes = [side.data_bytes(schemas) for side in servers.both]
            pauses.append(sum(sizes) / _REBUILT + max(sizes) / _READ + 1)
    return pauses


def describe(step: str, upgrade_round: UpgradeRound, *, stop_writes: bool = False) -> str:
    """Describe for an operator what a step of a round does."""
    active, passive = upgrade_round.active, upgrade_round.passive
    if stop_writes:
        return {
            "stop-writes": f"{upgrade_round} refuse writes on both sides; {passive} executes what it lacks",
            "migrate-passive": f"{upgrade_round} on {passive}",
            "migrate-active": f"{upgrade_round} on {active}",
            "compare": f"{passive} is compared with {active}",
            "open": f"{upgrade_round} take writes on {active} again",
        }[step]
    return {
        "migrate-passive": f"{upgrade_round} on {passive}, which keeps replicated rows for later",
        "compare": f"{passive} executes what it lacks, and is compared with {active}",
        "switch": f"{upgrade_round} become active on {passive}; {active} keeps replicated rows for later",
        "migrate-other": f"{upgrade_round} on {active}",
        "finish": f"{active} executes what it lacks, and is compared with {passive}",
    }[step]


class _Upgrade:
    """Executes the steps of one rolling upgrade. It begins with the step that the journal names as
    the next.
    """

    def __init__(self, steps: RoundSteps) -> None:
        self._steps = steps
        self._run = steps.run
        self._plan = steps.plan
        self._names = steps_of(steps.run.arguments)

    def proceed(self, until: str) -> str:
        """Execute the steps up to the step ``until``, or all if it is "".

        Return the name of the next step; "" if the upgrade is finished.
        """
        total = len(self._plan.rounds) * len(self._names)
        while (done := int(self._run.arguments["done"])) < total:
            self._steps.check()
            number, step = divmod(done, len(self._names))
            name, upgrade_round = self._names[step], self._plan.rounds[number]
            self._require_placement(upgrade_round, name)
            description = describe(name, upgrade_round, stop_writes=self._plan.stop_writes)
            self._steps.tell(f"{name}: {description}")
            self._run.note(begun=done)
            self._execute(name, upgrade_round)
            self._run.note(done=done + 1)
            if name == until and done + 1 < total:
                return self._names[(done + 1) % len(self._names)]
        self._run.finish()
        return ""

    def _require_placement(self, upgrade_round: UpgradeRound, name: str) -> None:
        if problems := list(replication_check.server_problems(self._steps.servers)):
            raise PairRefused(problems)
        # Another process may have published a new topology meanwhile.
        runtime.refresh()
        is_switched = name in ("migrate-other", "finish")
        expected = upgrade_round.passive if is_switched else upgrade_round.active
        elsewhere = [shard.alias for shard in upgrade_round.shards() if shard.node != expected]
        # If the next step is "switch", this is not an error: the step may have been interrupted
        # earlier, when it had changed the active side of some shards already.
        if elsewhere and name != "switch":
            raise PairRefused(
                [
                    f"{', '.join(elsewhere[:3])} should be active on {expected!r} at this step: somebody"
                    f" has switched them. Switch them back to {expected!r}, and run the command again"
                ]
            )

    # ##### Steps: each can be executed again after an interruption #####

    def _execute(self, name: str, upgrade_round: UpgradeRound) -> None:
        steps = self._steps
        active, passive = steps.side(upgrade_round.active), steps.side(upgrade_round.passive)
        if self._plan.stop_writes:
            if name == "stop-writes":
                self._stop_writes(upgrade_round)
            elif name == "migrate-passive":
                steps.migrate(upgrade_round, passive)
            elif name == "migrate-active":
                steps.migrate(upgrade_round, active)
            elif name == "compare":
                steps.compare(upgrade_round, active, passive, same_schema=True)
            else:
                self._open(upgrade_round)
        elif name == "migrate-passive":
            steps.hold(passive, active)
            steps.migrate(upgrade_round, passive)
        elif name == "compare":
            steps.catch_up(passive, active)
            steps.compare(upgrade_round, active, passive, same_schema=False)
        elif name == "switch":
            steps.hold(active, passive)
            self._switch(upgrade_round)
        elif name == "migrate-other":
            steps.hold(active, passive)
            steps.migrate(upgrade_round, active)
        else:
            steps.catch_up(active, passive)
            steps.compare(upgrade_round, passive, active, same_schema=True)

    def _stop_writes(self, upgrade_round: UpgradeRound) -> None:
        steps, shards = self._steps, upgrade_round.shards()
        steps.require_open()
        pause = estimate_pauses(self._plan)[self._plan.rounds.index(upgrade_round)]
        before = self._run.arguments.get("pause")
        measured = "" if before is None else f"; in the round before, they waited {before} s"
        steps.tell(f"writes of {upgrade_round} wait for about {pause:.0f} s{measured}")
        active, passive = steps.side(upgrade_round.active), steps.side(upgrade_round.passive)
        # Compare the sides before writes are stopped. If they differ already, the site can go on to
        # write until this is mended.
        steps.compare(upgrade_round, active, passive, same_schema=True)
        if self._run.arguments.get("stopped_at") is None:
            self._run.note(stopped_at=self._run.now().timestamp())
        try:
            for shard in shards:
                steps.check()
                steps.close(shard)
            replication_check.await_events(passive, active, steps.timeout, steps.check)
        except LeaseLost:
            raise
        except Exception as exc:
            with undoing(exc):
                # Both sides have the old schema still.
                steps.open(shards)
                self._run.note(stopped_at=None)
            raise

    def _open(self, upgrade_round: UpgradeRound) -> None:
        self._steps.require_open()
        self._steps.open(upgrade_round.shards())
        # The step may have been interrupted after this.
        if (stopped_at := self._run.arguments.get("stopped_at")) is not None:
            pause = self._run.now().timestamp() - stopped_at
            self._run.note(pause=round(pause, 1), stopped_at=None)
            self._steps.tell(f"writes of {upgrade_round} waited {pause:.1f} s")

    def _switch(self, upgrade_round: UpgradeRound) -> None:
        options = SwitchOptions(is_upgrade=True)
        for group, numbers in upgrade_round.numbers.items():
            report = switch_runner.switch_sides(
                group,
                numbers,
                to_side=upgrade_round.passive,
                options=options,
                stopping=self._steps.stopping,
                tell=self._steps.tell,
            )
            if report.failures:
                raise PairRefused(
                    f"shard {number} of group {group!r}: {why}"
                    for number, why in report.failures.items()
                )
            self._steps.check()
