"""Work that several processes share, even on several machines. Each unit has one worker at a time.

A *work unit* is a step of a run in the journal. A *worker* is a process that takes units. Each
worker holds its own run in the journal, whose lease shows that the worker is alive
(:mod:`~sharded_orm.operations.runs.lease`). If a worker is killed or cut off, other workers take
its units. Each statement that changes a unit also checks that it still belongs to the worker, and
that the worker still has its lease.

A worker that was cut off may still send statements to a shard while another worker has the same
unit. So two workers must do no harm if they do the same work at the same time.
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

# The number of free work units that a worker reads at once. Other workers may take some of these
# units before this worker does.
_CANDIDATES = 16


class Worker:
    """Represents this process as a worker: a process that takes work units. Thread-safe.

    The worker's lease shows other processes that the worker is alive. :func:`join` creates
    instances.
    """

    def __init__(self, lease: leases.Lease) -> None:
        self.id = lease.run_id
        self.lease = lease

    def check(self) -> None:
        """Check that no other process has taken the work units of this worker. Sends no query.

        :raises LeaseLost: another process may have taken the units.
        """
        self.lease.check()


@contextmanager
def join(kind: str, subject: str, arguments: Mapping[str, Any]) -> Iterator[Worker]:
    """A context manager in whose block this process is a worker for operation ``kind`` on
    ``subject``: it takes parts of the work.

    :param kind: the kind of the operation.
    :param subject: what the operation works on.
    :param arguments: the arguments of the operation. They are stored, so that
        :func:`has_living_workers` can compare them.
    :raises JournalMissing: the journal's tables do not exist, or the caller is in a transaction.
    """
    # The subject is unique, so no other process can hold this run.
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

    :param row: the unit's step in the journal.
    :param is_repeated: whether the unit was begun before, by another worker or in an earlier
        attempt.
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
        """Record that this worker has left the work unit unfinished, so any worker may take it at
        once.
        """
        # Do not set the state to "pending" again, because the record must show that a worker has
        # begun the work unit.
        self._write(state=journal.STOPPED)

    def _write(self, **changes: Any) -> None:
        own = _own_units(self._worker).filter(pk=self._pk, worker=self._worker.id)
        if not own.update(worker=None, updated_at=timezone.now(), **changes):
            raise self._worker.lease.lost_error()


class WorkUnits:
    """The work units of one run. Each process that works on the run has its own instance.

    :param run_id: the id of the run in the journal.
    """

    def __init__(self, run_id: int) -> None:
        self.run_id = run_id

    def create(self, run: JournalRun, units: Iterable[tuple[str, str, Mapping[str, Any]]]) -> int:
        """Create the work units that do not exist yet. Return the number of ``units``.

        If a unit with the same name exists, it is not changed. So an interrupted call may be
        repeated.

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
        """Assign to ``worker`` a work unit on which nobody works, and return the unit.

        Return None if there is no such unit. Units are taken in the order of their names. Costs two
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
        """Return the work units that were taken by workers (processes) that are dead or have been
        silent for too long.
        """
        running = list(self.rows().filter(state=RUNNING).order_by("alias"))
        workers = {row.worker for row in running}
        rows = leases.with_silence(leases.runs().filter(pk__in=workers))
        alive = {row.pk for row in rows if leases.is_held(row)}
        return [row for row in running if row.worker not in alive][:_CANDIDATES]

    def retry_failed(self) -> None:
        """Make the failed work units free, so that workers (processes) take these units again."""
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
    """Return whether a worker of the operation (a process inside :func:`join`) is alive, or may be
    alive.

    Only workers with the same ``arguments`` count. It does not matter whether the worker has a work
    unit at the moment.
    """
    rows = leases.workers(kind, subject)
    return any(row.arguments == arguments and leases.is_held(row) for row in rows)


def delete_dead_workers(kind: str, subject: str) -> None:
    """Delete the runs of killed workers of operation ``kind`` on ``subject``.

    Each worker holds a run of its own, in which it gives signs of life.
    """
    dead = [row.pk for row in leases.workers(kind, subject) if not leases.is_held(row)]
    leases.runs().filter(pk__in=dead).delete()


def _own_units(worker: Worker) -> QuerySet[OperationStep]:
    """Return a query set of all work units; an empty one if ``worker`` must not work any more.

    A worker must not work any more if it was silent for too long, and another process has taken over
    its run.
    """
    table: QuerySet[OperationStep] = OperationStep.objects.using(DEFAULT_DB_ALIAS)
    return table.filter(Exists(worker.lease.own_row()))
