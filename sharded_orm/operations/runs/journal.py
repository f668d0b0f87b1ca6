"""The journal of long operations: tables in the global database that record each step.

If a process is killed, the next one reads in the journal where to continue.

A *run* is one execution of an operation on a subject, such as the migration of a group. One process
at a time holds the run (:mod:`~sharded_orm.operations.runs.lease`). If this process ends before the
run is finished, the next execution resumes the run.

A run has a *step* for each shard that it works on. A step is *unclear* if nobody knows whether its
last statement took effect. A run may be finished although some of its steps have failed, were
interrupted, or are unclear. The next run copies such a step, and continues the work on the shard.

Any thread may write. Each write is committed at once. A thread that writes must close its
connections when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from itertools import islice
from typing import Any, Final

from django.db import (
    DEFAULT_DB_ALIAS,
    InternalError,
    OperationalError,
    connections,
    transaction,
)
from django.db.models import Count, F, Q, QuerySet
from django.utils import timezone

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.database_clock import DatabaseClock
from sharded_orm.models.tables.journal import OperationRun, OperationScript, OperationStep
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.runs import global_database
from sharded_orm.operations.runs import lease as leases

#: The largest number of steps that one statement reads or writes.
BATCH = 500
_autonomous = AutonomousConnections()

# ##### States of a step #####

PENDING: Final = "pending"
"""The run has done nothing on the shard."""
RUNNING: Final = "running"
"""A process works on the shard, or was killed while it worked there."""
STOPPED: Final = "stopped"
"""The work was stopped between two statements. ``position`` says where to continue."""
DONE: Final = "done"
FAILED: Final = "failed"
UNCLEAR: Final = "unclear"
"""Nothing shows whether the interrupted operation took effect. An operator has to look."""
CARRIED: Final = "carried"
"""The step was copied to a later run, which continues the work."""

LEFT: Final = (RUNNING, STOPPED, FAILED, UNCLEAR)


class JournalStep:
    """A step of a run: the work on one shard. To be used by one thread at a time.

    Each method that changes the step sends one UPDATE, and raises :exc:`LeaseLost` if another
    process has taken over the run.
    """

    __slots__ = ("alias", "error", "migration", "operation", "position", "run", "state")

    def __init__(self, run: JournalRun, row: OperationStep) -> None:
        self.run = run
        self.alias = row.alias
        self.state = row.state
        self.migration = row.migration
        self.operation = row.operation
        self.position = row.position
        self.error = row.error

    def begin(
        self,
        *,
        migration: str | None = None,
        operation: str | None = None,
        position: dict[str, Any] | None = None,
    ) -> None:
        """Record what the caller will do next, and set the state to "running".

        An argument that is None leaves the recorded value as it is.

        :param migration: a name to show to people, such as ``photos.0002_title``; may be "".
        :param operation: a description to show to people; may be "".
        :param position: all that a later process needs to continue from here, as JSON values.
        """
        values = {"migration": migration, "operation": operation, "position": position}
        changes = {name: value for name, value in values.items() if value is not None}
        self._write(state=RUNNING, error="", **changes)

    def mark_done(self) -> None:
        self._write(state=DONE, error="", migration="", operation="", position={})

    def mark_failed(self, exc: BaseException) -> None:
        """Record that the work failed with ``exc``. A later run may continue at ``position``."""
        self._write(state=FAILED, error=one_line(exc))

    def mark_unclear(self, message: str) -> None:
        """Record that an operator has to find out whether the interrupted statement took effect.

        :param message: tells the operator what to look at and how to report the answer.
        """
        self._write(state=UNCLEAR, error=message)

    def mark_stopped(self) -> None:
        """Record that the work was stopped. A later run continues at the recorded position."""
        self._write(state=STOPPED if self.position else PENDING, error="")

    def _write(self, **changes: Any) -> None:
        # Use SQL that was compiled once, because the ORM would take a millisecond for each write.
        # Use a separate connection, because a RunPython may have a transaction open on this
        # thread's connection to the global database, and its rollback would undo the write.
        connection = _autonomous.get(DEFAULT_DB_ALIAS).connection
        values = [
            field.get_db_prep_save(changes.get(field.name, getattr(self, field.name)), connection)
            for field in _WRITTEN_FIELDS
        ]
        updated = _UPDATED_FIELD.get_db_prep_save(timezone.now(), connection)
        with connection.cursor() as cursor:
            cursor.execute(
                _update_sql(connection.vendor),
                [*values, updated, self.run.id, self.alias, self.run.id, self.run.lease.token],
            )
            if not cursor.rowcount:
                raise self.run.lease.lost_error()
        for name, value in changes.items():
            setattr(self, name, value)


_step_field = OperationStep._meta.get_field
_WRITTEN_FIELDS: Final[list[Any]] = [
    _step_field(name) for name in ("state", "migration", "operation", "position", "error")
]
_UPDATED_FIELD: Final[Any] = _step_field("updated_at")


@cache
def _update_sql(vendor: str) -> str:
    quote = connections[DEFAULT_DB_ALIAS].ops.quote_name
    sets = ", ".join(f"{quote(field.column)} = %s" for field in [*_WRITTEN_FIELDS, _UPDATED_FIELD])
    step, run = quote(OperationStep._meta.db_table), quote(OperationRun._meta.db_table)
    return (
        f"UPDATE {step} SET {sets} WHERE {quote('run_id')} = %s AND {quote('alias')} = %s"
        f" AND EXISTS (SELECT 1 FROM {run} WHERE {quote('id')} = %s AND {quote('token')} = %s)"
    )


class JournalRun:
    """A run that this process holds, created by :func:`hold_run`. Thread-safe."""

    def __init__(self, row: OperationRun, lease: leases.Lease, resumed: bool) -> None:
        self.id: int = row.pk
        self.kind = row.kind
        self.subject = row.subject
        #: The arguments with which the run was begun, and those added by :meth:`note`. If the run
        #: is resumed, these are the stored arguments, not those of the new command.
        self.arguments: dict[str, Any] = row.arguments
        self.resumed = resumed
        self.finished = False
        self.lease = lease
        # Aliases of shards whose steps this process has just created, without a recorded position.
        # For these shards, :meth:`step` need not query the database.
        self._new_steps: set[str] = set()

    def check(self) -> None:
        """Check that this process still holds the run. Call this before each step. Sends no query.

        :raises LeaseLost: another process may hold the run by now.
        """
        self.lease.check()

    def now(self) -> datetime:
        """Return the time by the clock of the global database. One query.

        Use this to measure a time that begins in one process and may end in another one, on another
        host, whose clock may differ.
        """
        row = leases.runs().filter(pk=self.id).annotate(now=DatabaseClock())
        moment: datetime = row.values_list("now", flat=True).get()
        return moment

    def note(self, **arguments: Any) -> None:
        """Add ``arguments`` to the arguments that are stored in the journal with this run.

        A stored argument with the same name is replaced. The other stored arguments stay.
        """
        merged = {**self.arguments, **arguments}
        self._write(arguments=merged)
        self.arguments = merged

    def finish(self, state: str = "done", error: str = "") -> None:
        """Finish the run, so that the next execution begins a new one.

        :param state: a word for people, such as "done" or "failed".
        :param error: the reason why the run did not succeed; "" if it succeeded.
        """
        # Finish the run and delete its scripts (contents that its steps shared) in one transaction.
        # Otherwise a kill in between would leave the scripts in the database for ever.
        with transaction.atomic(using=DEFAULT_DB_ALIAS):
            self._write(
                state=state, error=error, unfinished=None, finished_at=timezone.now(), token=""
            )
            if not open_steps(self.kind, self.subject).exists():
                OperationScript.objects.using(DEFAULT_DB_ALIAS).filter(
                    run__kind=self.kind, run__subject=self.subject, run__unfinished=None
                ).delete()
        self.finished = True

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A context manager for a transaction during which no other process can take over the run.

        :raises LeaseLost: another process has taken over the run before.
        """
        with transaction.atomic(using=DEFAULT_DB_ALIAS):
            # This write locks the run's row, and fails if another process has taken over the run.
            # It must be the first statement: if a transaction of SQLite begins with a read, its
            # first write may fail.
            self._write(signs=F("signs") + 1)
            yield

    # ##### Steps #####

    def create_steps(self, aliases: Iterable[str]) -> None:
        """Create a step for each shard in ``aliases`` that has none in this run.

        If an earlier run has left the work on the shard unfinished, the new step gets the state and
        the position of that run's step, so that the work continues there.

        Cost: five statements for each 500 steps.
        """
        names = iter(aliases)
        while batch := list(islice(names, BATCH)):
            with self.transaction():
                new = self._create_batch(batch)
            self._new_steps.update(new)

    def _create_batch(self, aliases: list[str]) -> list[str]:
        """Create the missing steps. Return the aliases of those that continue no earlier step."""
        table = OperationStep.objects.using(DEFAULT_DB_ALIAS)
        left = open_steps(self.kind, self.subject).exclude(run_id=self.id)
        earlier_steps = {
            row.alias: row for row in left.filter(alias__in=aliases).order_by("run_id")
        }
        existing = set(
            table.filter(run_id=self.id, alias__in=aliases).values_list("alias", flat=True)
        )
        steps = []
        for alias in aliases:
            if alias in existing:
                continue
            step = OperationStep(run_id=self.id, alias=alias)
            if alias in earlier_steps:
                for name in ("state", "migration", "operation", "position", "error"):
                    setattr(step, name, getattr(earlier_steps[alias], name))
            steps.append(step)
        table.bulk_create(steps)
        table.filter(pk__in=[row.pk for row in earlier_steps.values()]).update(state=CARRIED)
        return [step.alias for step in steps if step.alias not in earlier_steps]

    def step(self, alias: str) -> JournalStep:
        """Return this run's step for the shard ``alias``, which :meth:`create_steps` has created.

        Costs one query. The first call for a step that this process has created sends none, unless
        the step continues a step of an earlier run.
        """
        if alias in self._new_steps:
            self._new_steps.discard(alias)
            return JournalStep(self, OperationStep(run_id=self.id, alias=alias))
        return JournalStep(self, self._steps().get(alias=alias))

    def by_state(self) -> dict[str, int]:
        return count_by_state(self._steps())

    def done_aliases(self) -> set[str]:
        return set(self._steps().filter(state=DONE).values_list("alias", flat=True))

    def failures(self) -> Iterator[JournalStep]:
        """Yield the steps (one for each shard) that failed or are unclear. One query per 500 steps."""
        rows = self._steps().filter(state__in=[FAILED, UNCLEAR])
        return (JournalStep(self, row) for row in in_batches(rows))

    def _steps(self) -> QuerySet[OperationStep]:
        return OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=self.id)

    def _write(self, **changes: Any) -> None:
        try:
            is_written = self.lease.own_row().update(**changes)
        except (InternalError, OperationalError) as exc:
            global_database.explain(exc)
            raise
        if not is_written:
            raise self.lease.lost_error()


@contextmanager
def hold_run(
    kind: str, subject: str, arguments: dict[str, Any], *, resume: bool = True
) -> Iterator[JournalRun]:
    """A context manager in which this process holds the run of ``kind`` on ``subject``.

    If there is an unfinished run, it is resumed. Otherwise a new run is begun. In the block, no
    other process can hold a run of the same kind and subject. If the block ends before
    :meth:`JournalRun.finish` was called, the next call resumes the run, even if ``arguments``
    differ. A background thread writes a sign of life every five seconds.

    :param kind: the kind of operation, such as ``"migrate"``; up to 32 characters.
    :param subject: what the operation works on, such as the name of a group; up to 128 characters.
    :param arguments: values to store with a new run, as JSON and without credentials.
    :param resume: True to resume an unfinished run. False to give it up (its state becomes
        "abandoned") and to begin a new run.
    :raises OperationHeld: another process holds the run and is alive, or may be alive because it
        has been silent for less than 30 seconds.
    :raises JournalMissing: the journal's tables do not exist, or the caller is in a transaction.
    """
    lease, resumed = take_lease(kind, subject, arguments)
    row = leases.runs().get(pk=lease.run_id)
    if resumed and not resume:
        JournalRun(row, lease, True).finish("abandoned")
        lease, resumed = take_lease(kind, subject, arguments)
        row = leases.runs().get(pk=lease.run_id)
    lease.start()
    try:
        yield JournalRun(row, lease, resumed)
    finally:
        lease.release()


def take_lease(kind: str, subject: str, arguments: dict[str, Any]) -> tuple[leases.Lease, bool]:
    """Take the right to work on a run, after checking that the journal can be used.

    Returns the same as :func:`~sharded_orm.operations.runs.lease.take`.

    :raises OperationHeld: another process holds the run.
    :raises JournalMissing: the journal's tables do not exist, or the caller is in a transaction.
    """
    default = connections[DEFAULT_DB_ALIAS]
    with global_database.require_journal():
        is_in_transaction = default.in_atomic_block or not default.get_autocommit()
    if is_in_transaction:
        raise JournalMissing(
            f"The operation {kind!r} on {subject!r} was called inside a transaction of"
            f" {DEFAULT_DB_ALIAS!r}, which would hold back the journal: a kill could not be"
            " resumed, and its threads would not see it. Call it outside (in tests: in a"
            " TransactionTestCase)."
        )
    with global_database.require_journal():
        return leases.take(kind, subject, arguments)


# ##### Contents that many steps share, such as recorded SQL #####


class Scripts:
    """A store for large contents, such as recorded SQL, that the steps of a run share. Thread-safe.

    For example, the SQL of a migration is stored once, and the steps of 4096 shards use it. Each
    content has a key. Each read is a query; nothing is kept in memory. The contents are deleted
    when a run finishes, unless a step of the same kind and subject is still unfinished.
    """

    def get(self, run: JournalRun | int, key: str) -> dict[str, Any] | None:
        """Return the content that ``run`` has stored under ``key``; None if there is none.

        :param run: the run that has stored the content, or its id. If a step continues the step of
            an earlier run, use the id of that run, which the position of the step contains.
        """
        return (
            OperationScript.objects.using(DEFAULT_DB_ALIAS)
            .filter(run_id=_run_id(run), key=key)
            .values_list("content", flat=True)
            .first()
        )

    def put(self, run: JournalRun | int, key: str, content: dict[str, Any]) -> dict[str, Any]:
        """Store ``content`` for the run under ``key``, unless the key has a content already.

        Return the content that is now stored under ``key``.
        """
        script = OperationScript(run_id=_run_id(run), key=key, content=content)
        OperationScript.objects.using(DEFAULT_DB_ALIAS).bulk_create([script], ignore_conflicts=True)
        stored = self.get(run, key)
        assert stored is not None
        return stored


def _run_id(run: JournalRun | int) -> int:
    return run if isinstance(run, int) else run.id


# ##### Status #####


def open_steps(kind: str, subject: str) -> QuerySet[OperationStep]:
    """Return the steps of all runs of ``kind`` on ``subject`` that were begun but not completed.

    Their states are "running", "stopped", "failed" or "unclear". A step that is "running" may have
    been interrupted by a kill.
    """
    return OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(
        run__kind=kind, run__subject=subject, state__in=LEFT
    )


class RunStatus:
    """The state of a run, for example for a status command. Any process can create an instance.

    :param row: a row from :func:`~sharded_orm.operations.runs.lease.with_silence`.
    """

    def __init__(self, row: Any) -> None:
        self.id: int = row.pk
        self.kind: str = row.kind
        self.subject: str = row.subject
        self.arguments: dict[str, Any] = row.arguments
        # If several processes share a run, each of them holds the run only for a moment, to plan
        # the work. But each has a worker that gives signs of life all the time. So look at the
        # workers, too.
        self.held = leases.is_held(row) or (
            bool(row.unfinished)
            and any(leases.is_held(worker) for worker in leases.workers(row.kind, row.subject))
        )
        #: "running" while a process holds the run or does its work units; "broken off" if the run
        #: is unfinished and no process holds it; otherwise the state with which the run was
        #: finished.
        self.state: str = "broken off" if row.unfinished and not self.held else row.state
        self.error: str = row.error
        self.holder: str = f"{row.user}@{row.host} (process {row.pid})"
        self.silent: timedelta | None = row.silent
        self.started_at: datetime = row.started_at
        self.finished_at: datetime | None = row.finished_at

    def by_state(self) -> dict[str, int]:
        return count_by_state(OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=self.id))


def in_batches(rows: QuerySet[OperationStep]) -> Iterator[OperationStep]:
    """Yield the steps ``rows``, ordered by shard alias and run, with one query per 500 steps.

    With a single query, MySQL's driver would hold all rows in memory, even for ``iterator()``.
    """
    last: Any = None
    ordered = rows.order_by("alias", "run_id")
    while True:
        later = ordered
        if last is not None:
            later = ordered.filter(
                Q(alias__gt=last.alias) | Q(alias=last.alias, run_id__gt=last.run_id)
            )
        batch = list(later[:BATCH])
        yield from batch
        if len(batch) < BATCH:
            return
        last = batch[-1]


def last_run(kind: str, subject: str) -> RunStatus | None:
    """Return the latest run of operation ``kind`` on ``subject``; None if there was no run yet.

    Costs one query, or two if the run is unfinished and no process holds it.

    :raises JournalMissing: the journal's tables do not exist.
    """
    with global_database.require_journal():
        row = (
            leases.with_silence(leases.runs())
            .filter(kind=kind, subject=subject)
            .order_by("-pk")
            .first()
        )
    return None if row is None else RunStatus(row)


def one_line(exc: BaseException) -> str:
    """Return the type and message of an exception in one line, as reports show it."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def count_by_state(rows: QuerySet[OperationStep]) -> dict[str, int]:
    """Return a dict that maps each state to the number of steps, such as ``{"done": 12}``."""
    counts = rows.values_list("state").annotate(number=Count("pk")).order_by("state")
    return dict(counts)
