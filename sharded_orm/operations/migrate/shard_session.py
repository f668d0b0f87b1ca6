"""The connection of one shard while it is migrated: locked, looked at, told of in the journal."""

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
# Seconds of one wait for the lock of a shard; between them it is asked whether to go on.
_LOCK_WAIT = 1.0


class ShardSession:
    """One shard in one thread.

    :param stopping: whether to stop at the next place where that leaves everything in order.
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
        """Between two things that are done.

        :raises OperationStopped: it is time to stop.
        :raises LeaseLost: another process may be at work.
        """
        self.step.run.check()
        if self._stopping():
            raise OperationStopped(f"{self.alias} was left in order, to be gone on with.")
        # An operation may have closed the connection, and with it ended the lock.
        if self._lock_holder is None or self._lock_holder is not self.connection.connection:
            self.lock()

    def lock(self) -> None:
        """Wait until nobody else migrates the shard: statements of a killed process run on."""
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

    def glance(self, known: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        """See ``schema_glance``; all of it where it fails."""
        try:
            return self.connection.schema_glance(known, tables)
        except Error:
            return self.snapshot()

    def ensure_records(self, snapshot: SchemaSnapshot) -> SchemaSnapshot:
        """``schema`` of the shard, which has a table for records from now on."""
        if TABLE in snapshot.definitions:
            return snapshot
        MigrationRecorder(self.connection).ensure_schema()
        return self.snapshot()

    def new_marker(self) -> str:
        """A name that was not used yet on this shard in this run."""
        self._serial += 1
        return marker_name(self.step.run.id, self._serial)

    def begin(self, checkpoint: Checkpoint, label: str) -> None:
        """Tell the journal what is done next."""
        self.checkpoint = replace(checkpoint, serial=self._serial)
        self.step.begin(
            migration=".".join(checkpoint.migration) if checkpoint.migration else "",
            operation=label,
            position=self.checkpoint.to_json(),
        )

    def amend(self, label: str = "", **changes: Any) -> None:
        """Add to the position, about what is under way."""
        assert self.checkpoint is not None
        self.checkpoint = replace(self.checkpoint, **changes)
        self.step.begin(operation=label or None, position=self.checkpoint.to_json())

    @contextmanager
    def attempt(self, label: str = "") -> Iterator[None]:
        """Around what :meth:`at` has told of: an error is no interruption, unless it took the
        session, whose statement may be under way still.

        :param label: what is done, where :meth:`at` has told of more.
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
            # Nothing in the database tells of it, should what comes next not be reached.
            self.amend(settled="done")

    @property
    def _keeps_session(self) -> bool:
        """Whether it is the one that was locked, and lives."""
        return self._lock_holder is self.connection.connection and self.connection.is_usable()

    @contextmanager
    def completion(self) -> Iterator[None]:
        """Around what comes after the last migration.

        A position that tells of something that is recorded needs no other after it: to go on from
        there is to come here.
        """
        end = Checkpoint(What.END, self.step.run.id)
        if self.checkpoint is None or self.checkpoint.what is What.COMPARE:
            self.begin(end, END_LABEL)
        try:
            yield
        except Exception:
            self.begin(end, END_LABEL)
            raise
