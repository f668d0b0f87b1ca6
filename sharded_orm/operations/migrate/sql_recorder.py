"""Record the SQL of a migration's operations while they run on an empty copy of a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.statements import Effect
from sharded_orm.operations.migrate.plan import Key, Unit
from sharded_orm.operations.migrate.recorded_sql import RecordedStatement

RECORD_LABEL = "Record the migration"


class Recorder:
    """Records, in order, the statements on one connection that change rows or the schema.

    It observes the connection and not the schema editor, because an editor also runs statements on
    cursors that it opens itself. Statements that only read are not recorded. They are not needed on
    the shards: on each shard with the same schema, they would give the same answer.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements: list[RecordedStatement] = []
        self._migration: Key = ("", "")
        self._operation = 0
        self._label = ""
        self._fingerprints = False

    def set_operation(
        self, migration: Key, operation: int, label: str, *, fingerprints: bool
    ) -> None:
        """Say which operation runs now: the next recorded statements belong to it.

        :param operation: the index of the operation in its migration, in the order in which the
            operations run.
        :param label: a description of the operation for people.
        :param fingerprints: whether to record a hash of the schema after each statement. If
            statements outside a transaction are interrupted, the hash shows which of them took
            effect.
        """
        self._migration, self._operation, self._label = migration, operation, label
        self._fingerprints = fingerprints

    @property
    def where(self) -> str:
        """The migration and the operation that run now, as a text for error messages."""
        return f"{'.'.join(self._migration)} ({self._label})"

    def add_record(self, unit: Unit) -> None:
        """Record the statement that ends a unit (one migration, forwards or backwards).

        Forwards, this statement inserts the rows of the migration into ``django_migrations``.
        Backwards, it deletes these rows.
        """
        count = len(unit.operations)
        self.statements.append(
            RecordedStatement(
                unit.key, count, RECORD_LABEL, effect=Effect.ROWS,
                records=unit.records, outline=unit.outline(count),
            )
        )  # fmt: skip

    @contextmanager
    def attach(self) -> Iterator[None]:
        with self._connection.execute_wrapper(self._observe):
            yield

    def _observe(
        self,
        execute: Callable[..., Any],
        sql: str,
        params: Any,
        many: bool,
        context: dict[str, Any],
    ) -> Any:
        result = execute(sql, params, many, context)
        effect = self._connection.effect_of(sql)
        if effect is not Effect.NOTHING:
            after: SchemaSnapshot | None = None
            if effect is Effect.SCHEMA and self._fingerprints:
                after = self._connection.schema_snapshot()
            self.statements.append(
                RecordedStatement(
                    self._migration,
                    self._operation,
                    self._label,
                    sql,
                    None if params is None else tuple(params),
                    effect,
                    after.fingerprint if after is not None else None,
                )
            )
        return result
