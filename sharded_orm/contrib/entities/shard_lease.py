"""Leases of cleaners, which prevent double work. Two cleaners of the same shard would do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.lease import Lease

KIND = "entities clean"


@contextmanager
def leased(subject: str) -> Iterator[Lease]:
    """Return a context manager during which no other cleaner works on ``subject``.

    :raises OperationHeld: another cleaner works on it.
    """
    lease, _ = journal.take_lease(KIND, subject, {})
    lease.start()
    try:
        yield lease
    finally:
        try:
            # The lease is a row of the journal of operations. It is deleted, because no work has to
            # be resumed.
            lease.own_row().delete()
        finally:
            lease.release()
