"""Leases, by which a cleaner keeps other cleaners from doing the same work.

The leases only save work. Two cleaners that work on the same shard would do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.lease import Lease

KIND = "entities clean"


@contextmanager
def leased(subject: str) -> Iterator[Lease]:
    """Return a context manager that keeps other cleaners from the work ``subject`` in its block.

    :raises OperationHeld: another cleaner works on it.
    """
    lease, _ = journal.take_lease(KIND, subject, {})
    lease.start()
    try:
        yield lease
    finally:
        try:
            # Delete the row of the lease from the journal of operations. A row that stays there
            # stands for an operation that is to be resumed after a crash, and a cleaner is not
            # resumed.
            lease.own_row().delete()
        finally:
            lease.release()
