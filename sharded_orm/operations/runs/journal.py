"""The journal of long operations in the global database: a kill at any moment loses nothing
(DESIGN decision 10).

A *run* is one execution of an operation on a subject, such as the migration of a group. One process
at a time holds the run (:mod:`~sharded_orm.operations.runs.lease`). A run has a *step* for each
shard that it works on. A run that was broken off is unfinished, and the next execution goes on with
it. A step that a finished run left open (failed, unclear, interrupted) is carried over to the next
run that works on that shard.

All writes are in autocommit, from any thread. A thread closes its connections at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from itertools import islice
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, OperationalError, ProgrammingError, connections, transaction
from django.db.models import Count, F, Q, QuerySet
from django.utils import timezone

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.exceptions import JournalMissing
from sharded_orm.models.tables.journal import OperationRun, OperationScript, OperationStep
from sharded_orm.operations.runs import lease as leases

#: Rows that one statement reads or writes.
BATCH = 500
_autonomous = AutonomousConnections()

# ##### States of a step #####

PENDING: Final = "pending"
"""Nothing has been done."""
RUNNING: Final = "running"
"""A process works on the shard, or was killed while it did."""
STOPPED: Final = "stopped"
"""Left in order after a statement; ``position`` says after which."""
DONE: Final = "done"
FAILED: Final = "failed"
UNCLEAR: Final = "unclear"
"""Nothing shows whether the interrupted operation took effect: a person has to look."""
CARRIED: Final = "carried"
"""A later run goes on with the step."""

LEFT: Final = (RUNNING, STOPPED, FAILED, UNCLEAR)


class JournalStep:
    """One shard in one run. Used by one thread at a time.

    Each method that changes the step is one UPDATE. It matches no row once another process holds
    the run; then :exc:`LeaseLost` is raised.
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
        """Record what is done next, before it is done. None leaves a value as it is.

        :param migration: for people, such as ``photos.0002_title``; may be "".
        :param operation: for people; may be "".
        :param position: all that a later process needs to go on from here, as JSON values.
        """
        values = {"migration": migration, "operation": operation, "position": position}
        changes = {name: value for name, value in values.items() if value is not None}
        self._write(state=RUNNING, error="", **changes)

    def mark_done(self) -> None:
        self._write(state=DONE, error="", migration="", operation="", position={})

    def mark_failed(self, exc: BaseException) -> None:
        """Record the cause; the position stays, so that a later run goes on from there."""
        self._write(state=FAILED, error=one_line(exc))

    def mark_unclear(self, message: str) -> None:
        """Leave the step for a person.

        :param message: what to look at, and how to report the answer.
        """
        self._write(state=UNCLEAR, error=message)

    def mark_stopped(self) -> None:
        """Leave the step for a later run, which goes on from the position."""
        self._write(state=STOPPED if self.position else PENDING, error="")

    def _write(self, **changes: Any) -> None:
        # Compiled once: the ORM would need a millisecond for each, and each shard has several.
        # On a connection of its own: a migration's function may be in a transaction on the global
        # database.
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
    """A run that this process holds; created by :func:`hold_run`. Thread-safe."""

    def __init__(self, row: OperationRun, lease: leases.Lease, resumed: bool) -> None:
        self.id: int = row.pk
        self.kind = row.kind
        self.subject = row.subject
        #: A resumed run has the arguments with which it was begun.
        self.arguments: dict[str, Any] = row.arguments
        self.resumed = resumed
        self.finished = False
        self.lease = lease
        # Aliases of steps that are as this process has created them: nobody else writes them.
        self._new_steps: set[str] = set()

    def check(self) -> None:
        """Make sure that this process still holds the run. Call it before each step; no query.

        :raises LeaseLost: another process may have the run by now.
        """
        self.lease.check()

    def now(self) -> datetime:
        """The time by the clock of the global database, so that processes on several hosts agree.

        Differences are wrong only if that one clock is set in between. One query.
        """
        row = leases.runs().filter(pk=self.id).annotate(now=leases.DatabaseClock())
        moment: datetime = row.values_list("now", flat=True).get()
        return moment

    def note(self, **arguments: Any) -> None:
        """Add to the arguments that the run remembers, or replace them."""
        merged = {**self.arguments, **arguments}
        self._write(arguments=merged)
        self.arguments = merged

    def finish(self, state: str = "done", error: str = "") -> None:
        """End the run; the next execution is another run.

        :param state: "done", "failed" …, for people.
        """
        # One transaction, because a kill in between would leave the scripts.
        with transaction.atomic(using=DEFAULT_DB_ALIAS):
            self._write(
                state=state, error=error, unfinished=None, finished_at=timezone.now(), token=""
            )
            if not open_steps(self.kind, self.subject).exists():
                OperationScript.objects.using(DEFAULT_DB_ALIAS).filter(
                    run__kind=self.kind, run__subject=self.subject, run__unfinished=None
                ).delete()
        self.finished = True

    # ##### Steps #####

    def create_steps(self, aliases: Iterable[str]) -> None:
        """Create the missing steps, with the state in which earlier runs left them.

        Cost: five statements for each 500 steps.
        """
        names = iter(aliases)
        while batch := list(islice(names, BATCH)):
            with transaction.atomic(using=DEFAULT_DB_ALIAS):
                # A write comes first: it checks the lease, and SQLite lets no reader become a
                # writer.
                self._write(signs=F("signs") + 1)
                new = self._create_batch(batch)
            self._new_steps.update(new)

    def _create_batch(self, aliases: list[str]) -> list[str]:
        """Create the missing steps of a batch; returns aliases without a step in an earlier run."""
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
        """The step of ``alias``, which :meth:`create_steps` has created.

        One query; none at the first call for a new step.
        """
        if alias in self._new_steps:
            self._new_steps.discard(alias)
            return JournalStep(self, OperationStep(run_id=self.id, alias=alias))
        return JournalStep(self, self._steps().get(alias=alias))

    def by_state(self) -> dict[str, int]:
        return _by_state(self._steps())

    def failures(self) -> Iterator[JournalStep]:
        """Steps that failed or are unclear, ordered by alias. One query for each 500."""
        rows = self._steps().filter(state__in=[FAILED, UNCLEAR])
        return (JournalStep(self, row) for row in in_batches(rows))

    def _steps(self) -> QuerySet[OperationStep]:
        return OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=self.id)

    def _write(self, **changes: Any) -> None:
        if not self.lease.own_row().update(**changes):
            raise self.lease.lost_error()


@contextmanager
def hold_run(
    kind: str, subject: str, arguments: dict[str, Any], *, resume: bool = True
) -> Iterator[JournalRun]:
    """Hold the run of ``kind`` on ``subject`` inside the block; nobody else can run it meanwhile.

    A run that :meth:`JournalRun.finish` has not finished is resumed by the next call, whatever its
    arguments. A thread gives a sign of life every five seconds.

    :param kind: up to 32 characters, such as ``"migrate"``.
    :param subject: up to 128 characters; two runs must not work on it at once.
    :param arguments: JSON values without credentials.
    :param resume: False gives an unfinished run up (it is "abandoned") and begins another.
    :raises OperationHeld: another process holds the run, or died so recently that it may still
        live.
    :raises JournalMissing: the tables do not exist, or the caller is in a transaction.
    """
    lease, resumed = _take_lease(kind, subject, arguments)
    row = leases.runs().get(pk=lease.run_id)
    if resumed and not resume:
        JournalRun(row, lease, True).finish("abandoned")
        lease, resumed = _take_lease(kind, subject, arguments)
        row = leases.runs().get(pk=lease.run_id)
    lease.start()
    try:
        yield JournalRun(row, lease, resumed)
    finally:
        lease.release()


def _take_lease(kind: str, subject: str, arguments: dict[str, Any]) -> tuple[leases.Lease, bool]:
    default = connections[DEFAULT_DB_ALIAS]
    if default.in_atomic_block or not default.get_autocommit():
        raise JournalMissing(
            f"The operation {kind!r} on {subject!r} was called inside a transaction of"
            f" {DEFAULT_DB_ALIAS!r}, which would hold back the journal: a kill could not be"
            " resumed, and its threads would not see it. Call it outside (in tests: in a"
            " TransactionTestCase)."
        )
    with require_journal():
        return leases.take(kind, subject, arguments)


@contextmanager
def require_journal() -> Iterator[None]:
    """Replace the database's error if the journal's tables are missing.

    :raises JournalMissing: the tables are missing.
    """
    try:
        yield
    except (OperationalError, ProgrammingError) as exc:
        tables = connections[DEFAULT_DB_ALIAS].introspection.table_names()
        if OperationScript._meta.db_table in tables:
            raise
        raise JournalMissing(
            f"The global database ({DEFAULT_DB_ALIAS!r}) has no journal of operations yet. Make it"
            " with 'manage.py migrate sharded_orm'."
        ) from exc


# ##### Scripts, which many steps share #####


class Scripts:
    """Contents that a run stores once for many steps, by key. Thread-safe; no cache in memory.

    They are deleted when a run finishes and its kind and subject have no open step.
    """

    def get(self, run: JournalRun | int, key: str) -> dict[str, Any] | None:
        """The content of ``key`` in a run; None if there is none.

        The position of a carried step names the earlier run that has its script.
        """
        return (
            OperationScript.objects.using(DEFAULT_DB_ALIAS)
            .filter(run_id=_run_id(run), key=key)
            .values_list("content", flat=True)
            .first()
        )

    def put(self, run: JournalRun | int, key: str, content: dict[str, Any]) -> dict[str, Any]:
        """Store ``content`` and return the stored content: if two threads store, the first wins."""
        script = OperationScript(run_id=_run_id(run), key=key, content=content)
        OperationScript.objects.using(DEFAULT_DB_ALIAS).bulk_create([script], ignore_conflicts=True)
        stored = self.get(run, key)
        assert stored is not None
        return stored


def _run_id(run: JournalRun | int) -> int:
    return run if isinstance(run, int) else run.id


# ##### Status #####


def open_steps(kind: str, subject: str) -> QuerySet[OperationStep]:
    """Steps that some run began and no run has ended: interrupted, failed or unclear."""
    return OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(
        run__kind=kind, run__subject=subject, state__in=LEFT
    )


class RunStatus:
    """A run as other processes see it."""

    def __init__(self, row: Any) -> None:
        self.id: int = row.pk
        self.kind: str = row.kind
        self.subject: str = row.subject
        self.arguments: dict[str, Any] = row.arguments
        self.held = leases.is_held(row)
        #: "running" only while a process holds the run.
        self.state: str = "broken off" if row.unfinished and not self.held else row.state
        self.error: str = row.error
        self.holder: str = f"{row.user}@{row.host} (process {row.pid})"
        self.silent: timedelta | None = row.silent
        self.started_at: datetime = row.started_at
        self.finished_at: datetime | None = row.finished_at

    def by_state(self) -> dict[str, int]:
        return _by_state(OperationStep.objects.using(DEFAULT_DB_ALIAS).filter(run_id=self.id))


def in_batches(rows: QuerySet[OperationStep]) -> Iterator[OperationStep]:
    """Steps ordered by alias and run, read in batches: MySQL's driver would hold all in memory."""
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
    """The latest run; None if there was none. One query.

    :raises JournalMissing: the tables do not exist.
    """
    with require_journal():
        row = (
            leases.with_silence(leases.runs())
            .filter(kind=kind, subject=subject)
            .order_by("-pk")
            .first()
        )
    return None if row is None else RunStatus(row)


def one_line(exc: BaseException) -> str:
    """An exception in one line, as reports show it."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def _by_state(rows: QuerySet[OperationStep]) -> dict[str, int]:
    counts = rows.values_list("state").annotate(number=Count("pk")).order_by("state")
    return dict(counts)
