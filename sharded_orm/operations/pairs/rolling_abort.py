"""Abort a rolling upgrade: give the old schema back to the shards of the unfinished round.

An abort is possible until the second side begins to get the new schema. If the shards are active on
the side with the new schema already, they must become active on the other side again. Values of new
columns and rows of new tables have no place in the old schema of that other side. So writes are
stopped, and a check makes sure that there are no such values and rows, before the other side
executes the changes that it has received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharded_orm import database_settings, runtime
from sharded_orm.exceptions import LeaseLost
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import AbortRefused, PairRefused
from sharded_orm.operations.migrate.migration_run import MigrationRequest, Progress
from sharded_orm.operations.pairs import KIND as SWITCH
from sharded_orm.operations.pairs import replication_check, switch_runner
from sharded_orm.operations.pairs.pair_servers import open_pair
from sharded_orm.operations.pairs.plan import SideChange
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, UpgradeRound
from sharded_orm.operations.pairs.rolling_upgrade import RollingOptions
from sharded_orm.operations.pairs.round_steps import RoundSteps, undoing
from sharded_orm.operations.pairs.schema_return import return_schema, shard_connection
from sharded_orm.operations.pairs.upgrade_state import (
    KIND,
    can_be_aborted,
    steps_of,
    unfinished,
)
from sharded_orm.operations.promotion import cached_rows
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING, refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide


def abort(
    first: str,
    second: str,
    options: RollingOptions,
    progress: Progress,
    stopping: Stopping,
    tell: Callable[[str], None],
) -> UpgradeRound | None:
    """Undo the unfinished round of a rolling upgrade, and return the round. Return None if no round
    has begun.

    Shards whose round is finished keep the new schema. After any interruption, call this again.

    :param tell: called with a line for the operator before each step.
    :raises AbortRefused: there is no such upgrade, or the upgrade must be finished, because it is
        too late for an abort. Nothing was changed.
    :raises PairRefused: a side cannot get the old schema back, or the sides differ.
    :raises OperationHeld: another process works on the shards.
    """
    with journal.hold_run(KIND, EVERYTHING, {"pair": [first, second]}) as run:
        if "done" not in run.arguments:
            run.finish("refused", "nothing to abort")
        if run.finished or set(run.arguments["pair"]) != {first, second}:
            raise AbortRefused([f"no rolling upgrade of {first!r} and {second!r} is unfinished"])
        if run.arguments.get("given_up"):
            raise AbortRefused([unfinished(first, second)])
        refuse_conflicts(run, within=SWITCH)
        plan = RollingPlan.from_json(run.arguments)
        with open_pair(first, second) as servers:
            steps = RoundSteps(
                run, plan, servers, options.waves, options.timeout, progress, stopping, tell
            )
            upgrade_round = _current_round(run, plan)
            if upgrade_round is not None:
                _Abort(steps, upgrade_round).run()
        run.finish("aborted")
    return upgrade_round


def _current_round(run: journal.JournalRun, plan: RollingPlan) -> UpgradeRound | None:
    """Return the round that has begun and is not finished; None if there is none.

    :raises AbortRefused: the second side has begun to get the new schema.
    """
    if not can_be_aborted(run.arguments):
        raise AbortRefused(
            [
                "the side with the old schema has begun to get the new one: finish the upgrade by the same"
                " command without --abort"
            ]
        )
    count, done = len(steps_of(run.arguments)), int(run.arguments["done"])
    number = done // count
    is_begun = int(run.arguments.get("begun", done)) >= number * count
    return plan.rounds[number] if is_begun else None


@dataclass(frozen=True)
class _Abort:
    """Undoes one round. After an interruption, each part can be executed again."""

    steps: RoundSteps
    round: UpgradeRound

    @property
    def _old(self) -> MySQLPairSide:
        """The side with the old schema. It was active when the round began."""
        return self.steps.side(self.round.active)

    @property
    def _new(self) -> MySQLPairSide:
        return self.steps.side(self.round.passive)

    def run(self) -> None:
        steps, plan = self.steps, self.steps.plan
        if problems := list(replication_check.server_problems(steps.servers)):
            raise PairRefused(problems)
        steps.require_open()
        if not (plan.stop_writes or steps.run.arguments.get("aborting")):
            for group in self.round.numbers:
                # A switch that was broken off is ended.
                switch_runner.repair(group, options=SwitchOptions(is_upgrade=True), tell=steps.tell)
        runtime.refresh()
        steps.run.note(aborting=True)
        if any(shard.node == self._new.name for shard in self.round.shards()):
            steps.tell(f"switch back: {self.round} become active on {self._old.name} again")
            self._switch_back()
        if (left := steps.run.arguments.get("left_side")) is not None:
            runtime.refresh()
            steps.open(self.round.shards())
            cached_rows.invalidate(left, steps.tell, steps.tell)
            steps.run.note(left_side=None)
        steps.tell(f"old schema: {self.round} on {self._new.name}")
        if not plan.stop_writes:
            steps.hold(self._new, self._old)
        steps.run.note(returning=True)
        return_schema(
            self.round.shards(),
            self._new,
            self._old,
            copies_rows=plan.stop_writes,
            check=steps.check,
            confirm=steps.run.note,
        )
        steps.close_passive(self.round, self._new)
        self._forget_steps()
        steps.tell(f"compare: {self._new.name} is compared with {self._old.name}")
        for replica, source in ((self._new, self._old), (self._old, self._new)):
            steps.catch_up(replica, source)
        steps.compare(self.round, self._old, self._new, same_schema=True)
        # Let the shards take writes again. The writes may have been stopped by the upgrade, or by
        # an earlier abort that was interrupted.
        steps.open(self.round.shards())

    def _forget_steps(self) -> None:
        """In the journal, mark the unfinished migrations of the new side as done.

        The side has the old schema again. So no process must continue a migration that was
        interrupted there.
        """
        request = MigrationRequest(self.steps.plan.options, side=self._new.name)
        for group in self.round.numbers:
            subject = request.subject(group)
            with journal.hold_run(request.kind, subject, {}, resume=False) as run:
                aliases = [step.alias for step in journal.open_steps(request.kind, subject)]
                run.create_steps(aliases)
                for alias in aliases:
                    run.step(alias).mark_done()
                run.finish("aborted")

    # ##### After the switch #####

    def _switch_back(self) -> None:
        steps = self.steps
        steps.hold(self._old, self._new)
        shards = [shard for shard in self.round.shards() if shard.node == self._new.name]
        changes = [SideChange(s.group, s.number, s.node, self._old.name) for s in shards]
        try:
            for shard in shards:
                steps.check()
                steps.close(shard)
            if problems := list(self._lost_values(shards)):
                raise AbortRefused(problems)
            # Let the side with the old schema execute the changes of the other side. All of them
            # fit into the old schema: the check above has found no others, and both sides refuse
            # writes of these shards now.
            steps.catch_up(self._old, self._new)
        except LeaseLost:
            raise
        except Exception as exc:
            with undoing(exc):
                steps.run.note()  # another process may go on with the abort
                if self._rule_out(changes):
                    steps.hold(self._old, self._new)
                    steps.open(shards)
                    steps.run.note(aborting=False, left_side=None)
            raise
        # Until all processes use the new topology, they may read outdated rows on the side that was
        # active, and put them into the cache. Note this in the journal, so that the cache is
        # invalidated later.
        steps.run.note(left_side=self._new.name)
        self._publish(changes)

    def _rule_out(self, changes: list[SideChange]) -> bool:
        """Make sure that ``changes`` are not published later. Return False if they are published
        already.

        An earlier process may have published them before it was killed. Or it is only paused, and
        would publish them later.
        """
        if self.steps.run.arguments.get("left_side") is None:
            return True
        return topology.rule_out(
            lambda document: any(change.is_published(document) for change in changes),
            f"{self.round} stay active on {self._new.name}",
        )

    def _lost_values(self, shards: list[Shard]) -> Iterator[str]:
        """Yield a sentence for each table whose rows do not fit into the old schema.

        For example, rows have values of a new column, for which the old schema has no place.
        """
        pair = (self._new.name, self._old.name)
        for shard in shards:
            self.steps.check()
            definitions = []
            for side in (self._old, self._new):
                with shard_connection(shard, side, pair) as connection:
                    definitions.append(connection.schema_snapshot().definitions)
            old, new = definitions
            for table in old:
                if demands := self._new.demands(old[table], new.get(table, "")):
                    yield (
                        f"{shard.alias}: {table} refuses rows on {self._old.name!r} that {self._new.name!r}"
                        f" accepts ({', '.join(demands)}): finish the upgrade"
                    )
            yield from self._new_values(shard)

    def _new_values(self, shard: Shard) -> Iterator[str]:
        schema = shard.schema
        old, new = (side.columns([schema]).get(schema, {}) for side in (self._old, self._new))
        with self._new.rows(database_settings.operator_settings(self._new.name) or {}) as rows:
            for table, described in new.items():
                columns = [str(column[0]) for column in described[len(old.get(table, ())) :]]
                if table not in old and rows.has_values(schema, table, []):
                    what = "rows"
                elif table in old and columns and rows.has_values(schema, table, columns):
                    what = f"values of {', '.join(columns)}"
                else:
                    continue
                yield (
                    f"{shard.alias}: {table} on {self._new.name!r} has {what}, for which the old schema has"
                    " no place, because a new release writes already: finish the upgrade"
                )

    def _publish(self, changes: list[SideChange]) -> None:
        def edit(document: Document) -> Document:
            self.steps.run.note()
            for change in changes:
                document = change.publish_in(document)
            return document

        topology.change(edit, f"{self.round} active on {self._old.name} again")
