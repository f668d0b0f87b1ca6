"""Carrying out a plan on one shard, from wherever it stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.db import transaction

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.exceptions import OperationError, SchemaDiffers
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.per_shard_operation import PerShardOperation
from sharded_orm.operations.migrate.plan import MigrationPlan, Unit
from sharded_orm.operations.migrate.recorded_sql import RecordedScript, RecordedStatement
from sharded_orm.operations.migrate.recorder import RECORD_LABEL
from sharded_orm.operations.migrate.recovery import RecoveryCheck
from sharded_orm.operations.migrate.rehearsal import Rehearsals, Segment
from sharded_orm.operations.migrate.shard_session import ShardSession


class ScriptExecutor:
    """One plan on one shard; belongs to a thread."""

    def __init__(
        self,
        place: ShardSession,
        plan: MigrationPlan,
        rehearsals: Rehearsals,
        schema: SchemaSnapshot | None,
    ) -> None:
        self._place = place
        self._plan = plan
        self._rehearsals = rehearsals
        # None when it may have changed since it was read.
        self._schema = schema
        self._editor: Any = None
        #: The next numbers of the tables, as far as they are known: see ``SchemaSnapshot``.
        self.counted: Mapping[str, int] = {}

    def run(self) -> None:
        """All units of the plan, after what an earlier process left in the middle."""
        number, operation = self._resumed()
        units = self._plan.units
        while number < len(units):
            if units[number].is_mixed:
                self._mixed(number, operation)
                number, operation = number + 1, 0
            else:
                number += self._whole(number)
        if self._plan.replacements:
            self._place.records.record(self._plan.replacements, backwards=False)

    def fake(self) -> None:
        """Record all units of the plan, and do nothing else."""
        self._place.check()
        self._place.with_records(self._place.snapshot())
        keys = [key for unit in self._plan.units for key in unit.records]
        self._place.records.record(keys, backwards=self._plan.backwards)
        if self._plan.replacements:
            self._place.records.record(self._plan.replacements, backwards=False)

    # ##### Segments #####

    def _whole(self, number: int) -> int:
        """Units whose SQL is recorded; returns how many."""
        key, script = self._script(number, 0)
        if self._schema is not None and self._schema.is_empty and script.records:
            self.counted = build(self._place, script, self._place.step.run.id, key).counters
        else:
            before, run = self._schema, self._place.step.run.id
            for _, statements in script.by_migration():
                unit = self._unit_of(statements[0][1])
                with self._editing(unit):
                    self._statements(script, key, run, statements, before)
            if self._is_atomic(unit):
                self._compare(script, key, run, before=before)
        self._schema = script.promise
        return script.units

    def _mixed(self, number: int, operation: int) -> None:
        """One unit with operations that run on each shard, from ``operation`` on."""
        unit = self._plan.units[number]
        if self._schema is not None:
            self._schema = self._place.with_records(self._schema)
        with self._editing(unit):
            while operation < len(unit.operations):
                is_own = unit.is_own(operation)
                if is_own and (operation or not self._rehearsals.fake_initial):
                    self._run_own(number, operation)
                    operation += 1
                    continue
                key, script = self._script(number, operation)
                before = self._schema
                statements = enumerate(script.statements)
                self._statements(script, key, self._place.step.run.id, statements, before)
                if script.units:
                    return  # Its tables were there, so that it was recorded only.
                self._compare(script, key, self._place.step.run.id, unit, before)
                self._schema = script.promise
                if is_own:
                    self._run_own(number, operation)
                operation = max(script.operations, operation + 1)
            self._record(unit)

    def _script(self, number: int, operation: int) -> tuple[str, RecordedScript]:
        if self._schema is None:
            self._schema = self._place.snapshot()
        self._place.check()
        segment = Segment(self._plan, number, operation)
        return self._rehearsals.rehearsed(
            self._place.step.run, self._place.connection, segment, self._schema
        )

    def _compare(
        self,
        script: RecordedScript,
        key: str,
        run: int,
        unit: Unit | None = None,
        before: SchemaSnapshot | None = None,
    ) -> None:
        """
        :param unit: the one that is gone on with afterwards, or at least recorded.
        :param before: what the shard looked like when ``script`` began, if that was seen.
        """
        if self._editor is not None and self._editor.atomic_migration:
            return
        position = Checkpoint(What.COMPARE, run, script=key, index=len(script.statements) - 1)
        if unit is not None:
            end = self._end(script, unit)
            position = replace(
                position, migration=unit.key, backwards=unit.backwards,
                operation=end, outline=unit.outline(end),
            )  # fmt: skip
        self.counted = compare(self._place, script, position, before).counters

    def _is_atomic(self, unit: Unit) -> bool:
        """Whether one transaction holds the whole migration."""
        # As BaseDatabaseSchemaEditor.__init__() decides.
        return unit.migration.atomic and self._place.connection.features.can_rollback_ddl

    @staticmethod
    def _end(script: RecordedScript, unit: Unit) -> int:
        """The number of the operation of ``unit`` at which ``script`` ends."""
        return len(unit.operations) if script.units else script.operations

    def _run_own(self, number: int, operation: int) -> None:
        self.counted = {}
        own = self._own(number, operation)
        own.run()
        self._schema = own.schema

    def _own(self, number: int, operation: int) -> PerShardOperation:
        self._place.check()
        return PerShardOperation(
            self._place,
            self._plan.units[number],
            operation,
            self._plan.own(number, operation),
            self._editor,
            self._schema,
        )

    # ##### One thing #####

    def _editing(self, unit: Unit) -> _Editing:
        return _Editing(self, unit)

    def _statements(
        self,
        script: RecordedScript,
        key: str,
        run: int,
        numbered: Iterable[tuple[int, RecordedStatement]],
        before: SchemaSnapshot | None = None,
    ) -> None:
        """Statements of one migration; the journal is told once of each stretch."""
        place = self._place
        stretch = range(0)
        for index, statement in numbered:
            if self._editor.atomic_migration:
                self._run(statement, "")
                continue
            place.check()
            if statement.records and index == len(script.statements) - 1:
                # What is recorded has been compared, whatever happens after it.
                self._compare(script, key, run, self._unit_of(statement), before)
            if index not in stretch:
                stretch = script.stretch(index)
                self._begin(script, key, run, stretch)
            assert place.position is not None
            with place.doing(statement.label):
                self._run(statement, place.position.marker)

    def _begin(self, script: RecordedScript, key: str, run: int, stretch: range) -> None:
        place = self._place
        first = script.statements[stretch.start]
        unit = self._unit_of(first)
        end = self._end(script, unit)
        marks = first.effect is Effect.ROWS and not first.records
        place.at(
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
                marker=place.next_marker() if marks else "",
                reverts=script.promise.is_transactional,
            ),
            first.label,
        )

    def _run(self, statement: RecordedStatement, marker: str) -> None:
        place = self._place
        if statement.records:
            place.records.record(statement.records, backwards=self._plan.backwards)
        elif marker:
            with transaction.atomic(using=place.alias):
                place.records.mark(marker)
                self._execute(statement)
        else:
            self._execute(statement)

    def _execute(self, statement: RecordedStatement) -> None:
        with self._place.connection.cursor() as cursor:
            cursor.execute(statement.sql, statement.params)

    def _record(self, unit: Unit) -> None:
        place = self._place
        if not self._editor.atomic_migration:
            place.check()
            position = Checkpoint(
                What.RECORD, place.step.run.id, migration=unit.key, backwards=unit.backwards,
                operation=len(unit.operations), outline=unit.outline(len(unit.operations)),
            )  # fmt: skip
            place.at(position, RECORD_LABEL)
        place.records.record(unit.records, backwards=unit.backwards)

    def _unit_of(self, statement: RecordedStatement) -> Unit:
        return next(unit for unit in self._plan.units if unit.key == statement.migration)

    # ##### What an earlier process left #####

    def _resumed(self) -> tuple[int, int]:
        """Finish what was interrupted; the unit and operation to go on with."""
        position = self._place.position
        if position is None or position.migration is None or position.what is What.UNIT:
            return 0, 0
        is_recorded = (position.migration in self._plan.done) is not position.backwards
        if not is_recorded:
            unit = self._interrupted(position)
            if unit is None:
                return 0, 0
            if position.what is What.RECORD:
                return 0, position.operation
            if position.what is What.OWN:
                with self._editing(unit):
                    self._own(0, position.operation).go_on(position, self._judge())
                self._schema = None
                return 0, position.operation + 1
        elif position.what is not What.STATEMENT:
            return 0, 0
        script = self._rehearsals.script(position.run, position.script)
        assert script is not None, "scripts are kept as long as a step needs them"
        if position.what is What.COMPARE:
            if not script.units:
                return 0, position.operation
            return self._go_on(script, position, position.index)
        end = position.index + position.count
        if not is_recorded:
            done = self._judge().statements(position, script)
            return self._go_on(script, position, position.index + done)
        if position.raised or position.settled or not script.statements[end - 1].records:
            return 0, 0  # Somebody else has recorded it, say by "migrate --fake".
        return self._go_on(script, position, end)

    def _begins_with(self, position: Checkpoint) -> bool:
        """Whether the plan begins with the migration that the shard is in the middle of."""
        first = self._plan.units[0] if self._plan.units else None
        wanted = (position.migration, position.backwards)
        return first is not None and (first.key, first.backwards) == wanted

    def _is_untouched(self, position: Checkpoint) -> bool:
        """Whether nothing of that migration took effect, so that it need not be ended first."""
        assert position.migration is not None
        if position.what is What.OWN:
            rolled_back = (
                bool(position.marker)
                and position.reverts
                and not self._place.records.is_marked(position.marker)
            )
            undone = position.settled == "undone" or (not position.settled and rolled_back)
            return position.operation == position.index == 0 and undone
        if position.what is What.STATEMENT:
            script = self._rehearsals.script(position.run, position.script)
            assert script is not None, "scripts are kept as long as a step needs them"
            index, statement = dict(script.by_migration())[position.migration][0]
            is_first = (position.index, statement.operation) == (index, 0)
            return is_first and not self._judge().statements(position, script)
        return False

    def _judge(self) -> RecoveryCheck:
        schema = self._schema or self._place.snapshot()
        self._schema = None
        return RecoveryCheck(self._place.connection, schema, self._place.records)

    def _go_on(self, script: RecordedScript, position: Checkpoint, start: int) -> tuple[int, int]:
        """The statements of a script from ``start``, as far as the plan agrees with it."""
        units = 0
        unit: Unit | None = None
        for key, statements in script.by_migration():
            rest = [(index, statement) for index, statement in statements if index >= start]
            if not rest:
                continue
            unit = self._plan.units[units] if units < len(self._plan.units) else None
            last = rest[-1][1]
            if unit is None or unit.key != key:
                return units, 0
            if last.records and last.outline != unit.outline(len(unit.operations)):
                return units, 0
            with self._editing(unit):
                self._statements(script, position.script, position.run, rest)
            units += bool(last.records)
        if script.units and unit is None:
            return 0, 0  # Nothing was left but what comes after it.
        if not script.units:
            self._compare(script, position.script, position.run, next(iter(self._plan.units), None))
        elif unit is not None and self._is_atomic(unit):
            self._compare(script, position.script, position.run)
        self._schema = script.promise
        return units, script.operations

    def _interrupted(self, position: Checkpoint) -> Unit | None:
        """The unit that the shard is in the middle of; None if nothing of it was done, and
        another one comes first, or it is not what it was."""
        assert position.migration is not None
        begins = self._begins_with(position)
        if begins:
            first = self._plan.units[0]
            count = position.operation + (position.what is What.OWN)
            if first.outline(count) == position.outline:
                return first
        if self._is_untouched(position):
            return None
        where = (
            f"{self._place.alias} stands in the middle of {'.'.join(position.migration)}"
            f"{', on the way back' if position.backwards else ''}"
        )
        if not begins:
            raise OperationError(
                f"{where}, and what is asked for does not begin with that. Finish it first:"
                f" 'manage.py migrate_shards {position.migration[0]} …' to a target beyond it."
            )
        raise OperationError(
            f"{where}, and the operations of that migration are others now, up to the one it"
            " stands at. Put those back that it had, or bring the shard's tables to a state of"
            " before or after by hand and record that by 'migrate --fake'."
        )


class _Editing:
    """The schema editor of a unit, as the one that is in use."""

    def __init__(self, replay: ScriptExecutor, unit: Unit) -> None:
        self._replay = replay
        self._unit = unit
        place = replay._place
        place.check()
        self._editor = place.connection.schema_editor(atomic=unit.migration.atomic)
        if self._editor.atomic_migration:
            position = Checkpoint(
                What.UNIT, place.step.run.id, migration=unit.key, backwards=unit.backwards
            )
            place.at(position, "All of it in one transaction")

    def __enter__(self) -> None:
        self._replay._editor = self._editor.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._replay._editor = None
        self._editor.__exit__(*exc)


def build(place: ShardSession, script: RecordedScript, run: int, key: str) -> SchemaSnapshot:
    """Make the tables of a shard that has none, as they are at the end of ``script``; returns them.

    May be repeated when it was interrupted.
    """
    position = Checkpoint(What.BUILD, run, script=key)
    place.at(position, "Make all tables")
    place.connection.build_schema(script.promise)
    found = compare(place, script, position)
    place.records.record(script.records, backwards=False)
    return found


def compare(
    place: ShardSession,
    script: RecordedScript,
    position: Checkpoint,
    before: SchemaSnapshot | None = None,
) -> SchemaSnapshot:
    """See that the schema is as ``script`` promises; returns it.

    :param position: where to go on once it is.
    :param before: what it was when ``script`` began. If all that does is to alter tables, these are
        looked at, and which other ones there are.
    :raises SchemaDiffers: it is not as promised; the next attempt compares again.
    """
    tables = script.altered_tables(before) if before is not None else None
    if before is not None and tables is not None:
        found = place.glance(before, tables)
        if found.looks_like(script.promise):
            return found
    found = place.snapshot()
    differences = found.differences(script.promise)
    if differences:
        place.at(position, "Compare the schema")
        raise SchemaDiffers(
            f"{place.alias} is not as its migrations make it: {'; '.join(differences)}. Somebody"
            " changed it meanwhile, or a server does not do what another one did."
        )
    return found
