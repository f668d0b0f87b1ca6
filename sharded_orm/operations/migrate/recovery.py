"""Whether something that was interrupted took effect.

The rules are explained in ``docs/explanation/journal.md``. What they need was written before
the thing was done, so that every kill finds it.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect, is_repeatable
from sharded_orm.exceptions import OperationUnclear
from sharded_orm.operations.migrate.checkpoint import Checkpoint
from sharded_orm.operations.migrate.recorded_sql import RecordedScript
from sharded_orm.operations.migrate.records import Records


class RecoveryCheck:
    """Answers for one shard, while nothing else can be under way there.

    Every answer is whether the thing took effect, or how much of it; :exc:`OperationUnclear` if that
    cannot be told.

    :param now: the schema as it is.
    """

    def __init__(
        self, connection: ShardConnectionMixin, now: SchemaSnapshot, records: Records
    ) -> None:
        self._connection = connection
        self._now = now
        self._records = records

    def statements(self, position: Checkpoint, script: RecordedScript) -> int:
        """How many of a script took effect, of a migration that is not recorded."""
        covered = script.statements[position.index : position.index + position.count]
        statements = [statement for statement in covered if not statement.records]
        if not statements:
            return 0
        if position.settled:
            return len(statements) if position.settled == "done" else 0
        label, sql = statements[0].label, "; ".join(statement.sql for statement in statements)
        if statements[0].effect is Effect.ROWS:
            return int(self._by_marker(position, label, sql))
        before = script.fingerprint_before(position.index)
        seen = [before, *(statement.after for statement in statements)]
        now = self._now.fingerprint
        if seen == [before, before]:
            if now == before and is_repeatable(sql):
                return 0
        elif now in seen:
            return seen.index(now)
        raise self._unclear(
            position, label, sql,
            "the schema is neither as it was before the statement nor as it is after it"
            if now not in seen
            else "the statement leaves nothing in the schema by which it could be told",
        )  # fmt: skip

    def raw(self, position: Checkpoint, label: str, sql: str, effect: Effect) -> bool:
        """Of raw SQL, whose effect on the schema nobody has seen before."""
        if position.settled:
            return position.settled == "done"
        if effect is Effect.ROWS:
            return self._by_marker(position, label, sql)
        changed = self._now.fingerprint != position.before
        if is_repeatable(sql):
            # One statement that makes, alters or drops something is done whole or not at all.
            return changed
        if position.raised:
            return False
        raise self._unclear(
            position, label, sql, "nothing in the database tells whether such a statement was run"
        )

    def operation(self, position: Checkpoint, label: str) -> bool:
        """Of an operation that runs Python."""
        if position.settled:
            return position.settled == "done"
        return self._by_marker(position, label, "")

    def _by_marker(self, position: Checkpoint, label: str, sql: str) -> bool:
        marked = bool(position.marker) and self._records.is_marked(position.marker)
        if marked and position.reverts:
            return True
        if position.raised:
            # Not interrupted: it has told of its error, and is run again as Django would.
            return False
        if position.marker and position.reverts:
            return False  # Rolled back.
        raise self._unclear(
            position, label, sql,
            "it is not in one transaction, so a part of it may have taken effect"
            if not position.marker
            else "a statement in it commits by itself, or changes a table that takes nothing back,"
            " so a part of it may have taken effect",
        )  # fmt: skip

    def _unclear(self, position: Checkpoint, label: str, sql: str, why: str) -> OperationUnclear:
        assert position.migration is not None
        alias = self._connection.alias
        ops: Any = self._connection.ops
        looks = [ops.show_definition_sql(name) for name in self._now.definitions if name in sql]
        return OperationUnclear(
            f"{'.'.join(position.migration)}{', on the way back' if position.backwards else ''}:"
            f" {label!r} was interrupted on {alias}, and {why}."
            + (f" The statement: {sql}." if sql else " What it does is in the migration's file.")
            + (f" Look with: {'; '.join(looks)}." if looks else "")
            + " Nothing more is done on this shard until you tell what you found: 'manage.py"
            f" migrate_shards --settle {alias}=done' if it took effect as a whole, or"
            f" '--settle {alias}=undone' when no part of it has, or you took that back; then it is"
            " run again."
        )
