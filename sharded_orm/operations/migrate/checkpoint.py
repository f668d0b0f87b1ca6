"""Checkpoints: what the journal records before each step of a shard's migration.

After a kill, the last checkpoint tells the next process which step was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sharded_orm.operations.migrate.plan import Key


class What(Enum):
    """The kinds of steps: what a step of a shard's migration does.

    The descriptions of the kinds mention ``script``, ``index``, ``count`` and ``operation``, which
    are fields of :class:`Checkpoint`. A script is a list of recorded SQL statements
    (:class:`RecordedScript`).
    """

    STATEMENT = "statement"
    """Run ``count`` statements of ``script``, beginning with statement ``index``. See
    :meth:`RecordedScript.stretch`."""
    PER_SHARD = "own"
    """Run an operation that has no recorded SQL, such as ``RunPython``. For ``RunSQL``: run its
    statement ``index``."""
    BUILD = "build"
    """Create all tables of an empty shard at once, as they are at the end of ``script``."""
    UNIT = "unit"
    """Run a migration and its row in ``django_migrations`` in one transaction."""
    RECORD = "record"
    """Write the row in ``django_migrations`` for a migration with operations of the kind
    ``PER_SHARD``."""
    COMPARE = "compare"
    """Compare the schema again with the schema that ``script`` promises, because the two differed.
    This is done at one of three points: in the middle of a migration, which then continues with
    ``operation``; just before statement ``index``, which records the last migration of ``script``;
    or after a migration that ran in one transaction."""
    END = "end"
    """Send ``post_migrate`` after the last migration. This checkpoint is written only if a receiver
    failed, or if no other checkpoint shows that the shard has come this far."""


@dataclass(frozen=True)
class Checkpoint:
    """One step of a shard's migration. If the step is interrupted, these facts show whether it took
    effect.

    :param what: the kind of step.
    :param run: id of the journal run that stores ``script``. A later run, which continues the
        migration, finds the script with this id.
    :param serial: the number of marker names that this shard has used so far in the run.
    :param migration: app label and name; None for a step that belongs to no single migration.
    :param operation: index of the operation in its migration. If the step runs statements of a
        script, this is the index of the first operation that the script does not run.
    :param outline: the result of :meth:`Unit.outline`. A later process compares it, to find out
        whether somebody has edited the migration since this checkpoint was written. It covers the
        operations before ``operation``; for the kind ``PER_SHARD``, it also covers ``operation``.
    :param script: key of the recorded script (a list of SQL statements) in the journal.
    :param index: position of the (first) statement in ``script``, or in a ``RunSQL`` operation.
    :param count: number of statements that the step runs.
    :param before: fingerprint (a hash) of the schema before a ``RunSQL`` statement that may change
        the schema; "" for other steps.
    :param marker: name of the marker: a row that the step's transaction adds to
        ``django_migrations``. The row proves the commit. "" if the step has no marker.
    :param reverts: True if a rollback surely undoes the whole step. False if a part of the step may
        be committed already, for example by DDL on MySQL.
    :param raised: True if the step is known to have failed with an error. False if it is under way
        or was interrupted.
    :param settled: "done" or "undone" if an operator, or the process that ran the step, has
        recorded whether the step took effect; otherwise "".
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
        """Return the fields that differ from their defaults.

        Fields with their default values are left out to keep the journal small: many checkpoints
        are written for each shard.
        """
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
