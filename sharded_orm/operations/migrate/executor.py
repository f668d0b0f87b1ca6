"""Execute a migration plan on one shard. Begin at the checkpoint that the shard has reached.

- A *unit* of the plan is one migration in one direction.
- A *script* has the SQL that operations have run on an empty copy of the shard. The same SQL is run
  on every shard. Most operations have such recorded SQL.
- A *mixed* unit has an operation that must run on each shard itself, such as ``RunPython``.
- A *stretch* is a sequence of statements for which one checkpoint is written into the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.db import transaction

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.exceptions import OperationError
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.per_shard_operation import PerShardOperation
from sharded_orm.operations.migrate.plan import MigrationPlan, Unit
from sharded_orm.operations.migrate.recorded_sql import RecordedScript, RecordedStatement
from sharded_orm.operations.migrate.rehearsal import Rehearsals, Segment
from sharded_orm.operations.migrate.shard_schema import build, compare
from sharded_orm.operations.migrate.shard_session import ShardSession
from sharded_orm.operations.migrate.sql_recorder import RECORD_LABEL
from sharded_orm.operations.migrate.step_outcome import RecoveryCheck


class ScriptExecutor:
    """Executes one plan on one shard. To be used by one thread.

    :param rehearsals: returns the recorded SQL (scripts).
    :param schema: the present schema of the shard; None if it is not known and must be read.
    """

    def __init__(
        self,
        session: ShardSession,
        plan: MigrationPlan,
        rehearsals: Rehearsals,
        schema: SchemaSnapshot | None,
    ) -> None:
        self._session = session
        self._plan = plan
        self._rehearsals = rehearsals
        # The shard's schema; None if it may have changed since it was read.
        self._schema = schema
        self._editor: Any = None
        #: The next AUTO_INCREMENT value of each table, keyed by the table's name. Tables without a
        #: known value are left out.
        self.counters: Mapping[str, int] = {}

    def run(self) -> None:
        """Finish what an earlier process left unfinished on the shard, then run the rest of the plan."""
        number, operation = self._resume()
        units = self._plan.units
        while number < len(units):
            if units[number].is_mixed:
                self._run_mixed_unit(number, operation)
                number, operation = number + 1, 0
            else:
                number += self._run_recorded_units(number)
        if self._plan.replacements:
            self._session.records.record(self._plan.replacements, backwards=False)

    def fake(self) -> None:
        """Record the plan's migrations in ``django_migrations`` without running them."""
        self._session.check()
        self._session.ensure_records(self._session.snapshot())
        keys = [key for unit in self._plan.units for key in unit.records]
        self._session.records.record(keys, backwards=self._plan.backwards)
        if self._plan.replacements:
            self._session.records.record(self._plan.replacements, backwards=False)

    # ##### Segments #####

    def _run_recorded_units(self, number: int) -> int:
        """Run the plan's migrations whose SQL is recorded, from index ``number`` on.

        Stop before the next migration that has an operation without recorded SQL. Return how many
        migrations were run.
        """
        key, script = self._script(number, 0)
        if self._schema is not None and self._schema.is_empty and script.records:
            self.counters = build(self._session, script, self._session.step.run.id, key).counters
        elif all(statement.records for statement in script.statements):
            # These migrations change nothing on a shard, for example because their tables are not
            # on shards. So only record them as applied, all in one statement.
            self._session.records.record(script.records, backwards=self._plan.backwards)
        else:
            before, run = self._schema, self._session.step.run.id
            for _, statements in script.by_migration():
                unit = self._unit_of(statements[0][1])
                with self._schema_editor(unit):
                    self._run_statements(script, key, run, statements, before)
            if self._is_atomic(unit):
                self._compare(script, key, run, before=before)
        self._schema = script.promise
        return script.units

    def _run_mixed_unit(self, number: int, operation: int) -> None:
        """Run a migration that has operations without recorded SQL, such as ``RunPython``.

        :param operation: the index of the first operation to run; earlier ones are done already.
        """
        unit = self._plan.units[number]
        if self._schema is not None:
            self._schema = self._session.ensure_records(self._schema)
        with self._schema_editor(unit):
            while operation < len(unit.operations):
                runs_per_shard = unit.runs_per_shard(operation)
                if runs_per_shard and (operation or not self._rehearsals.fake_initial):
                    self._run_per_shard(number, operation)
                    operation += 1
                    continue
                key, script = self._script(number, operation)
                before = self._schema
                statements = enumerate(script.statements)
                self._run_statements(script, key, self._session.step.run.id, statements, before)
                if script.units:
                    # The tables existed before (--fake-initial), so the script has only recorded
                    # the migration. The schema has not changed, and need not be compared.
                    return
                self._compare(script, key, self._session.step.run.id, unit, before)
                self._schema = script.promise
                if runs_per_shard:
                    self._run_per_shard(number, operation)
                operation = max(script.operations, operation + 1)
            self._record(unit)

    def _script(self, number: int, operation: int) -> tuple[str, RecordedScript]:
        if self._schema is None:
            self._schema = self._session.snapshot()
        self._session.check()
        segment = Segment(self._plan, number, operation)
        return self._rehearsals.script_for(
            self._session.step.run, self._session.connection, segment, self._schema
        )

    def _compare(
        self,
        script: RecordedScript,
        key: str,
        run: int,
        unit: Unit | None = None,
        before: SchemaSnapshot | None = None,
    ) -> None:
        """Check that the shard now has the schema to which ``script`` (recorded SQL) must lead.

        If a migration runs in one transaction, and this transaction is open, do nothing.

        :param unit: the migration that the shard continues, or records as applied, after the check.
            None if the check is not followed by such a step.
        :param before: the schema when ``script`` began; None if it was not read.
        :raises SchemaDiffers: the shard has another schema.
        """
        if self._editor is not None and self._editor.atomic_migration:
            return
        checkpoint = Checkpoint(What.COMPARE, run, script=key, index=len(script.statements) - 1)
        if unit is not None:
            end = self._end_operation(script, unit)
            checkpoint = replace(
                checkpoint, migration=unit.key, backwards=unit.backwards,
                operation=end, outline=unit.outline(end),
            )  # fmt: skip
        self.counters = compare(self._session, script, checkpoint, before).counters

    def _is_atomic(self, unit: Unit) -> bool:
        """Return whether the whole migration runs in one transaction."""
        # Use the same condition as BaseDatabaseSchemaEditor.__init__().
        return unit.migration.atomic and self._session.connection.features.can_rollback_ddl

    @staticmethod
    def _end_operation(script: RecordedScript, unit: Unit) -> int:
        """Return how many operations of ``unit`` are done after ``script`` has run."""
        return len(unit.operations) if script.units else script.operations

    def _run_per_shard(self, number: int, operation: int) -> None:
        self.counters = {}
        per_shard = self._per_shard(number, operation)
        per_shard.run()
        self._schema = per_shard.schema

    def _per_shard(self, number: int, operation: int) -> PerShardOperation:
        self._session.check()
        return PerShardOperation(
            self._session,
            self._plan.units[number],
            operation,
            self._plan.per_shard_piece(number, operation),
            self._editor,
            self._schema,
        )

    # ##### Single steps #####

    def _schema_editor(self, unit: Unit) -> _UnitEditor:
        return _UnitEditor(self, unit)

    def _run_statements(
        self,
        script: RecordedScript,
        key: str,
        run: int,
        numbered: Iterable[tuple[int, RecordedStatement]],
        before: SchemaSnapshot | None = None,
    ) -> None:
        """Run recorded statements of one migration.

        The statements are divided into stretches. Before each stretch, a checkpoint is written into
        the journal. If a stretch is interrupted, the shard shows how many of its statements took
        effect. If the whole migration is one transaction, no such checkpoints are needed, because a
        kill undoes all of its statements.

        :param key: the key of ``script`` in the journal.
        :param run: the id of the journal run that stores ``script``.
        :param numbered: pairs (index in ``script``, statement).
        :param before: the schema when ``script`` began; None if it was not read.
        """
        session = self._session
        stretch = range(0)
        for index, statement in numbered:
            if self._editor.atomic_migration:
                self._run_statement(statement, "")
                continue
            session.check()
            if statement.records and index == len(script.statements) - 1:
                # This statement records the last migration of the script. Before it is run,
                # compare the schemas, because a shard with a wrong schema must not count as
                # migrated.
                self._compare(script, key, run, self._unit_of(statement), before)
            if index not in stretch:
                stretch = script.stretch(index)
                self._begin_stretch(script, key, run, stretch)
            assert session.checkpoint is not None
            with session.attempt(statement.label):
                self._run_statement(statement, session.checkpoint.marker)

    def _begin_stretch(self, script: RecordedScript, key: str, run: int, stretch: range) -> None:
        session = self._session
        first = script.statements[stretch.start]
        unit = self._unit_of(first)
        end = self._end_operation(script, unit)
        marks = first.effect is Effect.ROWS and not first.records
        session.begin(
            Checkpoint(
                What.STATEMENT,
                run,
                migration=first.migration,
                backwards=self._plan.backwards,
                operation=end,
                outline=unit.outline(end),
                script=key,
                index=stretch.start,
                count=len(stretch),
                marker=session.new_marker() if marks else "",
                reverts=script.promise.is_transactional,
            ),
            first.label,
        )

    def _run_statement(self, statement: RecordedStatement, marker: str) -> None:
        session = self._session
        if statement.records:
            session.records.record(statement.records, backwards=self._plan.backwards)
        elif marker:
            with transaction.atomic(using=session.alias):
                session.records.mark(marker)
                self._execute(statement)
        else:
            self._execute(statement)

    def _execute(self, statement: RecordedStatement) -> None:
        with self._session.connection.cursor() as cursor:
            cursor.execute(statement.sql, statement.params)

    def _record(self, unit: Unit) -> None:
        session = self._session
        if not self._editor.atomic_migration:
            session.check()
            checkpoint = Checkpoint(
                What.RECORD, session.step.run.id, migration=unit.key, backwards=unit.backwards,
                operation=len(unit.operations), outline=unit.outline(len(unit.operations)),
            )  # fmt: skip
            session.begin(checkpoint, RECORD_LABEL)
        session.records.record(unit.records, backwards=unit.backwards)

    def _unit_of(self, statement: RecordedStatement) -> Unit:
        return next(unit for unit in self._plan.units if unit.key == statement.migration)

    # ##### Steps that an earlier process left unfinished #####

    def _resume(self) -> tuple[int, int]:
        """Finish the step that an earlier process left unfinished.

        Return where to continue: the index of a migration in the plan, and the index of an
        operation in that migration. For example, (0, 2) means the third operation of the first
        migration.
        """
        checkpoint = self._session.checkpoint
        if checkpoint is None or checkpoint.migration is None or checkpoint.what is What.UNIT:
            return 0, 0
        is_recorded = (checkpoint.migration in self._plan.done) is not checkpoint.backwards
        if not is_recorded:
            unit = self._interrupted_unit(checkpoint)
            if unit is None:
                return 0, 0
            if checkpoint.what is What.RECORD:
                return 0, checkpoint.operation
            if checkpoint.what is What.PER_SHARD:
                with self._schema_editor(unit):
                    self._per_shard(0, checkpoint.operation).resume(
                        checkpoint, self._recovery_check()
                    )
                self._schema = None
                return 0, checkpoint.operation + 1
        elif checkpoint.what is not What.STATEMENT:
            return 0, 0
        script = self._rehearsals.script(checkpoint.run, checkpoint.script)
        assert script is not None, "scripts are kept as long as a step needs them"
        if checkpoint.what is What.COMPARE:
            if not script.units:
                return 0, checkpoint.operation
            return self._continue_script(script, checkpoint, checkpoint.index)
        end = checkpoint.index + checkpoint.count
        if not is_recorded:
            done = self._recovery_check().statements(checkpoint, script)
            return self._continue_script(script, checkpoint, checkpoint.index + done)
        if checkpoint.raised or checkpoint.settled or not script.statements[end - 1].records:
            # The interrupted step needs no more work: the migration is recorded as applied, for
            # example because somebody has run "migrate --fake".
            return 0, 0
        return self._continue_script(script, checkpoint, end)

    def _begins_with(self, checkpoint: Checkpoint) -> bool:
        """Whether the plan begins with the migration of ``checkpoint``, in the same direction."""
        first = self._plan.units[0] if self._plan.units else None
        interrupted = (checkpoint.migration, checkpoint.backwards)
        return first is not None and (first.key, first.backwards) == interrupted

    def _is_untouched(self, checkpoint: Checkpoint) -> bool:
        """Whether the interrupted migration has changed nothing yet.

        Such a migration need not be finished before another plan begins.
        """
        assert checkpoint.migration is not None
        if checkpoint.what is What.PER_SHARD:
            is_rolled_back = (
                bool(checkpoint.marker)
                and checkpoint.reverts
                and not self._session.records.is_marked(checkpoint.marker)
            )
            is_undone = checkpoint.settled == "undone" or (
                not checkpoint.settled and is_rolled_back
            )
            return checkpoint.operation == checkpoint.index == 0 and is_undone
        if checkpoint.what is What.STATEMENT:
            script = self._rehearsals.script(checkpoint.run, checkpoint.script)
            assert script is not None, "scripts are kept as long as a step needs them"
            index, statement = dict(script.by_migration())[checkpoint.migration][0]
            is_first = (checkpoint.index, statement.operation) == (index, 0)
            return is_first and not self._recovery_check().statements(checkpoint, script)
        return False

    def _recovery_check(self) -> RecoveryCheck:
        schema = self._schema or self._session.snapshot()
        self._schema = None
        return RecoveryCheck(self._session.connection, schema, self._session.records)

    def _continue_script(
        self, script: RecordedScript, checkpoint: Checkpoint, start: int
    ) -> tuple[int, int]:
        """Run the rest of an interrupted script: its statements from index ``start`` on.

        The plan may differ from the one for which the script was recorded. So stop before a
        migration of the script that is not the next one in the plan, or that somebody has edited
        since. Return where to continue: the index of a migration in the plan, and of an operation
        in it.
        """
        units = 0
        unit: Unit | None = None
        for key, statements in script.by_migration():
            remaining = [(index, statement) for index, statement in statements if index >= start]
            if not remaining:
                continue
            unit = self._plan.units[units] if units < len(self._plan.units) else None
            last = remaining[-1][1]
            if unit is None or unit.key != key:
                return units, 0
            if last.records and last.outline != unit.outline(len(unit.operations)):
                return units, 0
            with self._schema_editor(unit):
                self._run_statements(script, checkpoint.script, checkpoint.run, remaining)
            units += bool(last.records)
        if script.units and unit is None:
            # An earlier process has executed the whole script. The plan begins with the first
            # migration that is not in the script.
            return 0, 0
        if not script.units:
            self._compare(
                script, checkpoint.script, checkpoint.run, next(iter(self._plan.units), None)
            )
        elif unit is not None and self._is_atomic(unit):
            self._compare(script, checkpoint.script, checkpoint.run)
        self._schema = script.promise
        return units, script.operations

    def _interrupted_unit(self, checkpoint: Checkpoint) -> Unit | None:
        """Return the interrupted migration if the plan can finish it.

        The plan cannot do this if it begins with a different migration, or if somebody has edited
        the operations. Then return None if the interrupted migration has changed nothing yet, and
        raise an error otherwise.

        :raises OperationError: the plan cannot finish the interrupted migration, although a part of
            it took effect.
        """
        assert checkpoint.migration is not None
        is_first = self._begins_with(checkpoint)
        if is_first:
            first = self._plan.units[0]
            count = checkpoint.operation + (checkpoint.what is What.PER_SHARD)
            if first.outline(count) == checkpoint.outline:
                return first
        if self._is_untouched(checkpoint):
            return None
        where = (
            f"{self._session.alias} stands in the middle of {'.'.join(checkpoint.migration)}"
            f"{', on the way back' if checkpoint.backwards else ''}"
        )
        if not is_first:
            raise OperationError(
                f"{where}, and what is asked for does not begin with that. Finish it first:"
                f" 'manage.py migrate_shards {checkpoint.migration[0]} …' to a target beyond it."
            )
        raise OperationError(
            f"{where}, and the operations of that migration are others now, up to the one it"
            " stands at. Put those back that it had, or bring the shard's tables to a state of"
            " before or after by hand and record that by 'migrate --fake'."
        )


class _UnitEditor:
    """A context manager for the schema editor of one migration, which the executor uses."""

    def __init__(self, executor: ScriptExecutor, unit: Unit) -> None:
        self._executor = executor
        self._unit = unit
        session = executor._session
        session.check()
        self._editor = session.connection.schema_editor(atomic=unit.migration.atomic)
        if self._editor.atomic_migration:
            checkpoint = Checkpoint(
                What.UNIT, session.step.run.id, migration=unit.key, backwards=unit.backwards
            )
            session.begin(checkpoint, "All of it in one transaction")

    def __enter__(self) -> None:
        self._executor._editor = self._editor.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._executor._editor = None
        if self._editor.deferred_sql:
            # The editor now runs the statements that operations have put off (``deferred_sql``).
            # They may change the schema, so the schema that was read before is outdated.
            self._executor._schema = None
        self._editor.__exit__(*exc)
