"""The engine as others use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.core.management.sql import emit_post_migrate_signal, emit_pre_migrate_signal

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.migrate.applied_state import AppliedState, applied_state
from sharded_orm.operations.migrate.checkpoint import What
from sharded_orm.operations.migrate.executor import ScriptExecutor, build, compare
from sharded_orm.operations.migrate.plan import MigrationPlan
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.migrate.records import TABLE
from sharded_orm.operations.migrate.rehearsal import Rehearsals
from sharded_orm.operations.migrate.shard_session import ShardSession
from sharded_orm.operations.runs.journal import JournalStep, Scripts
from sharded_orm.topology.model import Shard, ShardGroup


class Migrator:
    """Migrates shards of one group to one target. Thread-safe.

    :param scripts: where recorded SQL is kept.
    """

    def __init__(self, group: ShardGroup, options: MigrateOptions, scripts: Scripts) -> None:
        self._options = options
        self._planner = Planner(options)
        self._rehearsals = Rehearsals(group, scripts, fake_initial=options.fake_initial)

    def applied_state(self, shards: Sequence[Shard]) -> AppliedState:
        """Which of ``shards`` are behind. Cost: one query per node for each 500 shards, three more
        where some do not exist; and three per distinct set of applied migrations.

        :raises InvalidMigrationTarget: the target does not exist, or nothing leads to it.
        """
        return applied_state(self._planner, shards)

    def migrate(self, shard: Shard, step: JournalStep, *, stopping: Callable[[], bool]) -> None:
        """Bring one shard to the target, going on from the position of ``step``.

        The shard's schema or file must exist. Its connection in this thread is closed
        afterwards.

        :param stopping: asked between two statements whether to stop there.
        :raises OperationStopped: ``stopping`` said so; call it again to go on.
        :raises OperationUnclear: something was interrupted, and whether it took effect cannot be
            told. It is told by :meth:`settle`.
        :raises RehearsalFailed: a migration fails on a copy without rows.
        :raises SchemaDiffers: the shard does not look as its migrations promise.
        :raises LeaseLost: another process has the run.

        Whatever else is raised is the error of a migration on this shard; called again, it goes
        on with the operation that failed.
        """
        session = ShardSession(shard, step, stopping)
        try:
            self._migrate(session)
            session.connection.unlock_schema()
        finally:
            # With it goes the lock, and a session that was left in the middle.
            session.connection.close()

    def settle(self, step: JournalStep, done: bool) -> None:
        """Tell whether what was unclear took effect."""
        step.begin(position={**step.position, "settled": "done" if done else "undone"})

    def _migrate(self, session: ShardSession) -> None:
        session.check()
        snapshot = self._finish_interrupted(session, session.snapshot())
        if snapshot.is_empty:
            session.checkpoint = None  # The shard was made anew: nothing is left of what was done.
        else:
            snapshot = session.ensure_records(snapshot)
        applied = session.records.applied() if TABLE in snapshot.definitions else frozenset()
        plan = self._planner.plan(session.connection, applied)
        _emit(emit_pre_migrate_signal, session, plan, after=False)
        executor = ScriptExecutor(session, plan, self._rehearsals, snapshot)
        if self._options.fake:
            executor.fake()
        else:
            executor.run()
        with session.completion():
            _emit(emit_post_migrate_signal, session, plan, after=True, counted=executor.counters)

    def _finish_interrupted(
        self, session: ShardSession, snapshot: SchemaSnapshot
    ) -> SchemaSnapshot:
        """What an earlier process left that does not depend on the plan."""
        checkpoint = session.checkpoint
        if checkpoint is None or checkpoint.what not in (What.BUILD, What.COMPARE):
            return snapshot
        script = self._rehearsals.script(checkpoint.run, checkpoint.script)
        assert script is not None, "scripts are kept as long as a step needs them"
        if checkpoint.what is What.COMPARE:
            compare(session, script, checkpoint)
        elif not snapshot.definitions.get(TABLE) or not session.records.applied():
            build(session, script, checkpoint.run, checkpoint.script)
        return session.snapshot()


def _emit(
    emit: Any, session: ShardSession, plan: MigrationPlan, *, after: bool, **more: Any
) -> None:
    # As the migrate command does, but never interactive: nobody is there to be asked.
    emit(0, False, session.alias, apps=plan.models(after=after), plan=plan.for_signals(), **more)
