"""Follow an import's source: after the copy, apply to the shards what the site changes on the
source.

The source is the database from which the rows are imported. The site goes on writing to it until
the switch. Then the source is closed, which means that it refuses writes, and the site writes to
the shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from django.db import IntegrityError, OperationalError, close_old_connections, connections
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.backends.change_capture import Change
from sharded_orm.operations.exceptions import ImportFailed, ImportRefused, OperationDiffers
from sharded_orm.operations.imports.change_application import ChangeApplication
from sharded_orm.operations.imports.preflight import check_source
from sharded_orm.operations.imports.request import ImportReport, ImportRequest
from sharded_orm.operations.imports.row_copy import copy_rows
from sharded_orm.operations.imports.source_journal import SourceJournal
from sharded_orm.operations.imports.source_tables import SourceTable
from sharded_orm.operations.imports.ticket_ids import advance_tickets
from sharded_orm.operations.runs import journal as runs
from sharded_orm.operations.runs.farm import FarmProgress
from sharded_orm.operations.runs.rollout import Stopping

KIND: Final = "import follow"
#: The largest number of changes that are applied at once.
BATCH: Final = 1000
#: If the journal of changes is empty, it is read again after this number of seconds.
INTERVAL: Final = 0.3
#: The import's source is closed (made to refuse writes) only when at most this many changes are
#: left to apply. So the site is without writes for a short time only.
FEW_CHANGES: Final = 100
#: Default number of seconds to wait for transactions that are open when the source is to be closed
#: (made to refuse writes).
PATIENCE: Final = 10.0
# The largest number of attempts to copy the rows. An attempt fails if the shard key of a row
# changes meanwhile.
_COPIES = 3
# The largest number of attempts to apply changes if a constraint of a shard refuses a row.
_ATTEMPTS = 5

Tell = Callable[[str], None]


@dataclass
class FollowReport:
    """A report on how many changes of an import's source have been applied to the shards.

    :param run: the id of the run in the journal of operations.
    :param applied: number of entries of the source's journal of changes that this process has
        applied.
    :param left: number of entries that are not applied yet; at most 1000 are counted.
    :param closed: whether the source is closed, so that it refuses writes. Only
        :func:`switch_source` closes it; the value is always False in other reports.
    :param seconds: for how many seconds writes were stopped, from closing the source until the
        shards had all rows; None if this process has not closed it.
    :param tables: maps the label of each model to two numbers: its rows on the source, and on the
        shards, counted after the source was closed.
    :param problems: sentences about what is left to do. Empty if all is well.
    :param notes: further sentences for the operator, about what was done.
    :param stopped: why this process stopped early; "" if it did not.
    """

    run: int
    applied: int = 0
    left: int = 0
    closed: bool = False
    seconds: float | None = None
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems and not self.stopped

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def follow_source(
    request: ImportRequest,
    threads: int,
    progress: FarmProgress,
    stopping: Stopping,
    tell: Tell,
    *,
    until_current: bool = False,
) -> FollowReport:
    """Copy the rows of ``request``, and then apply each later change of the source to the shards.

    Triggers on the source record which rows change. They stay when this function ends, so another
    call continues where this one stopped. Until :func:`switch_source` has ended, nobody else may
    write the imported rows on the shards, because the values of the source overwrite such writes.

    :param threads: number of threads that copy.
    :param stopping: a flag that ends the work early once it is set.
    :param tell: called with a line for the operator.
    :param until_current: whether to end as soon as no change is left. Otherwise, only ``stopping``
        ends the work.
    :raises ImportRefused: the rows cannot be imported, or the account may not create triggers, or
        the source is closed already. Nothing was written.
    :raises ImportConflict: a shard has a different row with the primary key of a changed row.
    :raises OperationHeld: another process follows the source.
    :raises OperationDiffers: an unfinished run follows different tables.
    """
    with _follower(request, stopping, tell) as follower:
        if follower.journal.is_closed():
            raise ImportRefused(
                [
                    f"{request.source!r} was closed for writes by --switch: run the command with"
                    " --switch to go on, or with --unfollow to open the tables again"
                ]
            )
        follower.begin(threads, progress)
        follower.follow(until_current=until_current)
        return follower.report


def switch_source(
    request: ImportRequest,
    threads: int,
    progress: FarmProgress,
    stopping: Stopping,
    tell: Tell,
    *,
    patience: float = PATIENCE,
) -> FollowReport:
    """Switch from the source to the shards: make the source refuse writes, and copy its last
    changes.

    First does what :func:`follow_source` does, until few changes are left. Then the source is
    closed: it refuses writes to the imported tables. The last changes are applied to the shards,
    and the rows are counted on the source and on the shards. The source stays closed at the end.
    Can be repeated after an error.

    :param patience: seconds to wait for transactions on the source that are open when it is closed.
    :raises ImportFailed: a transaction was still open after ``patience`` seconds. The source
        accepts writes as before.

    Other arguments and errors are those of :func:`follow_source`.
    """
    with _follower(request, stopping, tell) as follower:
        if not follower.journal.is_closed():
            follower.begin(threads, progress)
            follower.follow(until_current=True, few=FEW_CHANGES)
        if not stopping():
            follower.switch(patience)
        return follower.report


def unfollow_source(request: ImportRequest) -> FollowReport:
    """Remove what :func:`follow_source` and :func:`switch_source` have created on the source.

    These are the triggers, the journal of changes, and the fence that refuses writes. Afterwards
    the tables accept writes as before. Can be repeated.

    :raises OperationHeld: a process follows the source.
    :raises ImportFailed: a transaction on one of the tables took longer than 30 seconds. The tables
        accept writes, but triggers are left.
    """
    with (
        runs.hold_run(KIND, request.group, _arguments(request)) as run,
        SourceJournal(request) as journal,
    ):
        _remove(journal, request)
        run.finish("abandoned" if run.resumed else "done")
        return FollowReport(run.id)


def _remove(journal: SourceJournal, request: ImportRequest) -> None:
    try:
        journal.remove()
    except OperationalError as exc:
        raise ImportFailed(
            f"The tables on {request.source!r} can be written, but triggers are left on them, because"
            f" a transaction keeps them locked ({exc}). End it, and run the command again."
        ) from exc


def _arguments(request: ImportRequest) -> dict[str, Any]:
    return {"models": request.labels, "source": request.source}


@contextmanager
def _follower(request: ImportRequest, stopping: Stopping, tell: Tell) -> Iterator[_Follower]:
    arguments = _arguments(request)
    with runs.hold_run(KIND, request.group, arguments) as run:
        others = {name: run.arguments[name] for name in arguments}
        if others != arguments:
            raise OperationDiffers(
                f"Run {run.id} follows {others['source']!r} with the models {others['models']!r}. Name"
                " the same ones to go on, or end it by the same command with --unfollow."
            )
        try:
            # Report missing tables first. Otherwise, looking for triggers on a missing table would
            # fail with an error of the database.
            check_source(request)
            with SourceJournal(request) as journal:
                yield _Follower(request, run, journal, stopping, tell)
        except ImportRefused as exc:
            if not run.resumed:
                run.finish("refused", runs.one_line(exc))
            raise


class _Follower:
    """Copies the rows of one import, and then applies later changes of its source to the shards.

    To be used by one thread.
    """

    def __init__(
        self,
        request: ImportRequest,
        run: runs.JournalRun,
        journal: SourceJournal,
        stopping: Stopping,
        tell: Tell,
    ) -> None:
        self._request = request
        self._run = run
        self.journal = journal
        self._stopping = stopping
        self._tell = tell
        self._application = ChangeApplication(request.tables, journal, run.check)
        self.report = FollowReport(run.id)

    def begin(self, threads: int, progress: FarmProgress) -> None:
        """Install the triggers that record changes on the import's source, and copy the source's
        rows to the shards.

        If an earlier call has already copied the rows, no rows are copied.
        """
        if self._run.arguments.get("copied"):
            if self.journal.is_installed():
                return
            raise ImportFailed(
                f"Triggers of --follow are missing on {self._request.source!r}, so changes may have been"
                " missed. Run the command with --unfollow, and then with --follow; after that, --verify"
                " finds rows that were deleted meanwhile."
            )
        self.journal.check()
        try:
            self.journal.install()
        except OperationalError as exc:
            raise ImportFailed(
                f"No triggers could be created on {self._request.source!r}, because a transaction keeps"
                f" a table locked ({exc}). End it, and run the command again."
            ) from exc
        self._tell(f"The changes of {self._request.source!r} are recorded. The rows are copied.")
        try:
            copied = self._copy(threads, progress)
        except ImportRefused:
            if not self._run.resumed:
                _remove(self.journal, self._request)
            raise
        self.report.stopped = copied.stopped
        if not copied.finished and not copied.stopped:
            raise ImportFailed(
                f"Not all rows were copied: {'; '.join(copied.problems)}. Run the command again to go on."
            )
        if copied.finished:
            self._run.note(copied=True)

    def _copy(self, threads: int, progress: FarmProgress) -> ImportReport:
        # Copy the rows in one round. Further rounds would look for rows that have changed since,
        # but here a journal on the source records such rows.
        request = replace(self._request, update=True, rounds=1)
        for number in range(1, _COPIES + 1):
            # copy_rows() reports a conflict if the shard key of a row has changed after the row was
            # copied. So apply the recorded changes before each attempt: this moves the row to its
            # shard.
            self.follow(until_current=True, few=FEW_CHANGES)
            report = copy_rows(request, threads, progress, self._stopping)
            progress.end()
            if report.finished or report.stopped:
                break
            self._tell(
                f"Attempt {number} to copy the rows has failed: {'; '.join(report.problems)}"
            )
        return report

    def follow(self, *, until_current: bool, few: int = 0) -> None:
        """Apply changes of the import's source to the shards until the work is stopped.

        :param until_current: True to end earlier, as soon as at most ``few`` changes are left to
            apply. If False, ``few`` is ignored.
        """
        was_current = False
        while not self._stopping():
            count = self._apply(self.journal.changes(BATCH))
            if until_current and count <= few:
                return
            if count:
                continue
            if not was_current:
                was_current = True
                self._tell(f"The shards are current; {self.report.applied} changes were applied.")
            close_old_connections()
            self._stopping.wait(INTERVAL)
        self.report.stopped = self._stopping.cause
        self.report.left = len(self.journal.changes(BATCH))

    def _apply(self, changes: Sequence[Change]) -> int:
        self._run.check()
        if not changes:
            return 0
        for attempt in range(_ATTEMPTS):
            try:
                self._application.apply(changes, afresh=attempt > 0)
                break
            except IntegrityError:
                # A constraint of the shard refuses a row. For example, two rows have exchanged
                # unique values, and ``changes`` has only one of them. The journal may contain the
                # change of the other row later. So read more of the journal and try again.
                if attempt == _ATTEMPTS - 1:
                    raise
                changes = self.journal.changes(BATCH * BATCH)
        self._run.check()
        self.journal.forget(changes)
        self.report.applied += len(changes)
        return len(changes)

    def switch(self, patience: float) -> None:
        """Close the import's source (make it refuse writes), apply its last changes, and count the
        rows.
        """
        began = time.monotonic()
        try:
            self.journal.close(patience)
        except OperationalError as exc:
            raise ImportFailed(
                f"{self._request.source!r} was not closed and can be written as before: a transaction"
                f" on its tables was open for longer than {patience:g} s ({exc}). Run the command again."
            ) from exc
        while self._apply(self.journal.changes(BATCH)):
            pass
        self.report.closed = True
        for table in self._request.tables:
            self._count(table)
        self.report.seconds = time.monotonic() - began
        notes, problems = advance_tickets(self._request.tables)
        self.report.notes += notes
        self.report.problems += problems
        if not self.report.problems:
            self._run.finish("done")

    def _count(self, table: SourceTable) -> None:
        there = table.query().count()
        on_shards = 0
        for shard in runtime.group(self._request.group).shards():
            on_shards += QuerySet(table.model, using=shard.alias).count()
            connection: Any = connections[shard.alias]
            connection.close_and_forget()
        self.report.tables[table.label] = {"rows": there, "on shards": on_shards}
        if there != on_shards:
            self.report.problems.append(
                f"{table.label} has {there} rows on {table.alias!r} and {on_shards} on the shards:"
                " --verify names them. The source stays closed; --unfollow opens it"
            )
