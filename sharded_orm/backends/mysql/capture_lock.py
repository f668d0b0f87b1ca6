"""Locks with which the sessions of moves exclude each other on a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import md5
from typing import Any

from django.db import OperationalError


@contextmanager
def capture_lock(
    run: Callable[..., Any], purpose: str, patience: float, busy: str
) -> Iterator[None]:
    """Within the ``with`` block, no other session holds the lock for ``purpose`` on this schema.

    The lock ends with the session, after its transaction was rolled back.

    :param run: runs SQL with parameters in the session, and returns rows.
    :param patience: seconds to wait for another session.
    :param busy: what another session does.
    :raises django.db.OperationalError: it took longer.
    """
    ((schema,),) = run("SELECT DATABASE()")
    purpose = f"sharded_orm_capture:{schema}:{purpose}"
    name = md5(purpose.encode(), usedforsecurity=False).hexdigest()
    ((is_taken,),) = run("SELECT GET_LOCK(%s, %s)", name, patience)
    if not is_taken:
        ((holder,),) = run("SELECT IS_USED_LOCK(%s)", name)
        raise OperationalError(
            f"Another session ({holder}) has {busy} on the database {schema!r} for {patience:.0f} s: it hangs, or"
            f" was paused. End it (KILL {holder}), and try again."
        )
    try:
        yield
    finally:
        run("DO RELEASE_LOCK(%s)", name)


def tables_lock(run: Callable[..., Any], patience: float) -> AbstractContextManager[None]:
    """A context manager: no other session of moves creates, drops or renames tables or triggers.

    The parameters and errors are those of :func:`capture_lock`.
    """
    return capture_lock(run, "tables", patience, "changed tables or triggers")
