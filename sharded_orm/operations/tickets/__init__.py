"""Create, show, check and repair the sequences of the ticket servers.

Ticket servers hand out ids. A *sequence* makes the ids of one or more models. Each sequence exists
on all servers, and each server hands out its share of the ids: for example, the first server the
odd ids, and the second the even ids. The *form* of a sequence is the kind of SQL statement that
makes the next id, such as ``update``.
"""

from __future__ import annotations

from sharded_orm.operations.tickets.creation import Begun, TestSequences, begin, create
from sharded_orm.operations.tickets.largest_ids import declared_sequences
from sharded_orm.operations.tickets.repair import Advanced, Progress, Verified, advance, verify
from sharded_orm.operations.tickets.status import (
    SequenceStatus,
    ServerStatus,
    TicketStatus,
    missing_sequences,
    status,
)

__all__ = [
    "Advanced",
    "Begun",
    "Progress",
    "SequenceStatus",
    "ServerStatus",
    "TestSequences",
    "TicketStatus",
    "Verified",
    "advance",
    "begin",
    "create",
    "declared_sequences",
    "missing_sequences",
    "status",
    "verify",
]
