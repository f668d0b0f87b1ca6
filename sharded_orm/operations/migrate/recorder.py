"""Hearing what an operation sends to the database, and what becomes of the schema by it."""

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
    """The statements that change something on one connection, in their order.

    Listens below the schema editor: an editor may use cursors of its own. Reads are not
    recorded; the copy has answered them as each of its equals would.
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
        """What follows belongs to this operation.

        :param judged: whether it must be possible to see which statements took effect, since
            no transaction holds them together.
        """
        self._migration, self._operation, self._label = migration, operation, label
        self._fingerprints = fingerprints

    @property
    def where(self) -> str:
        """What runs now, for people."""
        return f"{'.'.join(self._migration)} ({self._label})"

    def add_record(self, unit: Unit) -> None:
        """The migration ends here, and is recorded as applied or not any more."""
        count = len(unit.operations)
        self.statements.append(
            RecordedStatement(
                unit.key, count, RECORD_LABEL, effect=Effect.ROWS,
                records=unit.records, outline=unit.outline(count),
            )
        )  # fmt: skip

    @contextmanager
    def attached(self) -> Iterator[None]:
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
