"""The work of one run, shared by several processes, such as the same command on several machines.

The run is a row of the journal. Its work is cut into rounds of units
(:mod:`~sharded_orm.operations.runs.work_units`). To plan a round or to finish the run, one process
*leads*: it holds the run for that time. Then all processes take units of the round, until none is
left. If a process is killed, another one takes its units, or leads in its place.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from django.db import connections

from sharded_orm.exceptions import LeaseLost, OperationHeld
from sharded_orm.models.tables.journal import OperationStep
from sharded_orm.operations.exceptions import OperationDiffers, OperationStopped
from sharded_orm.operations.runs import journal, work_units
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.runs.work_units import Worker, WorkUnit, WorkUnits

logger = logging.getLogger("sharded_orm.operations")

#: If other processes work on all remaining work units, a process looks for free units at this
#: interval, in seconds.
INTERVAL: Final = 0.3
#: A process takes no more work units after this many of its own work units have failed.
MAX_FAILURES: Final = 20

#: A work unit (a part of a run) before it is stored: its name, a description for people, and its
#: content as JSON values.
PlannedUnit = tuple[str, str, Mapping[str, Any]]


class Job(ABC):
    """The work of a run, which several processes share. Each subclass defines one kind of work.

    :param kind: the kind of the run in the journal.
    :param subject: the subject of the run in the journal.
    :param arguments: JSON values. Two processes share a run only if their arguments are equal.
    """

    kind: str
    subject: str
    arguments: Mapping[str, Any]

    @abstractmethod
    def prepare(self) -> None:
        """Check that the work may begin. Only the process that begins the run calls this.

        :raises OperationError: the work must not begin. The run is then finished.
        """

    @abstractmethod
    def plan(self, number: int) -> Iterable[PlannedUnit]:
        """Yield the work units of a round, in the order of their names.

        :param number: the number of the round, from 1. The names of the units must begin with this
            number.
        """

    @abstractmethod
    def work(self, unit: WorkUnit, stopping: Stopping) -> Mapping[str, Any]:
        """Do one work unit, and return the result as JSON values. Called by several threads.

        The method must work even if another process does the same unit at the same time, or was
        killed while doing the unit.

        :raises OperationStopped: ``stopping`` was set.
        """

    @abstractmethod
    def end_round(self, rounds: list[dict[str, Any]], units: Iterable[Mapping[str, Any]]) -> bool:
        """Append the results of a round to ``rounds``. Return whether another round is needed.

        :param units: the contents of the round's work units, with their results.
        """

    @abstractmethod
    def summarize(self, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the outcome of the run as a dict of JSON values.

        The value of the key ``"problems"`` must be a list of sentences. Only the process that
        finishes the run calls this.
        """


class FarmProgress(Protocol):
    """Receives reports on the work units of this process. Its methods are called by one thread at a
    time.
    """

    def begin(self, group: str, total: int) -> None: ...
    def done(self, alias: str, what: str = ...) -> None: ...
    def unit_failed(self, description: str, error: str) -> None: ...
    def end(self) -> None: ...


@dataclass
class FarmReport:
    """The outcome of a shared run, or its progress if it is not finished.

    :param run: the id of the run in the journal.
    :param finished: whether the run is finished, by this process or by another one.
    :param summary: the job's summary; empty if the run is not finished.
    :param failures: sentences about units that failed, each with the reason.
    :param left: number of units that are not done.
    :param stopped: why this process stopped early; "" if it did not.
    """

    run: int | None
    finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left: int = 0
    stopped: str = ""


class Farm:
    """Takes part in a run, one execution of an operation, that several processes share.

    Each process has an instance.

    :param threads: number of threads that work in this process.
    """

    def __init__(self, job: Job, threads: int, progress: FarmProgress, stopping: Stopping) -> None:
        self._job = job
        self._threads = threads
        self._progress = progress
        self._stopping = stopping
        self._run_id: int | None = None
        self._failures = 0
        self._lock = threading.Lock()
        self._has_retried = False

    def execute(self) -> FarmReport:
        """Work until the shared run (one execution of an operation) is finished, or until nothing
        is left to do for this process.

        An earlier run that was interrupted is resumed. Work units that failed in that run are tried
        again.

        :raises OperationDiffers: other processes execute the run with different arguments.
        :raises OperationError: :meth:`Job.prepare` has refused the work.
        """
        with work_units.join(self._job.kind, self._job.subject, self._job.arguments) as worker:
            while True:
                report = self._advance()
                if report is not None:
                    return report
                if self._run_id is not None and self._work(worker):
                    continue
                self._stopping.wait(INTERVAL)

    # ##### Working #####

    def _work(self, worker: Worker) -> bool:
        """Do work units until no unit is free. Return whether any unit was free."""
        assert self._run_id is not None
        units = WorkUnits(self._run_id)
        if self._threads == 1:
            return self._work_in_thread(units, worker)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="sharded_orm unit") as threads:
            futures = [
                threads.submit(self._work_and_close, units, worker) for _ in range(self._threads)
            ]
            for future in futures:
                # Wait until every thread has ended, before the error of one thread is raised.
                future.exception()
        return True in [future.result() for future in futures]

    def _work_and_close(self, units: WorkUnits, worker: Worker) -> bool:
        try:
            return self._work_in_thread(units, worker)
        except BaseException as exc:
            self._stopping.stop(type(exc).__name__)
            raise
        finally:
            connections.close_all()

    def _work_in_thread(self, units: WorkUnits, worker: Worker) -> bool:
        has_worked = False
        while not self._stopping() and (unit := units.take(worker)) is not None:
            has_worked = True
            self._work_on(unit)
        return has_worked

    def _work_on(self, unit: WorkUnit) -> None:
        try:
            result = self._job.work(unit, self._stopping)
        except LeaseLost:
            raise
        except OperationStopped:
            unit.give_back()
        except Exception as exc:
            # Any exception counts as a failure of this work unit only. The other units are still
            # done.
            logger.info("unit %s was not done", unit.name, exc_info=exc)
            unit.mark_failed(exc)
            with self._lock:
                self._failures += 1
                self._progress.unit_failed(unit.description, journal.one_line(exc))
            if self._failures >= MAX_FAILURES:
                self._stopping.stop(f"{MAX_FAILURES} units failed")
        else:
            unit.mark_done(result)
            with self._lock:
                self._progress.done(unit.description, "done")

    # ##### Leading #####

    def _advance(self) -> FarmReport | None:
        """Return the report if this process has nothing left to do, otherwise None.

        If no work unit of the round is left, plan the next round or finish the run.
        """
        if self._run_id is not None:
            report = self._finished_report()
            if report is not None:
                return report
            if self._stopping():
                return self._open_report()
            counts = WorkUnits(self._run_id).by_state()
            if self._has_retried and _is_unfinished(counts):
                return None
        elif self._stopping():
            return FarmReport(None, stopped=self._stopping.cause)
        arguments = {"work": dict(self._job.arguments), "rounds": []}
        try:
            with journal.hold_run(self._job.kind, self._job.subject, arguments) as run:
                return self._lead(run)
        except OperationHeld:
            # Another process is planning a round, or finishing the run. The caller looks again
            # soon.
            return None

    def _lead(self, run: journal.JournalRun) -> FarmReport | None:
        if self._run_id not in (None, run.id):
            # ``run`` is not the run in which this process takes part. That run was finished a
            # moment ago. If this process has just begun ``run``, delete it. If another process has
            # begun ``run``, leave it alone.
            if not run.resumed:
                run.lease.own_row().delete()
            return None
        units = WorkUnits(run.id)
        if run.arguments.get("work") != dict(self._job.arguments):
            self._give_up_other(run, units)
            return None
        self._run_id = run.id
        if "planned" not in run.arguments:
            self._plan_first(run)
            return None
        if not self._has_retried:
            self._has_retried = True
            units.retry_failed()
        counts = units.by_state()
        if _is_unfinished(counts):
            self._begin_progress(sum(counts.values()) - counts.get(journal.DONE, 0))
            return None
        if counts.get(journal.FAILED):
            return self._open_report()
        self._end_round(run, units)
        return self._finished_report() if run.finished else None

    def _give_up_other(self, run: journal.JournalRun, units: WorkUnits) -> None:
        other = run.arguments.get("work", {})
        if work_units.has_living_workers(run.kind, run.subject, other):
            raise OperationDiffers(
                f"Run {run.id} ({run.kind} {run.subject!r}) is under way with other arguments:"
                f" {other!r}. Use the same ones to take part, or wait until it"
                " ends."
            )
        units.delete(run)
        run.finish("abandoned")

    def _plan_first(self, run: journal.JournalRun) -> None:
        try:
            self._job.prepare()
        except Exception as exc:
            WorkUnits(run.id).delete(run)
            run.finish("refused", journal.one_line(exc))
            raise
        self._has_retried = True
        self._plan(run, 1)

    def _plan(self, run: journal.JournalRun, number: int) -> None:
        # A process that was killed while it planned may have left units of this round. Delete them:
        # tables may have grown since, so the work may be divided differently.
        units = WorkUnits(run.id)
        units.delete(run)
        total = units.create(run, self._checked(run, self._job.plan(number)))
        run.note(planned=number)
        self._begin_progress(total)

    def _begin_progress(self, total: int) -> None:
        self._progress.end()
        self._progress.begin(self._job.subject, total)

    def _checked(
        self, run: journal.JournalRun, planned: Iterable[PlannedUnit]
    ) -> Iterable[PlannedUnit]:
        for unit in planned:
            run.check()
            yield unit

    def _end_round(self, run: journal.JournalRun, units: WorkUnits) -> None:
        rounds = list(run.arguments["rounds"])
        if len(rounds) < run.arguments["planned"]:
            contents = units.rows().order_by("alias").values_list("position", flat=True)
            again = self._job.end_round(rounds, contents.iterator())
            run.note(rounds=rounds, again=again)
        if run.arguments["again"]:
            self._plan(run, len(rounds) + 1)
            return
        summary = self._job.summarize(rounds)
        run.note(summary=summary)
        problems = summary["problems"]
        units.delete(run)
        work_units.delete_dead_workers(run.kind, run.subject)
        run.finish("failed" if problems else "done", "; ".join(problems)[:2000])

    # ##### Reports #####

    def _finished_report(self) -> FarmReport | None:
        row = leases.runs().filter(pk=self._run_id).first()
        if row is None or row.unfinished:
            return None
        return FarmReport(row.pk, finished=True, summary=row.arguments.get("summary", {}))

    def _open_report(self) -> FarmReport:
        assert self._run_id is not None
        units = WorkUnits(self._run_id)
        failed = units.rows().filter(state=journal.FAILED).order_by("alias")
        counts = units.by_state()
        return FarmReport(
            self._run_id,
            failures=[f"{_description(row)}: {row.error}" for row in failed[:MAX_FAILURES]],
            left=sum(counts.values()) - counts.get(journal.DONE, 0),
            stopped=self._stopping.cause,
        )


def _description(row: OperationStep) -> str:
    return row.operation or row.alias


def _is_unfinished(counts: Mapping[str, int]) -> bool:
    return any(counts.get(state) for state in (journal.PENDING, journal.RUNNING, journal.STOPPED))
