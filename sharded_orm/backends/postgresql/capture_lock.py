"""Locks with which the sessions of moves exclude each other on a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import md5
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.postgresql.lock_waits import PostgreSQLLockWaits, is_lock_wait

# pg_locks shows the number of an advisory lock in two halves.
_HOLDERS: Final = (
    "SELECT pid FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
    " AND database = (SELECT oid FROM pg_catalog.pg_database"
    " WHERE datname = pg_catalog.current_database())"
    " AND classid::bigint = %s AND objid::bigint = %s"
)


@contextmanager
def capture_lock(
    run: Callable[..., Any], schema: str, purpose: str, patience: float, busy: str
) -> Iterator[None]:
    """Within the ``with`` block, no other session holds the lock for ``purpose`` on this schema.

    The lock ends with the session, after its transaction was rolled back.

    :param run: runs SQL with parameters in the session, which is in autocommit, and returns rows.
    :param patience: seconds to wait for another session.
    :param busy: what another session does.
    :raises django.db.OperationalError: it took longer.
    """
    key = advisory_key(schema, purpose)
    try:
        with PostgreSQLLockWaits(run).transaction(patience):
            # This lock is one of the session, not of the transaction, which limits the wait only.
            run("SELECT pg_catalog.pg_advisory_lock(%s)", key)
    except OperationalError as exc:
        if not is_lock_wait(exc):
            raise
        pids = [pid for (pid,) in run(_HOLDERS, *_halves(key))]
        holder = ", ".join(map(str, pids)) or "which has ended"
        raise OperationalError(
            f"Another session ({holder}) has {busy} on the schema {schema!r} for {patience:.0f} s: it"
            f" hangs, or was paused. End it (SELECT pg_terminate_backend({holder})), and try again."
        ) from exc
    try:
        yield
    finally:
        run("SELECT pg_catalog.pg_advisory_unlock(%s)", key)


def tables_lock(
    run: Callable[..., Any], schema: str, patience: float
) -> AbstractContextManager[None]:
    """A context manager: no other session of moves creates, drops or renames tables or triggers.

    The parameters and errors are those of :func:`capture_lock`.
    """
    return capture_lock(run, schema, "tables", patience, "changed tables or triggers")


@contextmanager
def creation(run: Callable[..., Any], schema: str) -> Iterator[None]:
    """A transaction that creates tables which other sessions may create as well.

    Otherwise, of two sessions that send CREATE TABLE IF NOT EXISTS at once, one may get an error.
    """
    with PostgreSQLLockWaits(run).transaction():
        run("SELECT pg_catalog.pg_advisory_xact_lock(%s)", advisory_key(schema, "creation"))
        yield


def advisory_key(schema: str, purpose: str) -> int:
    """Return the number of an advisory lock. The locks of all schemas of a database share the numbers."""
    text = f"sharded_orm_capture:{schema}:{purpose}"
    digest = md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], signed=True)


def _halves(key: int) -> tuple[int, int]:
    return (key >> 32) & 0xFFFF_FFFF, key & 0xFFFF_FFFF
