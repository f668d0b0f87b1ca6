"""Locks on a schema, with which the sessions of moves exclude each other. A move copies the rows of
a key or of a whole shard to another node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from django.db import DatabaseError, OperationalError

from sharded_orm.backends.move_locks import TABLES

# SQL for the name of a lock, which depends on the current schema and on the purpose (the
# parameter). It is a hash, because the server limits the length of lock names.
_NAME: Final = "MD5(CONCAT('sharded_orm_capture:', DATABASE(), ':', %s))"
_NO_SUCH_SESSION: Final = 1094  # ER_NO_SUCH_THREAD

# Seconds to wait, after a session was killed, until the server has rolled back its transaction.
_ROLLED_BACK_WITHIN: Final = 60


@contextmanager
def capture_lock(
    run: Callable[..., Any], purpose: str, patience: float, busy: str
) -> Iterator[None]:
    """Hold the lock for ``purpose`` on the current schema during the ``with`` block.

    No other session can hold it meanwhile. If the session ends, the server first rolls back its
    transaction, and only then releases the lock.

    :param run: runs SQL with parameters in the session, and returns rows.
    :param patience: seconds to wait if another session holds the lock.
    :param busy: what the other session has done while it held the lock, such as "changed tables or
        triggers". For the error message.
    :raises django.db.OperationalError: another session held the lock for more than ``patience``
        seconds.
    """
    with held(run, purpose, patience) as is_taken:
        if not is_taken:
            ((holder, schema),) = run(f"SELECT IS_USED_LOCK({_NAME}), DATABASE()", purpose)
            raise OperationalError(
                f"Another session ({holder}) has {busy} on the database {schema!r} for {patience:.0f} s: it hangs, or"
                " was paused. End it by --kill of 'manage.py keys repair' or 'shards move --repair', or by"
                f" KILL {holder}, and try again."
            )
        yield


@contextmanager
def held(run: Callable[..., Any], purpose: str, patience: float) -> Iterator[bool]:
    """Hold the lock for ``purpose`` on the current schema during the ``with`` block.

    Yield True; or False if another session still holds the lock after ``patience`` seconds.
    """
    ((is_taken,),) = run(f"SELECT GET_LOCK({_NAME}, %s)", purpose, patience)
    try:
        yield bool(is_taken)
    finally:
        if is_taken:
            run(f"DO RELEASE_LOCK({_NAME})", purpose)


def query_until_free(purpose: str, seconds: float) -> str:
    """Return a query that waits until no session holds the lock for ``purpose``, for at most
    ``seconds``.

    It needs no privilege, and does not keep the lock.
    """
    name = _NAME % f"'{purpose}'"
    return f"SELECT IF(GET_LOCK({name}, {seconds:f}), RELEASE_LOCK({name}), 0)"


def take_for_good(run: Callable[..., Any], purpose: str) -> None:
    """Take the lock for ``purpose`` and keep it until the session ends.

    If this process stops working, another process can call :func:`end_holder`, which finds the
    session by this lock and kills it.
    """
    run(f"DO GET_LOCK({_NAME}, 0)", purpose)


def end_holder(run: Callable[..., Any], purpose: str) -> bool:
    """Kill the session that holds the lock for ``purpose`` on the current schema, and wait for its
    end.

    The server rolls back the transaction of that session. The lock is only held by sessions of this
    library, so no other program is hit.

    :return: False if no other session holds the lock.
    :raises django.db.DatabaseError: the account may not kill the session.
    """
    ((holder, own),) = run(f"SELECT IS_USED_LOCK({_NAME}), CONNECTION_ID()", purpose)
    if holder is None or holder == own:
        return False
    try:
        run("KILL %s", int(holder))
    except DatabaseError as exc:
        if exc.args[0] != _NO_SUCH_SESSION:
            raise
    ((is_taken,),) = run(f"SELECT GET_LOCK({_NAME}, %s)", purpose, _ROLLED_BACK_WITHIN)
    if is_taken:
        run(f"DO RELEASE_LOCK({_NAME})", purpose)
    return True


def tables_lock(run: Callable[..., Any], patience: float) -> AbstractContextManager[None]:
    """Hold a lock on the schema during the ``with`` block, so that no other move changes its tables
    or triggers.

    :param run: runs SQL with parameters in the session, and returns rows.
    :param patience: seconds to wait if another session holds the lock.
    :raises django.db.OperationalError: another session held the lock for more than ``patience``
        seconds.
    """
    return capture_lock(run, TABLES, patience, "changed tables or triggers")
