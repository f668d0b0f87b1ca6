"""The connection to one shard during its migration: its lock, its schema, its journal step.

A *checkpoint* in the journal says which step of the migration comes next. A *marker* is a row that
an operation writes in its own transaction, as a proof of the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from django.db import Error, connections
from django.db.migrations.recorder import MigrationRecorder

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.exceptions import OperationStopped
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.records import TABLE, Records, marker_name
from sharded_orm.operations.runs.journal import JournalStep
from sharded_orm.topology.model import Shard

END_LABEL = "Tell of the end"
# Seconds of one wait for the lock of a shard. Between two waits, the process may stop.
_LOCK_WAIT = 1.0


class ShardSession:
    """One shard during its migration. Belongs to a thread.

    :param step: the shard's step in the journal.
    :param stopping: whether to stop at the next point that leaves the shard in order.
    """

    def __init__(self, shard: Shard, step: JournalStep, stopping: Callable[[], bool]) -> None:
        self.shard = shard
        self.step = step
        self.connection = cast("ShardConnectionMixin", connections[shard.alias])
        self.checkpoint = Checkpoint.from_json(step.position) if step.position else None
        self.records = Records(shard.alias, has_markers=self.checkpoint is not None)
        self._stopping = stopping
        self._serial = self.checkpoint.serial if self.checkpoint else 0
        self._lock_holder: Any = None

    @property
    def alias(self) -> str:
        return self.shard.alias

    def check(self) -> None:
        """Make sure that the next step may begin, and that the shard is locked.

        :raises OperationStopped: it is time to stop.
        :raises LeaseLost: another process may be at work.
        """
        self.step.run.check()
        if self._stopping():
            raise OperationStopped(f"{self.alias} was left in order, to be gone on with.")
        # An operation may have closed the connection, which releases the lock.
        if self._lock_holder is None or self._lock_holder is not self.connection.connection:
            self.lock()

    def lock(self) -> None:
        """Wait until no other session migrates the shard: a killed process's statement runs on."""
        is_waiting = False
        while not self.connection.lock_schema(_LOCK_WAIT if is_waiting else 0):
            if not is_waiting:
                self.step.begin(operation="Wait for a session that still migrates this shard")
            is_waiting = True
            self.step.run.check()
            if self._stopping():
                raise OperationStopped(f"{self.alias} is still being migrated by another session.")
        self.connection.ensure_connection()
        self._lock_holder = self.connection.connection

    def snapshot(self) -> SchemaSnapshot:
        return self.connection.schema_snapshot()

    def glance(self, base: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        """See ``schema_glance``; the whole schema if that fails."""
        try:
            return self.connection.schema_glance(base, tables)
        except Error:
            return self.snapshot()

    def ensure_records(self, snapshot: SchemaSnapshot) -> SchemaSnapshot:
        """Create the table ``django_migrations`` if it is missing; returns the schema with it."""
        if TABLE in snapshot.definitions:
            return snapshot
        MigrationRecorder(self.connection).ensure_schema()
        return self.snapshot()

    def new_marker(self) -> str:
        """The name of a marker that this run has not used on this shard."""
        self._serial += 1
        return marker_name(self.step.run.id, self._serial)

    def begin(self, checkpoint: Checkpoint, label: str) -> None:
        """Record in the journal which step comes next.

        :param label: the step, for people.
        """
        self.checkpoint = replace(checkpoint, serial=self._serial)
        self.step.begin(
            migration=".".join(checkpoint.migration) if checkpoint.migration else "",
            operation=label,
            position=self.checkpoint.to_json(),
        )

    def amend(self, label: str = "", **changes: Any) -> None:
        """Change the checkpoint of the step that is under way."""
        assert self.checkpoint is not None
        self.checkpoint = replace(self.checkpoint, **changes)
        self.step.begin(operation=label or None, position=self.checkpoint.to_json())

    @contextmanager
    def attempt(self, label: str = "") -> Iterator[None]:
        """Enclose the step that :meth:`begin` has recorded.

        The journal notes an error in the block, so that it does not count as an interruption. It
        notes nothing if the session was lost, because the server may still run the statement.

        :param label: this part of the step, if :meth:`begin` has recorded several.
        """
        try:
            yield
        except Exception:
            if self._keeps_session:
                self.amend(label, raised=True)
            raise
        assert self.checkpoint is not None
        if self.checkpoint.what is What.PER_SHARD and not (
            self.checkpoint.marker and self.checkpoint.reverts
        ):
            # Nothing in the database shows this, if the next checkpoint is not reached.
            self.amend(settled="done")

    @property
    def _keeps_session(self) -> bool:
        """Whether the session that holds the lock is still usable."""
        return self._lock_holder is self.connection.connection and self.connection.is_usable()

    @contextmanager
    def completion(self) -> Iterator[None]:
        """Enclose the work after the last migration.

        A checkpoint of a recorded migration needs no further checkpoint: going on from it leads
        here.
        """
        end = Checkpoint(What.END, self.step.run.id)
        if self.checkpoint is None or self.checkpoint.what is What.COMPARE:
            self.begin(end, END_LABEL)
        try:
            yield
        except Exception:
            self.begin(end, END_LABEL)
            raise
