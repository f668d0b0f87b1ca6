"""Leases, by which a worker keeps other workers from doing the same work.

A worker can lose its lease, for example if its process stands still for longer than the lease lasts.
So the work itself must be safe if another worker begins it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.lease import Lease


@contextmanager
def leased(kind: str, subject: str) -> Iterator[Lease]:
    """Return a context manager that keeps other workers from the work of ``kind`` on ``subject``.

    :raises OperationHeld: another worker works on it.
    """
    lease, _ = journal.take_lease(kind, subject, {})
    lease.start()
    try:
        yield lease
    finally:
        try:
            # Delete the row of the lease from the journal of operations. A row that stays there
            # means that the operation must be resumed after a crash, but such work begins anew.
            lease.own_row().delete()
        finally:
            lease.release()
