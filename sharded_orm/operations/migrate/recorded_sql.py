"""SQL of migrations: the statements that an empty copy of a schema has received.

All shards with that schema receive the same statements. They form a *script*, which is stored as
JSON in the journal before any shard is touched. This module uses no database.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from sharded_orm.backends.snapshot import SchemaSnapshot, kind_of
from sharded_orm.backends.statements import Effect, is_repeatable
from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.operations.migrate.plan import Key

# Matches a statement that alters a table or an index. It does not match a statement that creates,
# drops or renames a table.
_ALTERS = re.compile(
    r"\s*(?:ALTER TABLE\b(?!.*\bRENAME\s+(?!COLUMN\b|INDEX\b|KEY\b))"
    r"|(?:CREATE|DROP)\s+(?:UNIQUE\s+|FULLTEXT\s+|SPATIAL\s+)?INDEX\b)",
    re.IGNORECASE | re.DOTALL,
)
# Types of query parameters that JSON lacks. Such a parameter is stored as {name: text}, for example
# {"bytes": "00ff"}. This dict maps each name to the type, and to the function that turns the text
# into a value again.
_TYPES: Final[dict[str, tuple[type, Any]]] = {
    "bytes": (bytes, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, decimal.Decimal),
    "uuid": (uuid.UUID, uuid.UUID),
}


@dataclass(frozen=True)
class RecordedStatement:
    """A recorded statement of one operation, or the statement that records the migration.

    The last statement of each migration is the *recording statement*: it adds the migration's rows
    to ``django_migrations``, or deletes them.

    :param operation: the index of the operation in its unit (a migration in one direction).
    :param label: a description of the operation for people.
    :param sql: the statement; "" for the recording statement.
    :param effect: whether the statement changes rows or the schema.
    :param after: the fingerprint (a hash) of the schema after the statement. None if the statement
        does not change the schema, or if the whole migration runs in one transaction.
    :param records: for the recording statement, the rows that it adds or deletes; otherwise empty.
    :param outline: for the recording statement, the result of :meth:`Unit.outline` for the whole
        migration, which shows later whether somebody has edited the migration; otherwise "".
    """

    migration: Key
    operation: int
    label: str
    sql: str = ""
    params: Sequence[Any] | None = None
    effect: Effect = Effect.SCHEMA
    after: str | None = None
    records: Sequence[Key] = ()
    outline: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "migration": list(self.migration),
            "operation": self.operation,
            "label": self.label,
            "sql": self.sql,
            "params": None if self.params is None else [_encode(value) for value in self.params],
            "effect": self.effect.value,
            "after": self.after,
            "records": [list(key) for key in self.records],
            "outline": self.outline,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RecordedStatement:
        params = content["params"]
        return cls(
            **{
                **content,
                "migration": tuple(content["migration"]),
                "params": None if params is None else [_decode(value) for value in params],
                "effect": Effect(content["effect"]),
                "records": [(app, name) for app, name in content["records"]],
            }
        )


@dataclass(frozen=True)
class RecordedScript:
    """Recorded statements that lead from one schema to another.

    :param before: the fingerprint (a hash) of the first schema.
    :param promise: the schema that a shard must have after the last statement.
    :param units: number of units (migrations) of the plan that the script finishes.
    :param operations: if the script ends in the middle of a unit, the number of operations of that
        unit that are done then; otherwise 0.
    """

    before: str
    promise: SchemaSnapshot
    statements: Sequence[RecordedStatement]
    units: int
    operations: int = 0

    def by_migration(self) -> Iterator[tuple[Key, list[tuple[int, RecordedStatement]]]]:
        """Yield pairs (migration, its statements). Each statement is a pair (index in the script,
        statement).
        """
        for key, group in groupby(enumerate(self.statements), lambda item: item[1].migration):
            yield key, list(group)

    @property
    def records(self) -> list[Key]:
        """The rows of ``django_migrations`` that the recorded statements add or delete."""
        return [key for statement in self.statements for key in statement.records]

    def stretch(self, index: int) -> range:
        """Return the indexes of statements, from ``index`` on, for which one checkpoint is enough.

        If the process is killed while it runs these statements, the schema must show how many of
        them took effect. So they all belong to one operation, and each leaves a different schema.
        The last of them can be the statement that records the migration, because the rows of
        ``django_migrations`` show whether it took effect.
        """
        first = self.statements[index]
        end, fingerprints = index + 1, {self.fingerprint_before(index)}
        while not first.records and end < len(self.statements):
            last, following = self.statements[end - 1], self.statements[end]
            if following.migration != first.migration:
                break
            fingerprints.add(last.after)
            if following.records:
                end += self._is_visible(first, index)
                break
            is_seen = len(fingerprints) == end - index + 1 and following.after not in fingerprints
            both_change = first.effect is following.effect is Effect.SCHEMA
            if not (is_seen and both_change and following.operation == first.operation):
                break
            end += 1
        return range(index, end)

    def _is_visible(self, statement: RecordedStatement, index: int) -> bool:
        """Whether a later process can continue after an interruption of ``statement``.

        It can if the database shows whether the statement took effect, or if running the statement
        again does no harm.

        :param index: the index of ``statement`` in the script.
        """
        if statement.effect is Effect.ROWS:
            return self.promise.is_transactional
        return statement.after != self.fingerprint_before(index) or is_repeatable(statement.sql)

    def altered_tables(self, before: SchemaSnapshot) -> list[str] | None:
        """Return the names of the tables that the script alters, or None.

        If the script only alters existing tables, it is enough to read these tables again
        afterwards. Return None if a statement does anything else, for example creates a table. Also
        return None if the script changes a table that none of its statements names.

        :param before: the schema at which the script begins.
        """
        schema_statements = [
            statement.sql for statement in self.statements if statement.effect is Effect.SCHEMA
        ]
        changed = before.changed_tables(self.promise)
        if changed is None or not all(map(_ALTERS.match, schema_statements)):
            return None
        tables = [
            name
            for name, definition in before.definitions.items()
            if kind_of(definition) == "table" and any(name in sql for sql in schema_statements)
        ]
        return tables if set(changed) <= set(tables) else None

    def fingerprint_before(self, index: int) -> str | None:
        """Return the fingerprint (a hash) of the schema just before the statement at ``index``."""
        for statement in reversed(self.statements[:index]):
            if statement.after is not None:
                return statement.after
        return self.before

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "definitions": dict(self.promise.definitions),
            "defaults": self.promise.defaults,
            "statements": [statement.to_json() for statement in self.statements],
            "units": self.units,
            "operations": self.operations,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RecordedScript:
        return cls(
            content["before"],
            SchemaSnapshot(content["definitions"], content["defaults"]),
            [RecordedStatement.from_json(statement) for statement in content["statements"]],
            content["units"],
            content["operations"],
        )


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    for name, (kind, _) in _TYPES.items():
        if isinstance(value, kind):
            if isinstance(value, bytes):
                return {name: value.hex()}
            return {name: value.isoformat() if hasattr(value, "isoformat") else str(value)}
    # Store an instance of a subclass, such as SafeString or an enumeration, as a plain str or int.
    if isinstance(value, (str, int)):
        return str(value) if isinstance(value, str) else int(value)
    raise RehearsalFailed(
        f"The default {value!r} of type {type(value).__qualname__} cannot be kept in the journal."
        " Let get_db_prep_save() of its field give a number, text, bytes, a date, time, Decimal or"
        " UUID."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, text),) = value.items()
    return _TYPES[name][1](text)
