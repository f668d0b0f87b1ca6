"""The migration of single shards, as other packages use it."""

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

    :param scripts: the store of recorded SQL.
    """

    def __init__(self, group: ShardGroup, options: MigrateOptions, scripts: Scripts) -> None:
        self._options = options
        self._planner = Planner(options)
        self._rehearsals = Rehearsals(group, scripts, fake_initial=options.fake_initial)

    def applied_state(self, shards: Sequence[Shard]) -> AppliedState:
        """Return which of ``shards`` are behind.

        Cost: one query per node for each 500 shards, three more if some do not exist, and three per
        distinct set of applied migrations.

        :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.
        """
        return applied_state(self._planner, shards)

    def migrate(self, shard: Shard, step: JournalStep, *, stopping: Callable[[], bool]) -> None:
        """Bring one shard to the target, from the position of ``step`` on.

        The shard's schema or file must exist. Its connection in this thread is closed afterwards.

        :param stopping: called between two statements; whether to stop there.
        :raises OperationStopped: ``stopping`` returned True; another call goes on.
        :raises OperationUnclear: a step was interrupted, and nothing shows whether it took effect.
            A person answers by :meth:`settle`.
        :raises RehearsalFailed: a migration fails on a copy without rows.
        :raises SchemaDiffers: the shard does not look as its migrations promise.
        :raises LeaseLost: another process has the run.

        Any other exception is the error of a migration on this shard. Another call goes on with the
        operation that failed.
        """
        session = ShardSession(shard, step, stopping)
        try:
            self._migrate(session)
            session.connection.unlock_schema()
        finally:
            # This releases the lock, and ends a session that an error left in a transaction.
            session.connection.close()

    def settle(self, step: JournalStep, done: bool) -> None:
        """Record whether an unclear step took effect."""
        step.begin(position={**step.position, "settled": "done" if done else "undone"})

    def _migrate(self, session: ShardSession) -> None:
        session.check()
        snapshot = self._finish_interrupted(session, session.snapshot())
        if snapshot.is_empty:
            session.checkpoint = (
                None  # The shard was created anew: nothing is left of earlier steps.
            )
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
        """Finish an interrupted step that does not depend on the plan; returns the schema."""
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
    # As the migrate command does, but never interactive.
    emit(0, False, session.alias, apps=plan.models(after=after), plan=plan.for_signals(), **more)
