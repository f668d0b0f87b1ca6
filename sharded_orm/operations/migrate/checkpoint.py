"""Where a shard stands in its migrations: what the journal keeps before each thing is done."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sharded_orm.operations.migrate.plan import Key


class What(Enum):
    """The thing that is done next, or was under way when its process ended."""

    STATEMENT = "statement"
    """``count`` statements of ``script`` from ``index`` on; see :meth:`Script.stretch`."""
    PER_SHARD = "own"
    """An operation that runs on each shard; of raw SQL its statement ``index``."""
    BUILD = "build"
    """Tables are made as ``script`` promises, on a shard that had none."""
    UNIT = "unit"
    """A migration that is in one transaction, together with its record."""
    RECORD = "record"
    """The migration is recorded, after an operation that ran on the shard."""
    COMPARE = "compare"
    """The schema was not as ``script`` promises: in the middle of a migration, which goes on
    with ``operation``; before the record of the last one, which is statement ``index``; or after
    one that was in a transaction."""
    END = "end"
    """What comes after the last migration: ``post_migrate``. Told where nothing else tells that the
    shard has come so far, and when it fails."""


@dataclass(frozen=True)
class Checkpoint:
    """See :class:`What`. Everything else is what is needed to judge it.

    :param run: the run whose script it is; a later run may go on with it.
    :param serial: grows with each marker.
    :param operation: the number of the operation in its migration; of a statement that of the
        operation where its script ends.
    :param outline: see :meth:`Unit.outline`; of so many operations, or with an own one.
    :param before: the fingerprint before a statement of raw SQL.
    :param marker: the row of ``django_migrations`` that is written in the same transaction.
    :param reverts: a rollback takes all of it back, as far as is known.
    :param raised: it failed with an error, which the journal has, and was not interrupted.
    :param settled: what a person found, or its own process could still tell: "done" or "undone".
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
        """What differs from the defaults: it is written several times for each shard."""
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
