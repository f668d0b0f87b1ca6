"""Find out whether an interrupted step of a shard's migration took effect.

A process may be killed at any moment. Before each step, it writes facts about the step into the
journal. With them, the next process examines the shard. ``docs/explanation/journal.md`` explains
the rules.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect, is_repeatable
from sharded_orm.operations.exceptions import OperationUnclear
from sharded_orm.operations.migrate.checkpoint import Checkpoint
from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.migrate.recorded_sql import RecordedScript


class RecoveryCheck:
    """Finds out whether steps took effect on one shard. The caller holds the shard's lock.

    Each public method returns whether a step took effect, or how many of its statements did. It
    raises :exc:`OperationUnclear` if nothing on the shard shows this.

    :param schema: the present schema of the shard.
    """

    def __init__(
        self, connection: ShardConnectionMixin, schema: SchemaSnapshot, records: Records
    ) -> None:
        self._connection = connection
        #: The present schema of the shard.
        self.schema = schema
        self._records = records

    def statements(self, checkpoint: Checkpoint, script: RecordedScript) -> int:
        """Return how many recorded statements of an interrupted step took effect.

        Call this only if the statement that records the migration, the last one of the step, took
        no effect. It is not counted.

        :param script: the script to which the checkpoint's statements belong.
        """
        stretch = script.statements[checkpoint.index : checkpoint.index + checkpoint.count]
        statements = [statement for statement in stretch if not statement.records]
        if not statements:
            return 0
        if checkpoint.settled:
            return len(statements) if checkpoint.settled == "done" else 0
        label, sql = statements[0].label, "; ".join(statement.sql for statement in statements)
        self._undo_unfinished(sql)
        if statements[0].effect is Effect.ROWS:
            return int(self._by_marker(checkpoint, label, sql))
        before = script.fingerprint_before(checkpoint.index)
        fingerprints = [before, *(statement.after for statement in statements)]
        fingerprint = self.schema.fingerprint
        if fingerprints == [before, before]:
            if fingerprint == before and is_repeatable(sql):
                return 0
        elif fingerprint in fingerprints:
            return fingerprints.index(fingerprint)
        raise self._unclear(
            checkpoint, label, sql,
            "the schema is neither as it was before the statement nor as it is after it"
            if fingerprint not in fingerprints
            else "the statement leaves nothing in the schema by which it could be told",
        )  # fmt: skip

    def raw(self, checkpoint: Checkpoint, label: str, sql: str, effect: Effect) -> bool:
        """Whether a statement of ``RunSQL`` took effect.

        If the statement changes the schema, compare the present schema with the schema before the
        statement. The schema after the statement is not known, because ``RunSQL`` is not run on an
        empty copy of the schema first.

        :param label: a description of the operation for people.
        :param effect: what the statement changes: rows or the schema.
        """
        if checkpoint.settled:
            return checkpoint.settled == "done"
        if effect is Effect.ROWS:
            return self._by_marker(checkpoint, label, sql)
        self._undo_unfinished(sql)
        changed = self.schema.fingerprint != checkpoint.before
        if is_repeatable(sql):
            # The server executes a single CREATE, ALTER or DROP completely or not at all. So the
            # statement took effect if the schema has changed.
            return changed
        if checkpoint.raised:
            return False
        raise self._unclear(
            checkpoint, label, sql, "nothing in the database tells whether such a statement was run"
        )

    def operation(self, checkpoint: Checkpoint, label: str) -> bool:
        """Whether an operation without recorded SQL, such as ``RunPython``, took effect.

        :param label: a description of the operation for people.
        """
        if checkpoint.settled:
            return checkpoint.settled == "done"
        return self._by_marker(checkpoint, label, "")

    def _undo_unfinished(self, sql: str) -> None:
        if self._connection.undo_unfinished(sql):
            self.schema = self._connection.schema_snapshot()

    def _by_marker(self, checkpoint: Checkpoint, label: str, sql: str) -> bool:
        is_marked = bool(checkpoint.marker) and self._records.is_marked(checkpoint.marker)
        if is_marked and checkpoint.reverts:
            return True
        if checkpoint.raised:
            # The step was not interrupted, but failed with an error. Run it again, as a second call
            # of Django's ``migrate`` would.
            return False
        if checkpoint.marker and checkpoint.reverts:
            # The marker is a row of the same transaction. It does not exist, so the transaction was
            # rolled back.
            return False
        raise self._unclear(
            checkpoint, label, sql,
            "it is not in one transaction, so a part of it may have taken effect"
            if not checkpoint.marker
            else "a statement in it commits by itself, or changes a table that takes nothing back,"
            " so a part of it may have taken effect",
        )  # fmt: skip

    def _unclear(self, checkpoint: Checkpoint, label: str, sql: str, why: str) -> OperationUnclear:
        assert checkpoint.migration is not None
        alias = self._connection.alias
        ops: Any = self._connection.ops
        commands = [
            ops.show_definition_sql(name) for name in self.schema.definitions if name in sql
        ]
        return OperationUnclear(
            f"{'.'.join(checkpoint.migration)}{', on the way back' if checkpoint.backwards else ''}:"
            f" {label!r} was interrupted on {alias}, and {why}."
            + (f" The statement: {sql}." if sql else " What it does is in the migration's file.")
            + (f" Look with: {'; '.join(commands)}." if commands else "")
            + " Nothing more is done on this shard until you tell what you found: 'manage.py"
            f" migrate_shards --settle {alias}=done' if it took effect as a whole, or"
            f" '--settle {alias}=undone' when no part of it has, or you took that back; then it is"
            " run again."
        )
