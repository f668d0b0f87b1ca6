"""The right to work on one run: held by one process at a time, and told by signs of life.

Invariant: whoever writes for a run names the token in the very statement that writes, so
a process that was silent for too long (stopped, swapped out, cut off) writes nothing after
another one took over.
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
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet
from django.db.models.functions import Now

from sharded_orm.exceptions import LeaseLost, OperationHeld
from sharded_orm.models.tables.journal import OperationRun

logger = logging.getLogger("sharded_orm.operations")

#: Seconds between two signs of life, and after how many without one a run may be taken over.
INTERVAL, EXPIRES = 5.0, 30.0


class DatabaseClock(Now):
    """The clock of the database, in UTC: those of several hosts need not agree."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, Any]:
        # Overrides Now.as_mysql: the session's time zone may have a summer time.
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


def runs() -> QuerySet[OperationRun]:
    return OperationRun.objects.using(DEFAULT_DB_ALIAS)


class Lease:
    """A lease that was taken. :meth:`check` is thread-safe and asks no database."""

    def __init__(self, run_id: int, token: str) -> None:
        self.run_id = run_id
        self.token = token
        self._ended = threading.Event()
        self._lost = False
        self._renewed = time.monotonic()
        self._thread = threading.Thread(
            target=self._give_signs, name=f"sharded_orm run {run_id}", daemon=True
        )

    def held(self) -> QuerySet[OperationRun]:
        """The run's row, while this process holds it; none afterwards."""
        return runs().filter(pk=self.run_id, token=self.token)

    def check(self) -> None:
        """:raises LeaseLost: another process may have the run by now."""
        if self._lost or time.monotonic() - self._renewed > EXPIRES:
            raise self.lost()

    def lost(self) -> LeaseLost:
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
                began = time.monotonic()
                try:
                    if not self.held().update(signs=F("signs") + 1, alive_at=DatabaseClock()):
                        self._lost = True
                        return
                except Error as exc:
                    # The next one may come through; check() counts the seconds.
                    logger.warning("run %d gives no sign of life: %s", self.run_id, exc)
                    connections[DEFAULT_DB_ALIAS].close()
                else:
                    self._renewed = began
        finally:
            connections.close_all()

    def release(self) -> None:
        """Let others go on at once. Never raises: an unreachable database lets it expire."""
        self._ended.set()
        self._thread.join(INTERVAL)  # Not for ever: its database may not answer.
        try:
            self.held().update(token="", alive_at=None)
        except Error as exc:
            logger.warning("run %d stays held until it expires: %s", self.run_id, exc)


def take(kind: str, subject: str, arguments: dict[str, Any]) -> tuple[Lease, bool]:
    """Take the unfinished run of ``kind`` and ``subject``, or begin one.

    :returns: the lease, and whether the run was begun by somebody else.
    :raises OperationHeld: it is held by a process that lives, or may.

    Two or three statements, each committed on its own.
    """
    for _ in range(10):
        token = secrets.token_hex(16)
        row = with_silence(runs()).filter(kind=kind, subject=subject, unfinished=True).first()
        mine = {"token": token, "alive_at": DatabaseClock(), **_who()}
        if row is None:
            try:
                with transaction.atomic(using=DEFAULT_DB_ALIAS):
                    row = runs().create(
                        kind=kind, subject=subject, arguments=arguments, unfinished=True, **mine
                    )
            except IntegrityError:
                continue  # Somebody began it just now.
            return Lease(row.pk, token), False
        if not _is_free(row):
            raise _held(row)
        # Whoever lives has given a sign since, and whoever took it over has another token.
        if runs().filter(pk=row.pk, token=row.token, signs=row.signs, unfinished=True).update(
            signs=F("signs") + 1, state="running", **mine
        ):  # fmt: skip
            return Lease(row.pk, token), True
    raise OperationHeld(
        f"The operation {kind!r} on {subject!r} is taken by one process after the other; try again."
    )


def with_silence(rows: QuerySet[OperationRun]) -> QuerySet[OperationRun]:
    """``rows`` with ``silent``, the time since the last sign of life; None where nobody holds."""
    since = DatabaseClock() - F("alive_at")
    return rows.annotate(silent=ExpressionWrapper(since, output_field=DurationField()))


def is_held(row: Any) -> bool:
    """Whether a process works on the run; ``row`` comes from :func:`with_silence`."""
    return bool(row.token) and not _is_free(row)


def _is_free(row: Any) -> bool:
    if not row.token or row.silent is None or row.silent > timedelta(seconds=EXPIRES):
        return True
    return bool(row.machine == _machine()) and not _lives(row.pid)


def _held(row: Any) -> OperationHeld:
    silent = max(row.silent.total_seconds(), 0)
    return OperationHeld(
        f"The operation {row.kind!r} on {row.subject!r} is run {row.pk}, held by"
        f" {row.user}@{row.host} (process {row.pid}); its last sign of life is {silent:.0f} s old."
        f" Wait until it ends, or stop that process. If it is dead already, run this again when it"
        f" has been silent for {EXPIRES:.0f} s."
    )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # It is another user's.
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # After its name: Z for one that has ended, and that nobody has waited for.
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def _who() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # An account without a name, as in containers.
    return {
        "user": user[:64],
        "host": socket.gethostname()[:255],
        "machine": _machine(),
        "pid": os.getpid(),
    }


def _machine() -> str:
    """What is the same for processes whose ids mean the same; unique to this one if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # Containers of one host number their processes each on their own.
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"[:128]
    except OSError:
        return f"unknown {secrets.token_hex(16)}"
