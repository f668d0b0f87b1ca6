"""Divide the work of an operation into units, which several processes take one by one.

A *work unit* is a part of the work, such as a range of a table, and is stored as a step in the
journal. A *worker* is a process that takes units. A unit has one worker at a time.

Each worker has a row of its own among the runs of the journal, in which it gives signs of life
(:mod:`~sharded_orm.operations.runs.lease`). If it is killed or cut off, other workers take its
units. Then it cannot change the units in the journal any more.

But a worker that was cut off may still send statements to a shard while another worker does the
same unit. So the work must be such that two workers can do it at the same time without harm.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Exists, QuerySet
from django.utils import timezone

from sharded_orm.models.tables.journal import OperationStep
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.journal import (
    BATCH,
    DONE,
    FAILED,
    PENDING,
    RUNNING,
    JournalRun,
)

# The number of free work units that a worker reads at once. It tries to take one after the other,
# because other workers may have taken the first ones meanwhile.
_CANDIDATES = 16


class Worker:
    """This process, as one of the processes that take work units. Thread-safe.

    By its lease, other processes see that this process is alive. :func:`join` creates instances.
    """

    def __init__(self, lease: leases.Lease) -> None:
        self.id = lease.run_id
        self.lease = lease

    def check(self) -> None:
        """Check that this worker has not been silent for too long, so it still has its units.

        Sends no query.

        :raises LeaseLost: this worker was silent for so long that others may have taken its units.
        """
        self.lease.check()


@contextmanager
def join(kind: str, subject: str, arguments: Mapping[str, Any]) -> Iterator[Worker]:
    """A context manager: in its block, this process is a worker of an operation and may take units.

    :param kind: the kind of the operation.
    :param subject: what the operation works on.
    :param arguments: the arguments of the operation. They are stored, so that
        :func:`has_living_workers` can compare them.
    :raises JournalMissing: the journal's tables do not exist, or the caller is in a transaction.
    """
    # Use a random name, because each worker needs a row of its own. Two unfinished runs cannot have
    # the same kind and subject.
    name = f"{subject[:100]} {secrets.token_hex(8)}"
    lease, _ = journal.take_lease(leases.worker_kind(kind), name, dict(arguments))
    lease.start()
    try:
        yield Worker(lease)
    finally:
        lease.release()
        leases.runs().filter(pk=lease.run_id).delete()


class WorkUnit:
    """A work unit that a worker has taken. To be used by one thread at a time.

    :param row: the step of the journal in which the unit is stored.
    :param is_repeated: whether a worker has begun the unit before, so that a part of the work may
        be done already.
    """

    def __init__(self, worker: Worker, row: OperationStep, is_repeated: bool) -> None:
        self.name = row.alias
        self.description = row.operation
        self.content: dict[str, Any] = row.position
        self.is_repeated = is_repeated
        self._pk = row.pk
        self._worker = worker

    def check(self) -> None:
        """Check that this work unit still belongs to this process. Sends no query.

        :raises LeaseLost: another process may have taken the unit.
        """
        self._worker.check()

    def mark_done(self, result: Mapping[str, Any]) -> None:
        """Record that this work unit is done.

        :param result: JSON values that are added to the unit's content.
        :raises LeaseLost: another process has taken the unit.
        """
        self._write(state=DONE, position={**self.content, **result}, error="")

    def mark_failed(self, exc: BaseException) -> None:
        self._write(state=FAILED, error=journal.one_line(exc))

    def give_back(self) -> None:
        """Leave the work unit unfinished. Any worker may take it at once."""
        # Do not set the state to "pending" again. It would tell the next worker that no worker has
        # begun the unit before.
        self._write(state=journal.STOPPED)

    def _write(self, **changes: Any) -> None:
        own = _own_units(self._worker).filter(pk=self._pk, worker=self._worker.id)
        if not own.update(worker=None, updated_at=timezone.now(), **changes):
            raise self._worker.lease.lost_error()


class WorkUnits:
    """The work units of one run, as they are stored in the journal. Each process has an instance.

    :param run_id: the id of the run in the journal.
    """

    def __init__(self, run_id: int) -> None:
        self.run_id = run_id

    def create(self, run: JournalRun, units: Iterable[tuple[str, str, Mapping[str, Any]]]) -> int:
        """Create the work units that do not exist yet. Return the number of ``units``.

        A unit whose name exists already stays as it is. So an interrupted call can be repeated.

        :param run: the run of the units. This process must hold it.
        :param units: for each unit, its name, a description for people, and its content as JSON
            values. Units are taken in the order of their names.
        :raises LeaseLost: another process holds the run.
        """
        remaining, count = iter(units), 0
        while batch := list(islice(remaining, BATCH)):
            with run.transaction():
                self._create_batch(batch)
            count += len(batch)
        return count

    def _create_batch(self, batch: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
        names = {name for name, _, _ in batch}
        existing = set(self.rows().filter(alias__in=names).values_list("alias", flat=True))
        new = [
            OperationStep(
                run_id=self.run_id, alias=name, operation=description, position=dict(content)
            )
            for name, description, content in batch
            if name not in existing
        ]
        OperationStep.objects.using(DEFAULT_DB_ALIAS).bulk_create(new)

    def take(self, worker: Worker) -> WorkUnit | None:
        """Give ``worker`` a free work unit, and return the unit. Return None if no unit is free.

        A unit is free if no living worker has it, and it is neither done nor failed. Units are
        taken in the order of their names, but units of dead workers are taken last. Costs two
        statements, or more if other workers take units at the same time.
        """
        while candidates := self._free():
            for row in candidates:
                unchanged = _own_units(worker).filter(pk=row.pk, state=row.state, worker=row.worker)
                if unchanged.update(state=RUNNING, worker=worker.id, updated_at=timezone.now()):
                    return WorkUnit(worker, row, is_repeated=row.state != PENDING)
            worker.check()
        return None

    def _free(self) -> list[OperationStep]:
        waiting = self.rows().filter(state__in=(PENDING, journal.STOPPED)).order_by("alias")
        free = list(waiting[:_CANDIDATES])
        return free or self._abandoned()

    def _abandoned(self) -> list[OperationStep]:
        """Return work units whose worker is dead, or has given no sign of life for too long."""
        running = list(self.rows().filter(state=RUNNING).order_by("alias"))
        workers = {row.worker for row in running}
        rows = leases.with_silence(leases.runs().filter(pk__in=workers))
        alive = {row.pk for row in rows if leases.is_held(row)}
        return [row for row in running if row.worker not in alive][:_CANDIDATES]

    def retry_failed(self) -> None:
        """Make the failed work units free, so that workers try them again."""
        self.rows().filter(state=FAILED).update(state=journal.STOPPED)

    def by_state(self) -> dict[str, int]:
        return journal.count_by_state(self.rows())

    def rows(self) -> QuerySet[OperationStep]:
        return OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=self.run_id)

    def delete(self, run: JournalRun) -> None:
        """Delete all work units of the run.

        :param run: the run of the units. This process must hold it.
        :raises LeaseLost: another process holds the run.
        """
        with run.transaction():
            self.rows().delete()


def has_living_workers(kind: str, subject: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether any process takes part in the operation, with the same ``arguments``.

    Such a process is inside a block of :func:`join`, even if it has no work unit at the moment. A
    killed process can still be counted, until it has given no sign of life for some time.
    """
    rows = leases.workers(kind, subject)
    return any(row.arguments == arguments and leases.is_held(row) for row in rows)


def delete_dead_workers(kind: str, subject: str) -> None:
    """Delete the rows in which killed workers of the operation gave signs of life.

    A worker that ends in good order deletes its row itself.
    """
    dead = [row.pk for row in leases.workers(kind, subject) if not leases.is_held(row)]
    leases.runs().filter(pk__in=dead).delete()


def _own_units(worker: Worker) -> QuerySet[OperationStep]:
    """Return a query set of all work units; an empty one if ``worker`` has lost its lease.

    So an UPDATE of this query set changes nothing after the lease is lost. Other workers may have
    taken the units by then.
    """
    table: QuerySet[OperationStep] = OperationStep.objects.using(DEFAULT_DB_ALIAS)
    return table.filter(Exists(worker.lease.own_row()))
