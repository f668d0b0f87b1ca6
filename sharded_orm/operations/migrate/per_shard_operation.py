"""Operations that run on each shard: Python, raw SQL, and whatever projects have written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import transaction
from django.db.migrations.operations import RunSQL

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.plan import Piece, Unit
from sharded_orm.operations.migrate.recovery import RecoveryCheck
from sharded_orm.operations.migrate.shard_session import ShardSession

# Not MariaDB's SET STATEMENT … FOR, which runs another statement.
_SETTING = re.compile(r"\s*SET\s+(?!STATEMENT\b)", re.IGNORECASE)


class PerShardOperation:
    """One of them on one shard.

    :param number: that of the operation in its unit.
    :param editor: of the migration, entered.
    :param schema: of the shard, where it is known.
    """

    def __init__(
        self,
        place: ShardSession,
        unit: Unit,
        number: int,
        piece: Piece,
        editor: Any,
        schema: SchemaSnapshot | None,
    ) -> None:
        self._place = place
        self._unit = unit
        self._number = number
        self._piece = piece
        self._editor = editor
        self.label = piece.operation.describe()
        #: None when it may have changed since it was read.
        self.schema = schema

    def run(self) -> None:
        """In the order and the transactions in which Django would run it."""
        if self._editor.atomic_migration:
            self._call(self._editor)
            self.schema = None
        elif self._is_raw:
            self._run_raw(0)
        else:
            self._run_operation()

    def go_on(self, position: Checkpoint, judge: RecoveryCheck) -> None:
        """Do what is left of it."""
        if not self._is_raw:
            if not judge.operation(position, self.label):
                self._run_operation()
            return
        statements = self._raw_statements()
        # What it set is gone with the session that it was set in.
        for sql, params in statements[: position.index]:
            if _SETTING.match(sql):
                self._execute(sql, params)
        sql = statements[position.index][0]
        effect = self._effect(sql)
        done = effect is not Effect.NOTHING and judge.raw(position, self.label, sql, effect)
        self._run_raw(position.index + done)

    @property
    def _is_raw(self) -> bool:
        return type(self._piece.operation) is RunSQL

    def _position(self, **details: Any) -> Checkpoint:
        return Checkpoint(
            What.OWN,
            self._place.step.run.id,
            migration=self._unit.key,
            backwards=self._unit.backwards,
            operation=self._number,
            outline=self._unit.outline(self._number + 1),
            **details,
        )

    def _call(self, editor: Any) -> None:
        piece, label = self._piece, self._unit.migration.app_label
        operation = piece.operation
        run = operation.database_backwards if self._unit.backwards else operation.database_forwards
        run(label, editor, piece.from_state, piece.to_state)

    # ##### Python #####

    def _run_operation(self) -> None:
        place = self._place
        alone = self._unit.is_atomic(self._number)
        marker = place.next_marker() if alone else ""
        place.at(self._position(marker=marker, reverts=self._now().is_transactional), self.label)
        if self._editor.connection.features.can_rollback_ddl:
            self.schema = None  # Nobody listens to what it does.
        with place.doing():
            with transaction.atomic(using=place.alias) if alone else nullcontext():
                if alone:
                    place.records.mark(marker)
                with self._watching():
                    self._call(self._editor)
                if self._editor.deferred_sql:
                    self._not_alone()  # Before the marker is committed.
            for sql in self._editor.deferred_sql:
                self._editor.execute(sql, None)
            self._editor.deferred_sql = []

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Tell the journal before a statement that commits what is open by itself."""
        if self._editor.connection.features.can_rollback_ddl:
            yield
        else:
            with self._editor.connection.execute_wrapper(self._hear):
                yield

    def _hear(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        if self._effect(sql) is Effect.SCHEMA:
            self._not_alone()
        return execute(sql, params, many, context)

    def _not_alone(self) -> None:
        self.schema = None
        position = self._place.position
        if position is not None and position.marker and position.reverts:
            self._place.note(reverts=False)

    # ##### Raw SQL: its statements are known, so each of them can be judged #####

    def _raw_statements(self) -> list[tuple[str, Any]]:
        collected = _Collector(self._editor.connection)
        self._call(collected)
        return collected.statements

    def _run_raw(self, start: int) -> None:
        place = self._place
        for index, (sql, params) in enumerate(self._raw_statements()):
            if index < start:
                continue
            place.check()
            effect = self._effect(sql)
            if effect is Effect.ROWS:
                marker = place.next_marker()
                reverts = self._now().is_transactional
                place.at(self._position(index=index, marker=marker, reverts=reverts), self.label)
                with place.doing(), transaction.atomic(using=place.alias):
                    place.records.mark(marker)
                    self._execute(sql, params)
            else:
                before = self._now().fingerprint if effect is Effect.SCHEMA else ""
                place.at(self._position(index=index, before=before), self.label)
                if effect is Effect.SCHEMA:
                    self.schema = None
                with place.doing():
                    self._execute(sql, params)

    def _now(self) -> SchemaSnapshot:
        if self.schema is None:
            self.schema = self._place.snapshot()
        return self.schema

    def _execute(self, sql: str, params: Any) -> None:
        with self._editor.connection.cursor() as cursor:
            cursor.execute(sql, params)

    def _effect(self, sql: str) -> Effect:
        effect: Effect = self._editor.connection.effect_of(sql)
        # Lasts as long as the session, and may be set again.
        return Effect.NOTHING if _SETTING.match(sql) else effect


class _Collector:
    """Takes the place of an editor, for an operation that only executes."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.statements: list[tuple[str, Any]] = []

    def execute(self, sql: Any, params: Any = ()) -> None:
        self.statements.append((str(sql), params))
