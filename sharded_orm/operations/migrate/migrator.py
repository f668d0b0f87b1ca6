"""The class with which other packages migrate single shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.core.management.sql import emit_post_migrate_signal, emit_pre_migrate_signal

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.migrate.applied_state import AppliedState, applied_state
from sharded_orm.operations.migrate.checkpoint import What
from sharded_orm.operations.migrate.executor import ScriptExecutor
from sharded_orm.operations.migrate.migration_records import TABLE
from sharded_orm.operations.migrate.plan import MigrationPlan
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.migrate.rehearsal import Rehearsals
from sharded_orm.operations.migrate.shard_schema import build, compare
from sharded_orm.operations.migrate.shard_session import ShardSession
from sharded_orm.operations.runs.journal import JournalStep, Scripts
from sharded_orm.topology.model import Shard, ShardGroup


class Migrator:
    """Migrates shards of one group to one target. Thread-safe.

    :param scripts: stores recorded SQL in the journal, so that it is recorded only once for all
        shards with the same schema.
    """

    def __init__(self, group: ShardGroup, options: MigrateOptions, scripts: Scripts) -> None:
        self._options = options
        self._planner = Planner(options)
        self._rehearsals = Rehearsals(group, scripts, fake_initial=options.fake_initial)

    def applied_state(self, shards: Sequence[Shard]) -> AppliedState:
        """Return how far ``shards`` are migrated, and which of them are behind.

        Cost: one query per 500 shards of each node. If a shard or its table ``django_migrations``
        does not exist, these queries are repeated, and two more are sent to its node. Each distinct
        set of applied migrations costs five more queries at most.

        :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.
        """
        return applied_state(self._planner, shards)

    def migrate(self, shard: Shard, step: JournalStep, *, stopping: Callable[[], bool]) -> None:
        """Bring one shard to the target, beginning at the checkpoint (the recorded progress) in
        ``step``.

        The shard's database must exist. This thread's connection to the shard is closed at the end.

        :param step: the shard's step in the journal, which holds the latest checkpoint.
        :param stopping: a function that returns True if the migration is to stop. It is called only
            while no step is half done.
        :raises OperationStopped: ``stopping`` returned True. Another call continues at this point.
        :raises OperationUnclear: an earlier process was interrupted in a step, and nothing shows
            whether the step took effect. An operator must find out, and report the answer by
            :meth:`settle`.
        :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.
        :raises OperationError: an interrupted migration must be finished first, but the plan to the
            target does not begin with it, or its file was edited.
        :raises RehearsalFailed: a migration fails on a copy of the schema that has no rows.
        :raises SchemaDiffers: the shard does not have the schema to which its migrations must lead.
            Perhaps somebody has changed a table by hand.
        :raises LeaseLost: another process has taken over the journal's run.

        Any other exception comes from a migration on this shard. Another call continues with the
        operation that failed.
        """
        session = ShardSession(shard, step, stopping)
        try:
            self._migrate(session)
            session.connection.unlock_schema()
        finally:
            # close() releases the shard's lock, and rolls back what an error left uncommitted.
            session.connection.close()

    def settle(self, step: JournalStep, done: bool) -> None:
        """Record in the journal an operator's answer: whether an interrupted operation took effect.

        :param step: the shard's step in the journal, in which the operation was interrupted.
        :param done: True if the operation took effect as a whole; False if no part of it did.
        """
        step.begin(position={**step.position, "settled": "done" if done else "undone"})

    def _migrate(self, session: ShardSession) -> None:
        session.check()
        snapshot = self._finish_interrupted(session, session.snapshot())
        if snapshot.is_empty:
            # The shard is empty, so nothing is left of an interrupted step. Ignore the checkpoint
            # of an earlier process, because there is nothing to finish.
            session.checkpoint = None
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
        """Finish an interrupted step that can be finished without a plan. Return the shard's
        schema.

        Two kinds of steps need no plan. BUILD creates all tables of an empty shard. COMPARE checks
        that the shard has the schema to which its migrations must lead. A step of any other kind
        is left unfinished here.
        """
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
    # Send pre_migrate or post_migrate as Django's migrate command does, but always with verbosity=0
    # and interactive=False.
    emit(0, False, session.alias, apps=plan.models(after=after), plan=plan.for_signals(), **more)
