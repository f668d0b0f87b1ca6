"""Share the work of one operation between several processes, even on several machines.

An operator starts the same command on each machine. The processes find each other by the
operation's *run*, a row of the journal. The work is done in *rounds*, and each round consists of
*work units*, such as a range of a table (:mod:`~sharded_orm.operations.runs.work_units`). One
process *leads* for a moment: it plans the units of the next round. Then all processes take units,
until none is left. When no round is left, one process finishes the run. If a process is killed,
another one takes its units, or leads in its place.
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

#: When other processes have taken all remaining work units, this process waits, because a unit may
#: become free or a new round may begin. It looks again after this number of seconds.
INTERVAL: Final = 0.3
#: A process takes no more work units after this many of its own work units have failed.
MAX_FAILURES: Final = 20

#: A work unit that is not stored yet: its name, a description for people, and its content as JSON
#: values.
PlannedUnit = tuple[str, str, Mapping[str, Any]]


class Job(ABC):
    """Work that several processes share. Each subclass defines one kind of work.

    The journal stores the three attributes with the run of the work.

    :param kind: the kind of operation.
    :param subject: what the operation works on, such as the name of a group.
    :param arguments: JSON values. Two processes share a run only if their arguments are equal.
    """

    kind: str
    subject: str
    arguments: Mapping[str, Any]

    @abstractmethod
    def prepare(self) -> None:
        """Check that the work may begin. The leading process calls this before the first round.

        :raises OperationError: the work must not begin. Then the run is finished as "refused".
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

        Another process may have been killed while it did this unit, or may still do the same unit
        at the same time. The result must be right in both cases.

        :raises OperationStopped: ``stopping`` was set.
        """

    @abstractmethod
    def end_round(self, rounds: list[dict[str, Any]], units: Iterable[Mapping[str, Any]]) -> bool:
        """Append the results of a round to ``rounds``. Return whether another round is needed.

        :param units: for each work unit of the round, a dict with its content and the result that
            :meth:`work` has returned.
        """

    @abstractmethod
    def summarize(self, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the outcome of the run as a dict of JSON values.

        The dict must have the key ``"problems"``, whose value is a list of sentences. The run has
        failed if this list is not empty. Only the process that finishes the run calls this.

        :param rounds: the results that :meth:`end_round` has appended.
        """


class FarmProgress(Protocol):
    """Shows the progress of the work units of this process. Called by one thread at a time."""

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
    :param left: number of work units that are not done, by any process.
    :param stopped: why this process stopped early; "" if it did not.
    """

    run: int | None
    finished: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left: int = 0
    stopped: str = ""


class Farm:
    """Lets this process take part in work that several processes share. One instance per process.

    :param job: the work.
    :param threads: number of threads that work in this process.
    :param stopping: a flag. When it is set, for example by a signal handler, this process takes no
        more units.
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
        """Work until the shared run is finished, or until this process can do nothing more.

        If an earlier run with the same arguments was interrupted, it is resumed, and its failed
        work units are tried again.

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
                # exception() waits for a thread, but raises nothing. So all threads have ended
                # before result() raises the error of one of them.
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
            # Whatever the exception is, only this work unit has failed. The other units go on.
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
        """If all units of the round are done, plan the next round or finish the run.

        Return the report if this process can do nothing more, otherwise None.
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
            # Another process leads now: it plans a round or finishes the run. Look again later.
            return None

    def _lead(self, run: journal.JournalRun) -> FarmReport | None:
        if self._run_id not in (None, run.id):
            # The run in which this process took part was finished a moment ago. So hold_run() has
            # returned another run, ``run``. If hold_run() has just created this run, delete it. If
            # another process has created it, leave it alone.
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
        # Delete units that an earlier process may have created for this round before it was killed.
        # The tables may have grown since, so this plan may divide the work differently.
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
