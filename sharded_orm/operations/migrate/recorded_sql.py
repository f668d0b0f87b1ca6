"""Statements that were recorded on a copy of a schema, to be replayed on all its equals.

Pure. A script is kept in the journal before any shard is touched, as JSON.
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

# What leaves all tables where they are, under their names.
_ALTERS = re.compile(
    r"\s*(?:ALTER TABLE\b(?!.*\bRENAME\s+(?!COLUMN\b|INDEX\b|KEY\b))"
    r"|(?:CREATE|DROP)\s+(?:UNIQUE\s+|FULLTEXT\s+|SPATIAL\s+)?INDEX\b)",
    re.IGNORECASE | re.DOTALL,
)
# What Django's editors pass to a driver as parameters, but JSON does not have.
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
    """A statement of an operation of a migration; the last one of a migration records it.

    :param operation: the number of the operation among those of its unit.
    :param label: the operation for people.
    :param sql: "" for the one that records the migration.
    :param records: of that one: the rows that it makes, or removes.
    :param outline: of that one: :meth:`Unit.outline` of the whole migration.
    :param after: the fingerprint of the schema when it has been run; None where a transaction
        holds the whole migration.
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
            "params": None if self.params is None else [_encoded(value) for value in self.params],
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
                "params": None if params is None else [_decoded(value) for value in params],
                "effect": Effect(content["effect"]),
                "records": [(app, name) for app, name in content["records"]],
            }
        )


@dataclass(frozen=True)
class RecordedScript:
    """What leads schemas of one fingerprint to those of another.

    :param before: the fingerprint at which it begins.
    :param promise: the schema to which it leads.
    :param units: how many units of the plan it carries out to their end.
    :param operations: how many operations of the next unit it carries out, or has carried out
        when it ends.
    """

    before: str
    promise: SchemaSnapshot
    statements: Sequence[RecordedStatement]
    units: int
    operations: int = 0

    def by_migration(self) -> Iterator[tuple[Key, list[tuple[int, RecordedStatement]]]]:
        """The numbered statements of each migration."""
        for key, group in groupby(enumerate(self.statements), lambda one: one[1].migration):
            yield key, list(group)

    @property
    def records(self) -> list[Key]:
        """All that it records."""
        return [key for statement in self.statements for key in statement.records]

    def stretch(self, index: int) -> range:
        """The statements from ``index`` on of which it can be seen how many took effect.

        Those of one operation that each leave another schema; and the record, after the last of
        a migration, which is there or not.
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
        """Whether it can be seen that it took effect, or it may be run again."""
        if statement.effect is Effect.ROWS:
            return self.promise.is_transactional
        return statement.after != self.fingerprint_before(index) or is_repeatable(statement.sql)

    def altered_tables(self, before: SchemaSnapshot) -> list[str] | None:
        """The tables of ``before`` that it names; None unless all it does is to alter tables."""
        schema_statements = [
            statement.sql for statement in self.statements if statement.effect is Effect.SCHEMA
        ]
        changed = before.changed_tables(self.promise)
        if changed is None or not all(map(_ALTERS.match, schema_statements)):
            return None
        named = [
            name
            for name, definition in before.definitions.items()
            if kind_of(definition) == "table" and any(name in sql for sql in schema_statements)
        ]
        return named if set(changed) <= set(named) else None

    def fingerprint_before(self, index: int) -> str | None:
        """Of the schema when statement ``index`` is to be run."""
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


def _encoded(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    for name, (kind, _) in _TYPES.items():
        if isinstance(value, kind):
            if isinstance(value, bytes):
                return {name: value.hex()}
            return {name: value.isoformat() if hasattr(value, "isoformat") else str(value)}
    if isinstance(value, (str, int)):  # SafeString, members of enumerations
        return str(value) if isinstance(value, str) else int(value)
    raise RehearsalFailed(
        f"The default {value!r} of type {type(value).__qualname__} cannot be kept in the journal."
        " Let get_db_prep_save() of its field give a number, text, bytes, a date, time, Decimal or"
        " UUID."
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, text),) = value.items()
    return _TYPES[name][1](text)
