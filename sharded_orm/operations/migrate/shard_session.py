"""The session of migrating one shard: its connection, lock, schema and step in the journal.

A *checkpoint* in the journal says which step of the migration comes next. A *marker* is a row that
is written in the transaction of an operation, as a proof of the commit.
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
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.migration_records import TABLE, Records, marker_name
from sharded_orm.operations.runs.journal import JournalStep
from sharded_orm.topology.model import Shard

END_LABEL = "Tell of the end"
# Seconds that one attempt waits for the lock of a shard. After each attempt, the waiting process
# checks whether it was asked to stop.
_LOCK_WAIT = 1.0


class ShardSession:
    """Holds what one thread needs while it migrates one shard.

    These are the connection to the shard, the shard's lock, the latest checkpoint (the recorded
    progress), and access to ``django_migrations``.

    :param step: the record of the shard's migration in the journal.
    :param stopping: a function that returns True if the migration is to stop. It is called only
        while no step is half done.
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
        """Check that the next step may begin, and lock the shard if this session has not locked it
        yet.

        :raises OperationStopped: ``stopping`` says to stop.
        :raises LeaseLost: another process may have taken over the journal's run.
        """
        self.step.run.check()
        if self._stopping():
            raise OperationStopped(f"{self.alias} was left in order, to be gone on with.")
        # Lock the shard at the first call. At a later call, lock it again if an operation has
        # closed the connection since, because the lock was released with the connection.
        if self._lock_holder is None or self._lock_holder is not self.connection.connection:
            self.lock()

    def lock(self) -> None:
        """Lock the shard, so that no other session migrates it.

        Wait while another session holds the lock. The session of a killed process holds the lock
        until the server has finished the session's last statement.

        :raises OperationStopped: ``stopping`` said to stop during the wait.
        :raises LeaseLost: another process may have taken over the journal's run.
        """
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
        """Return a copy of the schema ``base`` with the present definitions of ``tables``.

        Only these tables are read, which is faster than to read all tables. But if one of them does
        not exist, the whole schema is read and returned.
        """
        try:
            return self.connection.schema_glance(base, tables)
        except Error:
            return self.snapshot()

    def ensure_records(self, snapshot: SchemaSnapshot) -> SchemaSnapshot:
        """Create the table ``django_migrations`` if the shard's schema ``snapshot`` lacks it.

        Return the schema with the table.
        """
        if TABLE in snapshot.definitions:
            return snapshot
        MigrationRecorder(self.connection).ensure_schema()
        return self.snapshot()

    def new_marker(self) -> str:
        """Return a new name for a marker (a row that proves that its transaction was committed)."""
        self._serial += 1
        return marker_name(self.step.run.id, self._serial)

    def begin(self, checkpoint: Checkpoint, label: str) -> None:
        """Record in the journal that the step that ``checkpoint`` describes comes next.

        :param label: a description of the step for people.
        """
        self.checkpoint = replace(checkpoint, serial=self._serial)
        self.step.begin(
            migration=".".join(checkpoint.migration) if checkpoint.migration else "",
            operation=label,
            position=self.checkpoint.to_json(),
        )

    def amend(self, label: str = "", **changes: Any) -> None:
        """Change the checkpoint of the present step, in :attr:`checkpoint` and in the journal.

        :param label: a new description of the step for people; "" keeps the present one.
        :param changes: new values of the checkpoint's fields, by name.
        """
        assert self.checkpoint is not None
        self.checkpoint = replace(self.checkpoint, **changes)
        self.step.begin(operation=label or None, position=self.checkpoint.to_json())

    @contextmanager
    def attempt(self, label: str = "") -> Iterator[None]:
        """A context manager whose block executes the step that :meth:`begin` has recorded.

        If the block raises an error, the journal records that the step failed. So the next process
        does not take the step for an interrupted one. If the database session was lost, nothing is
        recorded, because the server may still be running the statement.

        :param label: a description, for people, of what the block executes. It becomes the step's
            description if the block fails. If it is "", the step keeps its description.
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
            # The whole operation took effect, but no marker (a row in ``django_migrations``)
            # proves this. So record the success in the journal now. Otherwise nothing would show
            # it if the process were killed before the next checkpoint.
            self.amend(settled="done")

    @property
    def _keeps_session(self) -> bool:
        """Whether the database session that holds the shard's lock can still be used."""
        return self._lock_holder is self.connection.connection and self.connection.is_usable()

    @contextmanager
    def completion(self) -> Iterator[None]:
        """A context manager whose block sends ``post_migrate`` after the last migration.

        If the block is interrupted or raises an error, a later process must send ``post_migrate``
        again. A checkpoint of the kind END in the journal makes the later process do so. This
        checkpoint is written before the block, unless the present checkpoint has the same effect.
        If the block raises an error, the checkpoint is always written.
        """
        end = Checkpoint(What.END, self.step.run.id)
        if self.checkpoint is None or self.checkpoint.what is What.COMPARE:
            self.begin(end, END_LABEL)
        try:
            yield
        except Exception:
            self.begin(end, END_LABEL)
            raise
