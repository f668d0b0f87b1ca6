"""Migrate the selected shards of one group, and report the outcome.

:class:`Migrator` migrates one shard, and :class:`Waves` decides the order of the shards. The
journal (tables in the global database) records how far each shard has come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db import connections

from sharded_orm import runtime
from sharded_orm.exceptions import LeaseLost, OperationHeld, UnknownShard
from sharded_orm.models.tables.journal import OperationStep
from sharded_orm.operations.exceptions import NothingUnclear, OperationStopped, OperationUnclear
from sharded_orm.operations.migrate import AppliedState, MigrateOptions, Migrator
from sharded_orm.operations.runs import global_database, journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping, Waves, work_through
from sharded_orm.operations.selection import Selected
from sharded_orm.topology.model import Shard
from sharded_orm.two_phase.recovery import refuse_prepared

KIND = "migrate"
logger = logging.getLogger("sharded_orm.operations")


@dataclass(frozen=True)
class Failure:
    """A shard that was not migrated, with the reason.

    :param state: "failed" or "unreachable". Or "unclear": an operation was interrupted, and nothing
        shows whether it took effect.
    """

    alias: str
    state: str
    error: str
    migration: str = ""
    operation: str = ""


class Progress(Protocol):
    """Receives reports while a group is migrated. Its methods are called by one thread at a time.

    The order of the calls is:

    - :meth:`resume`, only if an earlier process was interrupted. Its arguments are the run's id,
      the numbers of the shards that are migrated already, and the number of shards that are left.
    - :meth:`failed`, for each shard on which the migration cannot even begin, such as an
      unreachable shard.
    - :meth:`begin`; then :meth:`done` or :meth:`failed` for shards; and :meth:`end`.
    """

    def resume(self, group: str, run: int, done: Sequence[int], left: int) -> None: ...

    def begin(self, group: str, total: int) -> None: ...
    def done(self, alias: str) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def end(self) -> None: ...


@dataclass
class MigrationReport:
    """The outcome of a migration for the shards of one group."""

    group: str
    #: Number of shards that the request applies to.
    selected: int
    #: Number of shards that had no migration to run.
    current: int = 0
    #: Number of shards that this run has migrated.
    migrated: int = 0
    failures: list[Failure] = field(default_factory=list)
    #: Shards whose database does not exist. Empty if the request says to create such databases.
    missing: list[Shard] = field(default_factory=list)
    #: Why the run ended before all shards were tried; "" if it did not end early.
    stopped: str = ""
    #: Number of shards that the run did not begin or did not finish.
    left: int = 0
    #: The run's id in the journal; None if no run was begun, because there was nothing to do.
    run: int | None = None

    @property
    def ok(self) -> bool:
        return not (self.failures or self.missing or self.stopped)


@dataclass(frozen=True)
class MigrationRequest:
    """The options of an operator's request to migrate shards. They apply to each group."""

    options: MigrateOptions
    waves: Waves = field(default_factory=Waves)
    #: Whether to create the databases (MySQL schemas or SQLite files) of shards that have none.
    create: bool = False
    #: Whether to migrate only the shards that failed in an earlier run.
    retry_failed: bool = False
    #: The name of a node: migrate only this node's sides of the shards, in a journal run of their
    #: own. A shard on a pair (two nodes that replicate each other) has one side on each of the two
    #: nodes. "" means to migrate shards as a whole.
    side: str = ""

    @property
    def kind(self) -> str:
        return f"{KIND} side" if self.side else KIND

    def subject(self, group: str) -> str:
        return f"{group} on {self.side}" if self.side else group


def migrate(
    selected: Selected, request: MigrationRequest, progress: Progress, stopping: Stopping
) -> MigrationReport:
    """Migrate the selected shards of one group and return the report.

    If a shard fails, the failure is in the report. The other shards are still migrated, unless
    there are more failures than ``request.waves`` allows. After any interruption, another call
    continues where this one stopped.

    :param stopping: a flag that ends the migration early once it is set. The report's attribute
        ``left`` then says how many shards were not begun or not finished.
    :raises OperationHeld: another process migrates the group.
    :raises BranchesPrepared: a transaction in two phases holds locks on one of the shards.
    :raises LeaseLost: another process has taken over the journal's run.
    :raises JournalMissing: the global database is not migrated.

    Cost: first that of :meth:`Migrator.applied_state`, which finds the shards that are behind. If
    there are none, only two more queries are sent, to the journal, and nothing is written.
    """
    migrator = Migrator(selected.group, request.options, journal.Scripts())
    pending = PendingShards(migrator, selected, request)
    if not pending.shards:
        _finish_broken_off(request.kind, request.subject(selected.group.name))
        pending.report_failures(progress)
        return pending.report
    refuse_prepared(selected.group, pending.shards)
    arguments = {
        "targets": list(request.options.targets),
        "fake": request.options.fake,
        "fake_initial": request.options.fake_initial,
        "shards": len(pending.shards),
    }
    subject = request.subject(selected.group.name)
    with journal.hold_run(request.kind, subject, arguments) as run:
        refuse_conflicts(run)
        if run.resumed:
            run.note(**arguments)
        # This process holds the run now, so no other process migrates the group. Examine the shards
        # again: since the first examination, another process may have migrated some of them, or
        # left some unfinished.
        pending = PendingShards(migrator, selected, request)
        report = pending.report
        report.run = run.id
        if run.resumed:
            done = run.done_aliases()
            numbers = [shard.number for shard in selected.group.shards() if shard.alias in done]
            progress.resume(selected.group.name, run.id, numbers, len(pending.shards))
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


def _finish_broken_off(kind: str, subject: str) -> None:
    """Mark the last run as finished if its process was killed just after the last shard.

    After such a kill, all shards are migrated, but in the journal the run has not ended.
    """
    last = journal.last_run(kind, subject)
    if last is None or last.state != "broken off":
        return
    if not set(last.by_state()) <= {journal.DONE, journal.CARRIED}:
        return  # Do not finish the run, because it has unfinished shards that are not selected now.
    with suppress(OperationHeld), journal.hold_run(kind, subject, last.arguments) as run:
        run.finish()


class PendingShards:
    """Finds out which of the selected shards must be migrated, and lists them in ``shards``.

    The attribute ``report`` has the selected shards that need no migration or cannot be migrated.
    """

    def __init__(self, migrator: Migrator, selected: Selected, request: MigrationRequest) -> None:
        states: dict[str, str] = {}
        unclear: dict[str, Failure] = {}
        for row in _open_steps(request.kind, request.subject(selected.group.name)):
            states[row.alias] = row.state
            if row.state == journal.UNCLEAR:
                unclear[row.alias] = _failure(row)
        shards = selected.shards
        if request.retry_failed:
            shards = [shard for shard in shards if states.get(shard.alias) == journal.FAILED]
        state = migrator.applied_state(shards)
        behind = {shard.alias for shard in state.behind}
        missing = {shard.alias for shard in state.missing}
        #: Aliases of the shards whose databases must be created first.
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
                # The journal may have a migration of this shard that was begun and not completed.
                # Then do not count the shard as current, even if all its migrations are recorded as
                # applied.
                report.current -= _looks_current(alias, behind, missing)

    def report_failures(self, progress: Progress) -> None:
        """Report each shard on which the migration cannot begin.

        Such a shard is unreachable, or one of its operations was interrupted and nothing shows
        whether this operation took effect.
        """
        for failure in self.report.failures:
            progress.failed(failure)


def _looks_current(alias: str, behind: set[str], missing: set[str]) -> bool:
    return alias not in behind and alias not in missing


def _open_steps(kind: str, subject: str) -> Iterator[OperationStep]:
    with global_database.require_journal():
        yield from journal.in_batches(journal.open_steps(kind, subject))


class _Worker:
    """A callable that migrates one shard and updates the report. Several threads call it.

    It returns False if the shard failed. It returns True if the shard was migrated, or if the work
    was stopped on request.
    """

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
            # Another process has taken over the run, so this process must not write anything more.
            # In particular, it must not record that the shard failed.
            raise
        except OperationStopped:
            step.mark_stopped()
            return True
        except OperationUnclear as exc:
            step.mark_unclear(str(exc))
            return self._failed(step)
        except Exception as exc:
            # A migration can raise any exception. It counts as a failure of this shard, and the
            # other shards are still migrated.
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
                # The shard has no database, so nothing is left of what earlier runs did there.
                # Delete the checkpoint of those runs from the journal, and create the database.
                step.begin(position={})
                connection.create_shard_database()
            self._migrator.migrate(shard, step, stopping=self._stopping)
        finally:
            connection.close_and_forget()

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
    """Return what the journal stores about the finished run: a state and the text of an error."""
    failed = len(report.failures) + len(report.missing)
    parts = [f"not migrated: {failed} of {report.selected} shards"] if failed else []
    if report.stopped:
        parts.append(f"{report.stopped}; shards not begun or not ended: {report.left}")
    return ("failed" if failed else "stopped" if report.stopped else "done", "; ".join(parts))


# ##### Answers of an operator #####


def settle(alias: str, *, done: bool) -> None:
    """Record an operator's answer: whether the shard's interrupted operation took effect.

    If the operation took effect, the next :func:`migrate` continues after it. Otherwise the next
    :func:`migrate` runs the operation again.

    :param alias: the alias of a shard whose step is "unclear".
    :param done: True if the operation took effect as a whole; False if no part of it did.
    :raises UnknownShard: no shard has this alias.
    :raises NothingUnclear: the shard has no unclear operation.
    :raises OperationHeld: the group is being migrated.
    """
    topology = runtime.topology()
    shard = topology.resolve(alias)
    if shard is None:
        raise UnknownShard(f"There is no shard {alias!r}; shards are {topology.alias_spans()}.")
    request = _unclear(shard)
    if request is None:
        raise NothingUnclear(
            f"Shard {alias!r} has no operation that is unclear; 'manage.py migrate_shards --status'"
            " lists those that have."
        )
    subject = request.subject(shard.group)
    with journal.hold_run(request.kind, subject, {"settle": alias, "done": done}) as run:
        run.create_steps([alias])
        step = run.step(alias)
        group = runtime.group(shard.group)
        Migrator(group, MigrateOptions(), journal.Scripts()).settle(step, done)
        step.mark_stopped()
        if not run.resumed:
            run.finish("settled")


def _unclear(shard: Shard) -> MigrationRequest | None:
    """Look in the journal for an unclear migration of ``shard``, and return its request.

    A migration is unclear if one of its operations was interrupted, and nothing shows whether this
    operation took effect. Return None if ``shard`` has no such migration.
    """
    with global_database.require_journal():
        for side in ("", shard.node, shard.replica):
            request = MigrationRequest(MigrateOptions(), side=side or "")
            steps = journal.open_steps(request.kind, request.subject(shard.group))
            if steps.filter(alias=shard.alias, state=journal.UNCLEAR).exists():
                return request
    return None


# ##### Status #####


@dataclass(frozen=True)
class MigrationStatus:
    """How far the shards of a group are migrated now.

    ``selected`` is the number of examined shards. ``current`` is the number of examined shards that
    have no migration to run. ``behind`` is the number of examined shards that have at least one
    migration to run.
    """

    group: str
    selected: int
    current: int
    behind: int
    missing: Sequence[Shard]
    unreachable: dict[str, str]
    #: Counts the group's shards whose migration was begun and not completed. Maps the state of the
    #: migration in the journal to the number of shards; {"failed": 2} means two failed shards.
    left: dict[str, int]
    #: The shards of the group whose migration failed, or was interrupted so that nothing shows
    #: whether the last operation took effect.
    failures: list[Failure]
    #: The latest run, which is one migration of the group's shards; None if there was none.
    run: journal.RunStatus | None
    #: The number of steps of the latest run in each state, such as {"done": 5, "failed": 1}. A step
    #: is the migration of one shard.
    steps: dict[str, int]
    #: Pairs (number of shards, names of the migrations to run). There is one pair for each distinct
    #: list of migrations.
    plans: list[tuple[int, list[str]]]

    @property
    def ok(self) -> bool:
        """Whether all selected shards are up to date, and the journal has no unfinished migration.

        An unfinished migration counts for each shard of the group, also for one that is not
        selected.
        """
        return self.current == self.selected and not self.left


def status(selected: Selected, options: MigrateOptions) -> MigrationStatus:
    """Return how far the selected shards are migrated, according to the nodes and the journal.

    Changes nothing, and works while another process migrates the group.

    :raises JournalMissing: the global database is not migrated.

    Cost: that of :meth:`Migrator.applied_state`, and three queries on the journal.
    """
    run = journal.last_run(KIND, selected.group.name)
    state = Migrator(selected.group, options, journal.Scripts()).applied_state(selected.shards)
    left: dict[str, int] = {}
    failures = []
    for row in _open_steps(KIND, selected.group.name):
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
