"""``SHARDED_ORM["TICKET_OPTIONS"]``: how ids are taken from the ticket servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharded_orm.conf.values import seconds, unknown_keys

#: The most ids that one request takes.
MAX_TICKETS = 1_000_000
KEYS = {"TIMEOUT", "BACKOFF", "BLOCK_SIZE", "PARTNER_DOWN"}


@dataclass(frozen=True)
class TicketOptions:
    """``SHARDED_ORM["TICKET_OPTIONS"]``."""

    #: The most seconds that a caller waits; each server has an equal share of them.
    timeout: float = 2.0
    #: Seconds for which a server that failed is left alone.
    backoff: float = 5.0
    #: Ids that a process takes at once for ``next``; 1 takes none in advance.
    block_size: int = 1
    #: If the partner, which keeps a server's high-water mark, does not answer: ``"refuse"`` takes
    #: no id from that server, ``"proceed"`` takes ids and logs a warning.
    partner_down: str = "proceed"


def parse_tickets(raw: Any, problems: list[str]) -> TicketOptions:
    default = TicketOptions()
    if not isinstance(raw, Mapping):
        problems.append(f"TICKET_OPTIONS must be a dict, not {type(raw).__name__}")
        return default
    where = "TICKET_OPTIONS: "
    problems += unknown_keys(where, raw, KEYS)
    timeout = seconds(where, "TIMEOUT", raw, default.timeout, problems)
    backoff = seconds(where, "BACKOFF", raw, default.backoff, problems)
    size = raw.get("BLOCK_SIZE", default.block_size)
    if type(size) is not int or not 1 <= size <= MAX_TICKETS:
        problems.append(f"{where}BLOCK_SIZE must be a number from 1 to {MAX_TICKETS}, not {size!r}")
    policy = raw.get("PARTNER_DOWN", default.partner_down)
    if policy not in ("proceed", "refuse"):
        problems.append(f"{where}PARTNER_DOWN must be 'proceed' or 'refuse', not {policy!r}")
    return TicketOptions(timeout, backoff, size, policy)
