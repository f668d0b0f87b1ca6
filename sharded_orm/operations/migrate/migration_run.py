"""Migrating the shards of a group: which of them, in which order, with which report.

``operations.migrate`` does the work on one shard and knows what it takes; the journal
remembers how far it came; the waves decide when whose turn is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db import connections
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.exceptions import (
    LeaseLost,
    NothingUnclear,
    OperationHeld,
    OperationStopped,
    OperationUnclear,
    UnknownShard,
)
from sharded_orm.models.tables.journal import OperationStep
from sharded_orm.operations.migrate import AppliedState, MigrateOptions, Migrator
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping, Waves, work_through
from sharded_orm.operations.selection import Selected
from sharded_orm.topology.model import Shard

KIND = "migrate"
logger = logging.getLogger("sharded_orm.operations")


@dataclass(frozen=True)
class Failure:
    """Why one shard is not migrated. ``state`` is "failed", "unclear" or "unreachable"."""

    alias: str
    state: str
    error: str
    migration: str = ""
    operation: str = ""


class Progress(Protocol):
    """What is told while a group is migrated. Called by one thread at a time.

    Shards that cannot be tried have failed before :meth:`begin`.
    """

    def begin(self, group: str, total: int) -> None: ...
    def done(self, alias: str) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def end(self) -> None: ...


@dataclass
class MigrationReport:
    """What became of the shards of one group."""

    group: str
    selected: int
    #: Those that needed nothing.
    current: int = 0
    #: Those that were migrated now.
    migrated: int = 0
    failures: list[Failure] = field(default_factory=list)
    #: Those whose schema or file does not exist, and was not asked for.
    missing: list[Shard] = field(default_factory=list)
    #: Why it ended early; "" when it did not.
    stopped: str = ""
    #: Those that it did not come to.
    left: int = 0
    #: In the journal; None when there was nothing to do.
    run: int | None = None

    @property
    def ok(self) -> bool:
        return not (self.failures or self.missing or self.stopped)


@dataclass(frozen=True)
class MigrationRequest:
    """What is asked for, the same for all groups."""

    options: MigrateOptions
    waves: Waves = field(default_factory=Waves)
    #: Make schemas and files that do not exist.
    create: bool = False
    #: Only shards that an earlier run left failed.
    retry_failed: bool = False


def migrate(
    selected: Selected, request: MigrationRequest, progress: Progress, stopping: Stopping
) -> MigrationReport:
    """Migrate shards of one group; returns when all are done or ``stopping`` says so.

    One shard's failure is its own: it is in the report, and the others go on (but see
    :class:`Waves`). May be repeated after any end, and goes on where the last one stopped.

    :raises OperationHeld: another process migrates the group.
    :raises LeaseLost: another process took it over meanwhile.
    :raises JournalMissing: the global database is not migrated.

    Cost: one query per node for the whole; with nothing to do, two more and no write.
    """
    migrator = Migrator(selected.group, request.options, journal.Scripts())
    pending = PendingShards(migrator, selected, request)
    if not pending.shards:
        _finish_broken_off(selected.group.name)
        pending.report_failures(progress)
        return pending.report
    arguments = {
        "targets": list(request.options.targets),
        "fake": request.options.fake,
        "fake_initial": request.options.fake_initial,
        "shards": len(pending.shards),
    }
    with journal.hold_run(KIND, selected.group.name, arguments) as run:
        if run.resumed:
            run.note(**arguments)
        # Another operator may have migrated some since, or left something behind.
        pending = PendingShards(migrator, selected, request)
        report = pending.report
        report.run = run.id
        pending.report_failures(progress)
        run.create_steps(shard.alias for shard in pending.shards)
        progress.begin(selected.group.name, len(pending.shards))
        worker = _Worker(migrator, run, pending, progress, stopping)
        try:
            work_through(pending.shards, worker, request.waves, stopping)
        finally:
            progress.end()
        report.stopped = stopping.cause
        report.left = len(pending.shards) - report.migrated - worker.failed
        run.finish(*_outcome(report))
    report.failures.sort(key=lambda failure: failure.alias)
    return report


def _finish_broken_off(group: str) -> None:
    """Finish the last run, if its process was killed when all was done but that."""
    last = journal.last_run(KIND, group)
    if last is None or last.state != "broken off":
        return
    if not set(last.by_state()) <= {journal.DONE, journal.CARRIED}:
        return  # Shards that nobody asks for now are left.
    with suppress(OperationHeld), journal.hold_run(KIND, group, last.arguments) as run:
        run.finish()


class PendingShards:
    """The shards that have something to do, and a report about the others."""

    def __init__(self, migrator: Migrator, selected: Selected, request: MigrationRequest) -> None:
        states: dict[str, str] = {}
        unclear: dict[str, Failure] = {}
        for row in _open_steps(selected.group.name):
            states[row.alias] = row.state
            if row.state == journal.UNCLEAR:
                unclear[row.alias] = _failure(row)
        shards = selected.shards
        if request.retry_failed:
            shards = [shard for shard in shards if states.get(shard.alias) == journal.FAILED]
        state = migrator.applied_state(shards)
        behind = {shard.alias for shard in state.behind}
        missing = {shard.alias for shard in state.missing}
        #: Those that are to be made first.
        self.create = missing if request.create else set[str]()
        self.shards: list[Shard] = []
        self.report = report = MigrationReport(selected.group.name, len(shards), state.current)
        for shard in shards:
            alias = shard.alias
            if alias in state.unreachable:
                error = journal.one_line(state.unreachable[alias])
                report.failures.append(Failure(alias, "unreachable", error))
            elif alias in unclear:
                report.failures.append(unclear[alias])
                report.current -= _looks_current(alias, behind, missing)
            elif alias in missing and not request.create:
                report.missing.append(shard)
            elif alias in behind or alias in missing or alias in states:
                self.shards.append(shard)
                # An interrupted operation is not always one that the survey can see.
                report.current -= _looks_current(alias, behind, missing)

    def report_failures(self, progress: Progress) -> None:
        """Of shards that are not even tried."""
        for failure in self.report.failures:
            progress.failed(failure)


def _looks_current(alias: str, behind: set[str], missing: set[str]) -> bool:
    return alias not in behind and alias not in missing


def _open_steps(group: str) -> Iterator[OperationStep]:
    with journal.require_journal():
        yield from journal.in_batches(journal.open_steps(KIND, group))


class _Worker:
    """Migrates one shard after the other, in several threads, and keeps the report."""

    def __init__(
        self,
        migrator: Migrator,
        run: journal.JournalRun,
        pending: PendingShards,
        progress: Progress,
        stopping: Stopping,
    ) -> None:
        self._migrator = migrator
        self._run = run
        self._create = pending.create
        self._report = pending.report
        self._progress = progress
        self._stopping = stopping
        self._lock = threading.Lock()
        self.failed = 0

    def __call__(self, shard: Shard) -> bool:
        self._run.check()
        step = self._run.step(shard.alias)
        try:
            self._migrate(shard, step)
        except LeaseLost:
            raise  # Not this shard's failure: nothing more may be touched.
        except OperationStopped:
            step.mark_stopped()
            return True
        except OperationUnclear as exc:
            step.mark_unclear(str(exc))
            return self._failed(step)
        except Exception as exc:
            # Whatever a migration raises is this shard's failure, and no other's.
            logger.info("%s was not migrated", shard.alias, exc_info=exc)
            step.mark_failed(exc)
            return self._failed(step)
        step.mark_done()
        with self._lock:
            self._report.migrated += 1
            self._progress.done(shard.alias)
        return True

    def _migrate(self, shard: Shard, step: journal.JournalStep) -> None:
        connection: Any = connections[shard.alias]
        try:
            if shard.alias in self._create:
                # Of what an earlier run began there nothing is left.
                step.begin(position={})
                connection.create_shard_database()
            self._migrator.migrate(shard, step, stopping=self._stopping)
        finally:
            connection.close()
            # The thread comes to thousands of shards; group connections keep those of hundreds.
            connection.group_wrapper.shards.forget(connection)

    def _failed(self, step: journal.JournalStep) -> bool:
        failure = _failure(step)
        with self._lock:
            self.failed += 1
            self._report.failures.append(failure)
            self._progress.failed(failure)
        return False


def _failure(step: journal.JournalStep | OperationStep) -> Failure:
    return Failure(step.alias, step.state, step.error, step.migration, step.operation)


def _outcome(report: MigrationReport) -> tuple[str, str]:
    """State and error of the run in the journal."""
    bad = len(report.failures) + len(report.missing)
    parts = [f"not migrated: {bad} of {report.selected} shards"] if bad else []
    if report.stopped:
        parts.append(f"{report.stopped}; shards not begun or not ended: {report.left}")
    return ("failed" if bad else "stopped" if report.stopped else "done", "; ".join(parts))


# ##### What a person found out #####


def settle(alias: str, *, done: bool) -> None:
    """Tell of a shard whose interrupted operation is unclear whether it took effect.

    The next :func:`migrate` goes on from there.

    :param done: it did; else it will be run again.
    :raises UnknownShard: no shard has this alias.
    :raises NothingUnclear: the shard waits for no answer.
    :raises OperationHeld: the group is being migrated.
    """
    shard = runtime.topology().resolve(alias)
    if shard is None:
        raise UnknownShard(f"There is no shard {alias!r}; an alias is such as 'photos_00042'.")
    if not _unclear(shard).exists():
        raise NothingUnclear(
            f"Shard {alias!r} has no operation that is unclear; 'manage.py migrate_shards --status'"
            " lists those that have."
        )
    with journal.hold_run(KIND, shard.group, {"settle": alias, "done": done}) as run:
        run.create_steps([alias])
        step = run.step(alias)
        group = runtime.group(shard.group)
        Migrator(group, MigrateOptions(), journal.Scripts()).settle(step, done)
        step.mark_stopped()
        if not run.resumed:
            run.finish("settled")


def _unclear(shard: Shard) -> QuerySet[OperationStep]:
    with journal.require_journal():
        open_steps = journal.open_steps(KIND, shard.group)
        return open_steps.filter(alias=shard.alias, state=journal.UNCLEAR)


# ##### Looking #####


@dataclass(frozen=True)
class MigrationStatus:
    """A group as it is now."""

    group: str
    selected: int
    current: int
    behind: int
    missing: Sequence[Shard]
    unreachable: dict[str, str]
    #: What runs left undone on shards of the group, selected or not: state -> number.
    left: dict[str, int]
    failures: list[Failure]
    #: The latest run, and its steps by state.
    run: journal.RunStatus | None
    steps: dict[str, int]
    #: What is to be done: number of shards, migrations.
    plans: list[tuple[int, list[str]]]

    @property
    def ok(self) -> bool:
        """Whether nothing is to be done."""
        return self.current == self.selected and not self.left


def status(selected: Selected, options: MigrateOptions) -> MigrationStatus:
    """Ask nodes and journal; changes nothing, and needs no lease.

    :raises JournalMissing: the global database is not migrated.

    Cost: one query per node, three of the journal.
    """
    run = journal.last_run(KIND, selected.group.name)
    state = Migrator(selected.group, options, journal.Scripts()).applied_state(selected.shards)
    left: dict[str, int] = {}
    failures = []
    for row in _open_steps(selected.group.name):
        left[row.state] = left.get(row.state, 0) + 1
        if row.state in (journal.FAILED, journal.UNCLEAR):
            failures.append(_failure(row))
    return MigrationStatus(
        selected.group.name,
        len(selected),
        state.current,
        len(state.behind),
        state.missing,
        {alias: journal.one_line(exc) for alias, exc in state.unreachable.items()},
        left,
        sorted(failures, key=lambda failure: failure.alias),
        run,
        run.by_state() if run is not None else {},
        _plans(state),
    )


def _plans(state: AppliedState) -> list[tuple[int, list[str]]]:
    plans = [
        (state.count[digest], [_unit(*unit) for unit in plan])
        for digest, plan in state.plans.items()
        if plan
    ]
    return sorted(plans, key=lambda plan: -plan[0])


def _unit(app_label: str, name: str, backwards: bool) -> str:
    return f"{app_label}.{name}" + (" (backwards)" if backwards else "")
