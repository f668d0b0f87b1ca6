"""The lease of a run: it lets only one process at a time work on a long operation.

A *run* is one execution of an operation, and a row of the journal. The process that holds the lease
writes signs of life into this row. If it has written none for 30 seconds, for example because it
was killed or cut off, another process may take over the run. A process on the same machine need not
wait if it sees that the holder has ended.

The first process may still be alive, and continue later. So each lease has a token in the run's
row, and each statement that writes for the run checks this token. A process that takes over the run
writes a new token. From then on, the first process can write nothing more for the run.
"""

from __future__ import annotations

import getpass
import logging
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet

from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import LeaseLost, OperationHeld
from sharded_orm.models.tables.journal import OperationRun

logger = logging.getLogger("sharded_orm.operations")

#: A process that holds a run writes a sign of life every INTERVAL seconds. If it has written none
#: for EXPIRES seconds, another process may take over the run.
INTERVAL, EXPIRES = 5.0, 30.0


def runs() -> QuerySet[OperationRun]:
    return OperationRun.objects.using(DEFAULT_DB_ALIAS)


class Lease:
    """The right of this process to work on one run.

    It is kept by a background thread, which writes a sign of life into the database every five
    seconds.
    """

    def __init__(self, run_id: int, token: str) -> None:
        self.run_id = run_id
        self.token = token
        self._ended = threading.Event()
        self._lost = False
        self._renewed = time.monotonic()
        self._thread = threading.Thread(
            target=self._give_signs, name=f"sharded_orm run {run_id}", daemon=True
        )

    def own_row(self) -> QuerySet[OperationRun]:
        """Return a query set with the run's row; empty if another process has taken over the run."""
        return runs().filter(pk=self.run_id, token=self.token)

    def check(self) -> None:
        """Check that this process still holds the run. Thread-safe. Sends no query.

        :raises LeaseLost: another process may hold the run by now.
        """
        if self._lost or time.monotonic() - self._renewed > EXPIRES:
            raise self.lost_error()

    def lost_error(self) -> LeaseLost:
        self._lost = True
        return LeaseLost(
            f"Run {self.run_id} was taken over by another process, or may be: this one could give"
            f" no sign of life for {EXPIRES:.0f} seconds. It stops here; what is under way goes on"
            " there, or when the command is run again."
        )

    # ##### Signs of life #####

    def start(self) -> None:
        self._thread.start()

    def _give_signs(self) -> None:
        try:
            while not self._ended.wait(INTERVAL):
                sent_at = time.monotonic()
                try:
                    if not self.own_row().update(signs=F("signs") + 1, alive_at=DatabaseClock()):
                        self._lost = True
                        return
                except Error as exc:
                    # Try again after the next interval. Close the connection, because it may be
                    # broken. If no attempt succeeds for EXPIRES seconds, check() raises an error.
                    logger.warning("run %d gives no sign of life: %s", self.run_id, exc)
                    connections[DEFAULT_DB_ALIAS].close()
                else:
                    self._renewed = sent_at
        finally:
            # Call the method of the base class to close the connection. The close() of Django's
            # SQLite backend does not close a database in memory, which tests use.
            BaseDatabaseWrapper.close(connections[DEFAULT_DB_ALIAS])

    def release(self) -> None:
        """Release the run, so that another process can take it at once.

        Never raises. If the database does not answer, the lease expires by itself.
        """
        self._ended.set()
        # Wait at most INTERVAL seconds until the thread ends. It ends later if it waits for a
        # database that does not answer.
        self._thread.join(INTERVAL)
        try:
            self.own_row().update(token="", alive_at=None)
        except Error as exc:
            logger.warning("run %d stays held until it expires: %s", self.run_id, exc)


def take(kind: str, subject: str, arguments: dict[str, Any]) -> tuple[Lease, bool]:
    """Take the lease of the unfinished run of ``kind`` on ``subject``, or begin a new run.

    :returns: the lease; and True if an earlier run is resumed, False if a new run was begun.
    :raises OperationHeld: another process holds the run and is alive, or may be alive.

    Costs two or three statements. Each is committed by itself.
    """
    for _ in range(10):
        token = secrets.token_hex(16)
        row = with_silence(runs()).filter(kind=kind, subject=subject, unfinished=True).first()
        holder = {"token": token, "alive_at": DatabaseClock(), **_holder_columns()}
        if row is None:
            try:
                with transaction.atomic(using=DEFAULT_DB_ALIAS):
                    row = runs().create(
                        kind=kind, subject=subject, arguments=arguments, unfinished=True, **holder
                    )
            except IntegrityError:
                continue  # Another process has begun the run at the same moment: read its row.
            return Lease(row.pk, token), False
        if not _is_free(row):
            raise _held_error(row)
        # Take the run only if its row has not changed since it was read. If the old holder was
        # alive after all, it has incremented ``signs``. If a third process has taken the run just
        # now, it has written a different token.
        if runs().filter(pk=row.pk, token=row.token, signs=row.signs, unfinished=True).update(
            signs=F("signs") + 1, state="running", **holder
        ):  # fmt: skip
            return Lease(row.pk, token), True
    raise OperationHeld(
        f"The operation {kind!r} on {subject!r} is taken by one process after the other; try again."
    )


def with_silence(rows: QuerySet[OperationRun]) -> QuerySet[OperationRun]:
    """Annotate each run with ``silent``: the time since the last sign of life of its process.

    ``silent`` is None if no process holds the run, because the last one has released it.
    """
    since = DatabaseClock() - F("alive_at")
    return rows.annotate(silent=ExpressionWrapper(since, output_field=DurationField()))


def is_held(row: Any) -> bool:
    """Return whether a process holds the run and is alive or may be alive.

    :param row: the run's row from :func:`with_silence`.
    """
    return bool(row.token) and not _is_free(row)


def worker_kind(kind: str) -> str:
    """Return the kind under which the journal stores the workers of operation ``kind``.

    If several processes share an operation, each is a *worker*. Each worker has a row of its own
    among the runs, only to give signs of life. The row's subject begins with the subject of the
    operation; see :mod:`~sharded_orm.operations.runs.work_units`.
    """
    return f"{kind} worker"


def workers(kind: str, subject: str) -> QuerySet[OperationRun]:
    """Return the rows in which the workers of operation ``kind`` on ``subject`` give signs of life.

    A *worker* is one of several processes that share an operation. The rows of killed workers are
    included.
    """
    rows = runs().filter(kind=worker_kind(kind), subject__startswith=f"{subject[:100]} ")
    return with_silence(rows)


def _is_free(row: Any) -> bool:
    if not row.token or row.silent is None or row.silent > timedelta(seconds=EXPIRES):
        return True
    return bool(row.machine == _machine()) and not _is_alive(row.pid)


def _held_error(row: Any) -> OperationHeld:
    silent = max(row.silent.total_seconds(), 0)
    return OperationHeld(
        f"The operation {row.kind!r} on {row.subject!r} is run {row.pk}, held by"
        f" {row.user}@{row.host} (process {row.pid}); its last sign of life is {silent:.0f} s old."
        f" Wait until it ends, or stop that process. If it is dead already, run this again when it"
        f" has been silent for {EXPIRES:.0f} s."
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # The process exists, but belongs to another user, so signals to it are refused.
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The first field after the process's name is its state. Z is a zombie: the process has
            # ended, but its parent has not called wait() for it. In a container, a zombie may stay
            # for ever, because the first process may never call wait().
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def _holder_columns() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # This process's user has no name, as in some containers.
    return {
        "user": user[:64],
        "host": socket.gethostname()[:255],
        "machine": _machine(),
        "pid": os.getpid(),
    }


def _machine() -> str:
    """Return an id of the host or container in which this process runs.

    Within one host or container, each process id belongs to one process only. So a process can look
    whether another one is alive, but only if both have the same machine id. If the system does not
    provide an id, return a random id, which no other process has.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # All containers of a host have the same boot id. So add the id of the namespace of process
        # ids, which each container has for itself.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"[:128]
    except OSError:
        return f"unknown {secrets.token_hex(16)}"
