"""Locks on a schema, with which the sessions of moves exclude each other. A move copies the rows of
a key or of a whole shard to another node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import md5
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.move_locks import TABLES
from sharded_orm.backends.postgresql.lock_waits import PostgreSQLLockWaits, is_lock_wait

# After end_holders() has ended a session, it waits at most this many seconds until the server has
# rolled back the session's transaction.
_ROLLED_BACK_WITHIN: Final = 60
# The query for the sessions that hold an advisory lock. The lock's number has 64 bits, and pg_locks
# shows its upper and lower half in two columns.
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
    """Hold the lock for ``purpose`` on ``schema`` during the ``with`` block.

    No other session can hold it meanwhile. If the session ends, the server first rolls back its
    transaction, and only then releases the lock.

    :param run: runs SQL with parameters in the session, which is in autocommit, and returns rows.
    :param patience: seconds to wait if another session holds the lock.
    :param busy: what the other session has done while it held the lock, such as "changed tables or
        triggers". For the error message.
    :raises django.db.OperationalError: another session held the lock for more than ``patience``
        seconds.
    """
    key = advisory_key(schema, purpose)
    try:
        with PostgreSQLLockWaits(run).transaction(patience):
            # The lock belongs to the session, so the session still holds it after the end of this
            # transaction. The transaction only limits how long the statement waits for the lock.
            run("SELECT pg_catalog.pg_advisory_lock(%s)", key)
    except OperationalError as exc:
        if not is_lock_wait(exc):
            raise
        pids = [pid for (pid,) in run(_HOLDERS, *_halves(key))]
        holder = ", ".join(map(str, pids)) or "which has ended"
        raise OperationalError(
            f"Another session ({holder}) has {busy} on the schema {schema!r} for {patience:.0f} s: it"
            " hangs, or was paused. End it by --kill of 'manage.py keys repair' or 'shards move --repair',"
            f" or by SELECT pg_terminate_backend({holder}), and try again."
        ) from exc
    try:
        yield
    finally:
        run("SELECT pg_catalog.pg_advisory_unlock(%s)", key)


def take_for_good(run: Callable[..., Any], schema: str, purpose: str) -> None:
    """Take the lock for ``purpose`` and keep it until the session ends. While the session holds the
    lock, :func:`end_holders` can find the session and end it.
    """
    run("SELECT pg_catalog.pg_try_advisory_lock(%s)", advisory_key(schema, purpose))


def end_holders(run: Callable[..., Any], schema: str, purpose: str) -> int:
    """End the other sessions that hold the lock for ``purpose`` on ``schema``, and wait for their
    end.

    The server rolls back their transactions. Only sessions of this library hold this lock, so no
    session of another program is ended.

    :return: how many sessions were ended.
    :raises django.db.DatabaseError: the account may not end the sessions.
    """
    ended = run(
        "SELECT pg_catalog.pg_terminate_backend(pid, %s) FROM pg_catalog.pg_stat_activity WHERE pid IN"
        f" ({_HOLDERS}) AND pid <> pg_catalog.pg_backend_pid()",
        _ROLLED_BACK_WITHIN * 1000,
        *_halves(advisory_key(schema, purpose)),
    )
    return sum(has_ended for (has_ended,) in ended)


def tables_lock(
    run: Callable[..., Any], schema: str, patience: float
) -> AbstractContextManager[None]:
    """Hold a lock on ``schema`` during the ``with`` block, so that no other move changes its tables
    or triggers.

    :param run: runs SQL with parameters in the session, which is in autocommit, and returns rows.
    :param patience: seconds to wait if another session holds the lock.
    :raises django.db.OperationalError: another session held the lock for more than ``patience``
        seconds.
    """
    return capture_lock(run, schema, TABLES, patience, "changed tables or triggers")


@contextmanager
def creation(run: Callable[..., Any], schema: str) -> Iterator[None]:
    """Run a ``with`` block in a transaction that creates tables in ``schema``. Other sessions that
    call this function wait until the transaction ends.

    If two sessions send the same CREATE TABLE IF NOT EXISTS at the same time, one may get an error.
    The lock prevents that.
    """
    with PostgreSQLLockWaits(run).transaction():
        run("SELECT pg_catalog.pg_advisory_xact_lock(%s)", advisory_key(schema, "creation"))
        yield


def advisory_key(schema: str, purpose: str) -> int:
    """Return the number of the advisory lock for ``purpose`` on ``schema``.

    All schemas of a database share the numbers of locks. So the number is made from the name of the
    schema, too.
    """
    text = f"sharded_orm_capture:{schema}:{purpose}"
    digest = md5(text.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], signed=True)


def _halves(key: int) -> tuple[int, int]:
    return (key >> 32) & 0xFFFF_FFFF, key & 0xFFFF_FFFF
