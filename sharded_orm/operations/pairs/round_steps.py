"""Parts of which the steps of a rolling upgrade, and of its abort, consist.

For example, one part waits until a side has executed all changes, and another compares the sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from django.db import OperationalError

from sharded_orm import runtime
from sharded_orm.exceptions import LeaseLost
from sharded_orm.operations.exceptions import OperationStopped, PairRefused
from sharded_orm.operations.migrate.applied_state import applied_state
from sharded_orm.operations.migrate.migration_run import MigrationRequest, Progress, migrate
from sharded_orm.operations.migrate.planner import Planner
from sharded_orm.operations.pairs import replication_check, side_comparison
from sharded_orm.operations.pairs.pair_servers import PairServers
from sharded_orm.operations.pairs.preflight import closed_problem
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, UpgradeRound
from sharded_orm.operations.pairs.side_switch import close_side, remove_fence
from sharded_orm.operations.pairs.side_topology import only_on
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping, Waves
from sharded_orm.operations.selection import Selected
from sharded_orm.topology.model import Shard
from sharded_orm.two_phase.recovery import refuse_prepared

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide
    from sharded_orm.backends.mysql.replication import MySQLReplicationLink


@dataclass(frozen=True)
class RoundSteps:
    """Parts of the steps of an upgrade. After an interruption, each can be executed again. To be
    used by one thread.

    :param timeout: seconds in which a side must execute the changes that it does not have yet.
    :param tell: called with a line for the operator.
    """

    run: journal.JournalRun
    plan: RollingPlan
    servers: PairServers
    waves: Waves
    timeout: float
    progress: Progress
    stopping: Stopping
    tell: Callable[[str], None]

    def side(self, name: str) -> MySQLPairSide:
        return next(side for side in self.servers.both if side.name == name)

    def check(self) -> None:
        """Check that this process may continue.

        :raises LeaseLost: another process has taken over the run.
        :raises OperationStopped: the operator has stopped this process.
        """
        self.run.check()
        if self.stopping():
            raise OperationStopped("Stopped. The same command goes on from here.")

    def require_open(self) -> None:
        """Check that both servers can take writes again after a pause.

        :raises PairRefused: a server is read only, as it is after each restart.
        """
        closed = [side.name for side in self.servers.both if side.status().read_only]
        if closed:
            raise PairRefused(map(closed_problem, closed))

    # ##### Replication #####

    def hold(self, replica: MySQLPairSide, source: MySQLPairSide) -> None:
        """Make ``replica`` receive changes of ``source`` but not execute them, even after a
        restart.
        """
        link = _link(replica, source)
        replica.hold(link)
        # hold() makes the server connect anew. Wait until it is connected, because a switch
        # requires this.
        replica.await_receiving(link)

    def catch_up(self, replica: MySQLPairSide, source: MySQLPairSide) -> None:
        """Make ``replica`` execute the changes that it has received from ``source``. Wait until it
        has executed all changes that ``source`` has written until now.

        :raises PairRefused: replication fails, or it takes too long.
        """
        replica.release(_link(replica, source))
        replication_check.await_events(replica, source, self.timeout, self.check)

    def compare(
        self,
        upgrade_round: UpgradeRound,
        active: MySQLPairSide,
        passive: MySQLPairSide,
        *,
        same_schema: bool,
    ) -> None:
        """Check that both sides have the same rows.

        :raises: the errors of :func:`side_comparison.compare`.
        """
        side_comparison.compare(
            active,
            passive,
            [shard.schema for shard in upgrade_round.shards()],
            upgraded=same_schema,
            timeout=self.timeout,
            check=self.check,
        )

    # ##### Migrations #####

    def migrate(self, upgrade_round: UpgradeRound, side: MySQLPairSide) -> None:
        """Give the shards on ``side`` the new schema.

        :raises PairRefused: a shard was not migrated.
        """
        request = MigrationRequest(self.plan.options, self.waves, side=side.name)
        with only_on(side, (self.plan.first, self.plan.second)):
            for selected in upgrade_round.selected():
                self.check()
                self._require_planned(selected)
                report = migrate(selected, request, self.progress, self.stopping)
                if report.stopped and not report.failures:
                    raise OperationStopped("Stopped. The same command goes on from here.")
                if not report.ok:
                    raise PairRefused(
                        [
                            *(f"{failure.alias}: {failure.error}" for failure in report.failures),
                            *(f"{shard.alias} does not exist" for shard in report.missing),
                        ]
                    )
        self.close_passive(upgrade_round, side)

    def _require_planned(self, selected: Selected) -> None:
        """Check that no migration runs that was not planned when the upgrade began.

        Somebody may have installed another release on this machine since then, with more
        migrations.
        """
        planner = Planner(self.plan.options)
        applied_state(planner, selected.shards)
        units = {str(unit) for plan in planner.plans for unit in plan.units}
        if others := sorted(units - set(self.plan.migrations)):
            raise PairRefused(
                [
                    f"{', '.join(others)} would run, too, and it was not planned when this upgrade began:"
                    " finish the upgrade from a machine that has the release with which it began"
                ]
            )

    # ##### Fences #####

    def close_passive(self, upgrade_round: UpgradeRound, side: MySQLPairSide) -> None:
        """Make ``side`` refuse writes of the shards for which it is passive.

        A migration may have created tables since the fence was closed, so close it for them, too.
        """
        for shard in upgrade_round.shards():
            if shard.node != side.name:
                with open_fence(replace(shard, node=side.name), self.run.check) as fence:
                    close_side(fence)

    def close(self, shard: Shard) -> None:
        """Make the active side of ``shard`` refuse writes, after its open transactions have ended.

        :raises PairRefused: a transaction was open for too long.
        :raises BranchesPrepared: a transaction in two phases holds locks.
        """
        patience = SwitchOptions().patience
        refuse_prepared(runtime.group(shard.group), [shard])
        try:
            with open_fence(shard, self.run.note) as fence:
                if fence.open_tables():
                    fence.prepare(patience)
                fence.close(patience)
        except OperationalError as exc:
            raise PairRefused(
                [
                    f"{shard.alias}: for {patience:g} s, there was always a transaction that used a table"
                    f" of it ({exc}). End it, and run the command again"
                ]
            ) from exc
        refuse_prepared(runtime.group(shard.group), [shard])

    def open(self, shards: list[Shard]) -> None:
        """Make the active side of each shard take writes again."""
        for shard in shards:
            with open_fence(shard, self.run.note) as fence:
                remove_fence(fence)


@contextmanager
def undoing(cause: Exception) -> Iterator[None]:
    """A context manager whose block undoes a step that has failed with ``cause``.

    :raises PairRefused: the block has failed, too. The message has both errors, ``cause`` first.
    :raises LeaseLost: another process has taken over the run, and undoes the step.
    """
    try:
        yield
    except LeaseLost:
        raise
    except Exception as exc:
        problems = getattr(cause, "problems", None) or (journal.one_line(cause),)
        undone = (
            f"shards refuse writes until this is undone, which failed ({journal.one_line(exc)}): mend the"
            " cause, and run the same command again"
        )
        raise PairRefused([*problems, undone]) from cause


def _link(replica: MySQLPairSide, source: MySQLPairSide) -> MySQLReplicationLink:
    link = replica.link_soon(source)
    if link is None:
        raise PairRefused(replica.follow_problems(source))
    return link
