"""Where a shard is in its migrations: what the journal records before each step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sharded_orm.operations.migrate.plan import Key


class What(Enum):
    """The step that comes next, or was under way when its process ended."""

    STATEMENT = "statement"
    """``count`` statements of ``script``, from ``index`` on; see :meth:`RecordedScript.stretch`."""
    PER_SHARD = "own"
    """An operation that runs on each shard; for raw SQL, its statement ``index``."""
    BUILD = "build"
    """The tables of an empty shard are created as ``script`` promises them."""
    UNIT = "unit"
    """A migration runs in one transaction, together with its record."""
    RECORD = "record"
    """The migration is recorded, after an operation that ran on the shard."""
    COMPARE = "compare"
    """The schema was not as ``script`` promises. The comparison took place in the middle of a
    migration, which goes on with ``operation``; before the record of the last migration, which is
    statement ``index``; or after a migration that was in a transaction."""
    END = "end"
    """``post_migrate`` is sent after the last migration. Recorded if it fails, or if nothing else
    shows that the shard has come this far."""


@dataclass(frozen=True)
class Checkpoint:
    """A step, and all that a later process needs to find out whether the step took effect.

    :param what: the kind of step.
    :param run: the journal run that holds the script; a later run may go on with it.
    :param serial: the number of markers so far.
    :param operation: the index of the operation in its migration. For a statement, the index of the
        operation at which its script ends.
    :param outline: :meth:`Unit.outline` of the operations up to ``operation``; includes an
        operation that runs on each shard.
    :param before: the fingerprint of the schema before a statement of raw SQL.
    :param marker: the name of the row in ``django_migrations`` that the same transaction writes.
    :param reverts: whether a rollback takes the whole step back, as far as is known.
    :param raised: whether the step failed with an error, which the journal has, and was not
        interrupted.
    :param settled: "done" or "undone", as a person found out, or as the step's own process could
        still record.
    """

    what: What
    run: int
    serial: int = 0
    migration: Key | None = None
    backwards: bool = False
    operation: int = 0
    outline: str = ""
    script: str = ""
    index: int = 0
    count: int = 1
    before: str = ""
    marker: str = ""
    reverts: bool = True
    raised: bool = False
    settled: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults: short, as each shard writes several."""
        content = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return {**content, "what": self.what.value}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Checkpoint:
        migration = content.get("migration")
        return cls(
            **{
                **content,
                "what": What(content["what"]),
                "migration": (migration[0], migration[1]) if migration else None,
            }
        )
