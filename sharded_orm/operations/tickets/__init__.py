"""Create, show, check and repair the sequences of the ticket servers.

Ticket servers hand out ids. A *sequence* generates the ids of one or more models. Each sequence
exists on all servers, and each server hands out its own share of the ids. The *form* of a sequence
is the kind of SQL statement with which the sequence makes its next id.
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
