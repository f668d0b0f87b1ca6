"""Leases of cleaners. They only spare the work: two cleaners of the same shard do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.lease import Lease

KIND = "entities clean"


@contextmanager
def leased(subject: str) -> Iterator[Lease]:
    """A context manager: no other cleaner works on ``subject`` meanwhile.

    :raises OperationHeld: one does.
    """
    lease, _ = journal.take_lease(KIND, subject, {})
    lease.start()
    try:
        yield lease
    finally:
        try:
            # Nothing is to be resumed, so the run leaves no trace in the journal.
            lease.own_row().delete()
        finally:
            lease.release()
