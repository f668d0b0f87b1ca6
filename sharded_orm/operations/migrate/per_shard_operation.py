"""Run, on one shard, an operation that has no recorded SQL.

Such an operation is ``RunPython``, ``RunSQL`` or an operation of the project's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from django.db import transaction
from django.db.migrations.operations import RunSQL

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.backends.write_hooks.followers import CommitWatcher
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.plan import Piece, Unit
from sharded_orm.operations.migrate.shard_session import ShardSession
from sharded_orm.operations.migrate.step_outcome import RecoveryCheck

# Matches a statement that does nothing but set session variables. It does not match MariaDB's SET
# STATEMENT … FOR, which sets variables only for the statement after FOR and also runs that
# statement. It does not match a text with a second statement after the SET.
_SESSION_SETTING = re.compile(r"\s*SET\s+(?!STATEMENT\b)[^;]*;?\s*\Z", re.IGNORECASE)


class PerShardOperation:
    """Runs one operation on one shard.

    :param unit: the migration that has the operation.
    :param number: the index of the operation in ``unit``.
    :param piece: the operation with the project states before and after it.
    :param editor: the migration's schema editor, whose ``with`` block is open.
    :param schema: the present schema of the shard; None if it is not known and must be read.
    """

    def __init__(
        self,
        session: ShardSession,
        unit: Unit,
        number: int,
        piece: Piece,
        editor: Any,
        schema: SchemaSnapshot | None,
    ) -> None:
        self._session = session
        self._unit = unit
        self._number = number
        self._piece = piece
        self._editor = editor
        self.label = piece.operation.describe()
        #: The shard's schema; None if it may have changed since it was read.
        self.schema = schema
        # The number of statements that _observe() has seen.
        self._observed = 0
        #: Whether _observe() is running a statement at the moment.
        self.is_observing = False

    def run(self) -> None:
        """Run the operation's statements in the same order and transactions as Django would."""
        if self._editor.atomic_migration:
            with self._observe_statements():
                self._call(self._editor)
        elif self._is_raw:
            self._run_raw(0)
        else:
            self._run_operation()

    def resume(self, checkpoint: Checkpoint, check: RecoveryCheck) -> None:
        """Run the part of an interrupted operation that has not taken effect yet.

        :param checkpoint: the checkpoint that was written before the interruption.
        :param check: finds out which part of the operation took effect.
        :raises OperationUnclear: nothing shows which part took effect.
        """
        if not self._is_raw:
            if not check.operation(checkpoint, self.label):
                self._run_operation()
            return
        statements = self._raw_statements()
        # The variables that the operation had set were lost with the interrupted session. Set them
        # again in this session, because the next statements may depend on them.
        for sql, params in statements[: checkpoint.index]:
            if _SESSION_SETTING.match(sql):
                self._execute(sql, params)
        sql = statements[checkpoint.index][0]
        effect = self._effect(sql)
        done = effect is not Effect.NOTHING and check.raw(checkpoint, self.label, sql, effect)
        # ``check`` may have dropped an index that was built only in part. So use the schema that
        # ``check`` has read since.
        self.schema = check.schema
        self._run_raw(checkpoint.index + done)

    @property
    def _is_raw(self) -> bool:
        return type(self._piece.operation) is RunSQL

    def _checkpoint(self, **details: Any) -> Checkpoint:
        return Checkpoint(
            What.PER_SHARD,
            self._session.step.run.id,
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
        session = self._session
        in_transaction = self._unit.is_atomic(self._number)
        marker = session.new_marker() if in_transaction else ""
        session.begin(
            self._checkpoint(marker=marker, reverts=self._current_schema().is_transactional),
            self.label,
        )
        with session.attempt():
            with transaction.atomic(using=session.alias) if in_transaction else nullcontext():
                if in_transaction:
                    session.records.mark(marker)
                with self._observe_statements(in_transaction=in_transaction):
                    self._call(self._editor)
                if self._editor.deferred_sql:
                    # The schema editor runs its deferred statements after the commit. The marker (a
                    # row) proves the commit, but does not prove that these statements were run: the
                    # process may be killed before. So note in the journal, before the commit, that
                    # a rollback does not undo the whole operation.
                    self.forget_revertibility()
            for sql in self._editor.deferred_sql:
                self._editor.execute(sql, None)
            self._editor.deferred_sql = []

    @contextmanager
    def _observe_statements(self, *, in_transaction: bool = False) -> Iterator[None]:
        """A context manager that notices DDL statements in its block.

        If the block runs no DDL statement, the schema need not be read again after the operation.
        On some databases, such as MySQL, a DDL statement commits the transaction. So on these
        databases, before the first DDL statement runs, the journal gets a note that a rollback does
        not undo the whole operation.
        """
        connection = self._editor.connection
        session, sent = connection.connection, connection.statements_sent()
        if in_transaction and not connection.features.can_rollback_ddl:
            connection.commit_watchers += (_UnobservedCommits(self),)
        with connection.execute_wrapper(self._observe):
            yield
        if (
            sent is None
            or connection.connection is not session
            or connection.statements_sent() != sent + self._observed
        ):
            # Some statements were sent past _observe(), for example by callproc() or by a cursor of
            # the driver. They may have changed the schema since it was read.
            self.schema = None

    def _observe(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        connection = self._editor.connection
        if not isinstance(sql, str) or connection.may_change_schema(sql):
            self.schema = None
        if not connection.features.can_rollback_ddl and self._effect(sql) is Effect.SCHEMA:
            self.forget_revertibility()
        before = connection.statements_sent() or 0
        self.is_observing = True
        try:
            return execute(sql, params, many, context)
        finally:
            self.is_observing = False
            self._observed += (connection.statements_sent() or 0) - before

    def forget_revertibility(self) -> None:
        """Note in the journal that a rollback does not undo the whole operation any more."""
        self.schema = None
        checkpoint = self._session.checkpoint
        if checkpoint is not None and checkpoint.marker and checkpoint.reverts:
            self._session.amend(reverts=False)

    # ##### RunSQL: the statements are known, so each can be checked after a kill #####

    def _raw_statements(self) -> list[tuple[str, Any]]:
        collector = _Collector(self._editor.connection)
        self._call(collector)
        return collector.statements

    def _run_raw(self, start: int) -> None:
        session, connection = self._session, self._editor.connection
        for index, (sql, params) in enumerate(self._raw_statements()):
            if index < start:
                continue
            session.check()
            effect = self._effect(sql)
            if effect is Effect.ROWS:
                marker = session.new_marker()
                reverts = self._current_schema().is_transactional
                session.begin(
                    self._checkpoint(index=index, marker=marker, reverts=reverts), self.label
                )
                with session.attempt(), transaction.atomic(using=session.alias):
                    session.records.mark(marker)
                    self._execute(sql, params)
            else:
                before = self._current_schema().fingerprint if effect is Effect.SCHEMA else ""
                session.begin(self._checkpoint(index=index, before=before), self.label)
                if effect is Effect.SCHEMA:
                    self.schema = None
                with session.attempt():
                    self._execute(sql, params)
            if not _SESSION_SETTING.match(sql) and connection.may_change_schema(sql):
                self.schema = None

    def _current_schema(self) -> SchemaSnapshot:
        if self.schema is None:
            self.schema = self._session.snapshot()
        return self.schema

    def _execute(self, sql: str, params: Any) -> None:
        with self._editor.connection.cursor() as cursor:
            cursor.execute(sql, params)

    def _effect(self, sql: str) -> Effect:
        effect: Effect = self._editor.connection.effect_of(sql)
        # A statement that sets a session variable leaves nothing in the database. After an
        # interruption it is simply run again, so nobody need find out whether it took effect.
        return Effect.NOTHING if _SESSION_SETTING.match(sql) else effect


class _UnobservedCommits(CommitWatcher):
    """Watches for commits of an operation's transaction that no ``execute_wrapper()`` can see.

    They may come from ``callproc()``, or from methods of the driver's connection and cursors.
    """

    def __init__(self, operation: PerShardOperation) -> None:
        self._operation = operation

    def may_commit(self) -> None:
        if not self._operation.is_observing:
            self._operation.forget_revertibility()

    def before_commit(self) -> None: ...

    def savepoint(self, sid: str) -> None: ...

    def savepoint_rolled_back(self, sid: str) -> None: ...

    def ended(self, committed: bool | None) -> None: ...


class _Collector:
    """A stand-in for a schema editor that collects the statements of an operation but runs none."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.statements: list[tuple[str, Any]] = []

    def execute(self, sql: Any, params: Any = ()) -> None:
        self.statements.append((str(sql), params))
