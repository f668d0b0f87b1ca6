"""Record the SQL of migrations: run them on an empty copy of a shard's schema (a rehearsal).

The copy is on the shard's server, and Django uses it under the shard's alias. So schema editors
find the same schema, and routers give the same answers, as on the shard. See
``docs/decisions/0014-rehearsal.md``.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections, router
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState
from django.db.migrations.utils import resolve_relation
from django.db.models import ForeignKey

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.operations.migrate.plan import MigrationPlan, Unit
from sharded_orm.operations.migrate.planner import reading_migrations
from sharded_orm.operations.migrate.recorded_sql import RecordedScript
from sharded_orm.operations.migrate.sql_recorder import Recorder
from sharded_orm.operations.runs.journal import JournalRun, Scripts
from sharded_orm.topology.model import ShardGroup

_SUFFIX = "_rehearsal"
_MAX_SCRIPTS = 64  # Number of scripts (recorded SQL) that are kept in memory.
_MAX_SCHEMA_NAME = (
    63  # Maximum length of a schema's name, in bytes (PostgreSQL; MySQL: 64 characters).
)


@dataclass(frozen=True)
class Segment:
    """Consecutive operations of a plan whose SQL is recorded together, in one script.

    A *unit* is one migration in one direction. A *mixed* unit has operations that must run on each
    shard itself, such as ``RunPython``. A segment has one of two forms:

    - It has whole units, up to the next mixed unit.
    - It is *partial*: it has operations of one mixed unit, from ``operation`` to the next operation
      that runs on each shard, or to the end of the unit.

    :param unit: the index of the segment's first unit in the plan.
    :param operation: the index of the segment's first operation in that unit.
    """

    plan: MigrationPlan
    unit: int
    operation: int

    @property
    def units(self) -> list[Unit]:
        units = self.plan.units[self.unit :]
        if self.is_partial:
            return list(units[:1])
        mixed = (number for number, unit in enumerate(units) if unit.is_mixed)
        return list(units[: next(mixed, len(units))])

    @property
    def is_partial(self) -> bool:
        return self.plan.units[self.unit].is_mixed

    @property
    def end(self) -> int:
        """The index, in the migration, of the first operation after this segment.

        Call this only for a partial segment, which has operations of a single migration. The
        operation at this index, if there is one, runs on each shard itself.
        """
        unit = self.plan.units[self.unit]
        return next(
            (
                number
                for number in range(self.operation, len(unit.operations))
                if unit.runs_per_shard(number)
            ),
            len(unit.operations),
        )


class Rehearsals:
    """Returns the SQL that operations of a plan run on a shard with a given schema (a *script*).

    When a script is needed for the first time, it is recorded on an empty copy of the schema (a
    rehearsal) and stored in the journal. Thread-safe: if several threads need the same script, one
    of them records it and the others wait.

    :param fake_initial: whether an initial migration is only recorded as applied if its tables
        exist already.
    """

    def __init__(self, group: ShardGroup, scripts: Scripts, *, fake_initial: bool) -> None:
        self._schema = _rehearsal_schema(group.schema_name(0))
        self._scripts = scripts
        self.fake_initial = fake_initial
        self._lock = threading.Lock()
        # The scripts (recorded SQL) that were loaded last. The keys are pairs (id of the journal
        # run, key of the script).
        self._scripts_by_key: dict[tuple[int, str], RecordedScript] = {}
        self._last: SchemaSnapshot | None = None

    def key(self, connection: ShardConnectionMixin, segment: Segment, before: str) -> str:
        content = [
            before,
            connection.vendor,
            list(connection.get_database_version()),
            segment.plan.backwards,
            self.fake_initial,
            segment.operation,
            [[*unit.key, unit.outline(len(unit.operations))] for unit in segment.units],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:40]

    def script(self, run: JournalRun | int, key: str) -> RecordedScript | None:
        """Return the script (recorded SQL) that ``run`` has stored in the journal under ``key``;
        None if the key is not found.

        :param run: the present run, or the id of an earlier run.
        """
        number = run if isinstance(run, int) else run.id
        script = self._scripts_by_key.get((number, key))
        if script is None:
            content = self._scripts.get(run, key)
            if content is not None:
                script = self._remember(number, key, RecordedScript.from_json(content))
        return script

    def script_for(
        self,
        run: JournalRun,
        connection: ShardConnectionMixin,
        segment: Segment,
        snapshot: SchemaSnapshot,
    ) -> tuple[str, RecordedScript]:
        """Return the recorded SQL of ``segment`` (some operations of a plan) for shards with the
        schema ``snapshot``. The result is a pair (key of the SQL in the journal, SQL).

        If the journal does not have the SQL yet, a rehearsal records it: the operations run on an
        empty copy of the schema.

        :param connection: the connection of a shard with that schema. During a rehearsal, the
            shard's alias leads to the copy, in this thread only.
        :raises RehearsalFailed: a migration fails on the copy, which has no rows.
        :raises LeaseLost: another process has taken over ``run``.

        A rehearsal costs the creation of a copy of the schema. Each statement that changes the
        schema costs two more round trips, unless the migration runs in one transaction.
        """
        last = self._last
        if last is None or not snapshot.looks_like(last):
            self._last = last = snapshot
        # Most shards have the same schema, so ``last`` is usually the snapshot of an earlier shard.
        # Its fingerprint (a hash) has been computed already. The comparison above costs less than
        # to compute a new fingerprint.
        key = self.key(connection, segment, last.fingerprint)
        script = self.script(run, key)
        if script is None:
            with self._lock:
                script = self.script(run, key)
                if script is None:
                    run.check()
                    rehearsed = self._rehearse(connection, segment, snapshot)
                    # Raise LeaseLost if another process has taken over the run meanwhile. That
                    # process may have replaced the copy of the schema in the middle of the
                    # rehearsal. Then the script is wrong, and must not be stored.
                    run.check()
                    stored = self._scripts.put(run, key, rehearsed.to_json())
                    script = self._remember(run.id, key, RecordedScript.from_json(stored))
        return key, script

    def _remember(self, run: int, key: str, script: RecordedScript) -> RecordedScript:
        # Forget the scripts that were loaded first. A run over shards with many different schemas
        # would otherwise fill the memory.
        while len(self._scripts_by_key) >= _MAX_SCRIPTS:
            self._scripts_by_key.pop(next(iter(self._scripts_by_key)), None)
        self._scripts_by_key[run, key] = script
        return script

    def _rehearse(
        self, connection: ShardConnectionMixin, segment: Segment, snapshot: SchemaSnapshot
    ) -> RecordedScript:
        with self._copy(connection, snapshot) as copy:
            recorder = Recorder(copy)
            state = segment.plan.state_before(segment.unit)
            # Make Django create the model classes of the state now, as MigrationExecutor does. Then
            # the operations only change these classes.
            _ = state.apps
            try:
                if segment.is_partial:
                    units, operations = self._rehearse_part(copy, recorder, segment, state)
                else:
                    self._rehearse_units(copy, recorder, segment, state)
                    units, operations = len(segment.units), 0
            except RehearsalFailed:
                raise
            except Exception as exc:
                raise RehearsalFailed(
                    f"{recorder.where} failed on a copy of {connection.alias!r} without rows, before any"
                    f" shard was touched by it ({type(exc).__name__}: {exc})."
                    + _remedy(segment, connection.alias)
                ) from exc
            return RecordedScript(
                snapshot.fingerprint,
                copy.schema_snapshot(),
                recorder.statements,
                units,
                operations,
            )

    def _rehearse_units(
        self, copy: Any, recorder: Recorder, segment: Segment, state: ProjectState
    ) -> None:
        for number, unit in enumerate(segment.units):
            if unit.backwards and number:
                state = segment.plan.state_before(segment.unit + number)
                _ = state.apps
            is_faked = self._is_soft_applied(copy, unit, state)
            if is_faked:
                unit.migration.mutate_state(state, preserve=False)
            else:
                self._run(copy, recorder, unit, state, 0, len(unit.operations))
            recorder.add_record(unit)

    def _rehearse_part(
        self, copy: Any, recorder: Recorder, segment: Segment, state: ProjectState
    ) -> tuple[int, int]:
        (unit,) = segment.units
        if segment.operation == 0 and self._is_soft_applied(copy, unit, state):
            recorder.add_record(unit)
            return 1, 0
        self._run(copy, recorder, unit, state, segment.operation, segment.end)
        return 0, segment.end

    def _run(
        self, copy: Any, recorder: Recorder, unit: Unit, state: ProjectState, start: int, end: int
    ) -> None:
        # Make the same calls as MigrationExecutor.apply_migration() and Migration.apply(), with one
        # exception: an operation's attribute ``atomic`` is not read. It asks for a separate
        # transaction, which no operation with recorded SQL needs.
        label = unit.migration.app_label
        with recorder.attach(), copy.schema_editor(atomic=unit.migration.atomic) as editor:
            fingerprints = not editor.atomic_migration
            # The schema editor puts off statements for indexes and constraints, and runs them at
            # the end of this ``with`` block. So the script has these statements, and the next
            # operation of the migration, such as a RunPython, finds the indexes in place.
            for number, piece in enumerate(unit.pieces(state)):
                if not start <= number < end:
                    continue
                operation = piece.operation
                recorder.set_operation(
                    unit.key, number, operation.describe(), fingerprints=fingerprints
                )
                if unit.backwards:
                    operation.database_backwards(label, editor, piece.from_state, piece.to_state)
                else:
                    operation.database_forwards(label, editor, piece.from_state, piece.to_state)

    def _is_soft_applied(self, copy: Any, unit: Unit, state: ProjectState) -> bool:
        if not self.fake_initial or unit.backwards:
            return False
        with reading_migrations:
            executor = MigrationExecutor(copy)
        applied, _ = executor.detect_soft_applied(state, unit.migration)
        return bool(applied)

    @contextmanager
    def _copy(self, connection: ShardConnectionMixin, snapshot: SchemaSnapshot) -> Iterator[Any]:
        with connection.structural_copy(snapshot, self._schema) as copy:
            copied = copy.schema_snapshot()
            if differences := copied.differences(snapshot):
                raise RehearsalFailed(
                    f"A copy of {connection.alias!r} does not look like it: {'; '.join(differences)}."
                )
            # During the rehearsal, the shard's alias must lead to the copy of the schema, in this
            # thread only. Django's atomic() looks a connection up by its alias.
            connections[connection.alias] = copy
            try:
                MigrationRecorder(copy).ensure_schema()
                yield copy
            finally:
                connections[connection.alias] = connection


def _remedy(segment: Segment, alias: str) -> str:
    """Return advice about a likely cause of a failed rehearsal; "" if the segment does not show
    this cause.

    The cause is a foreign key from a table on shards to a table that is not on shards. Most
    databases refuse to create it. A migration from the time before its table was sharded may have
    such a foreign key.
    """
    plan, names = segment.plan, {}
    if plan.backwards:
        return ""
    for number in range(segment.unit, segment.unit + len(segment.units)):
        for (app, model), state in plan.state_before(number + 1).models.items():
            for name, field in state.fields.items():
                if not isinstance(field, ForeignKey) or not getattr(field, "db_constraint", False):
                    continue
                other = resolve_relation(field.remote_field.model, app, model)
                is_here, is_there = (
                    router.allow_migrate(alias, label, model_name=key)
                    for label, key in ((app, model), other)
                )
                if is_here and not is_there:
                    names[f"{app}.{state.name}.{name}"] = True
    if not names:
        return ""
    return (
        f" A shard has no table to which {', '.join(names)} could refer. Write db_constraint=False into"
        " the field, in the migration that adds it."
    )


def _rehearsal_schema(schema: str) -> str:
    if len(schema.encode()) + len(_SUFFIX) > _MAX_SCHEMA_NAME:
        schema = hashlib.sha256(schema.encode()).hexdigest()[:32]
    return schema + _SUFFIX
