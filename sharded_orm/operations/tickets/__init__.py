"""Sequences of the ticket servers: begin, look at, check against the rows, repair."""

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
