"""Read and check ``SHARDED_ORM["TICKET_OPTIONS"]``: how to take ids from the ticket servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharded_orm.conf.values import seconds, unknown_keys

#: The largest number of ids that one request may take from a ticket server.
MAX_TICKETS = 1_000_000
KEYS = {"TIMEOUT", "BACKOFF", "BLOCK_SIZE", "PARTNER_DOWN"}


@dataclass(frozen=True)
class TicketOptions:
    """The values of ``SHARDED_ORM["TICKET_OPTIONS"]``."""

    #: The longest time in seconds that a caller waits for an id. Each ticket server gets an equal
    #: part of this time.
    timeout: float = 2.0
    #: Seconds for which a ticket server is not called after a failure.
    backoff: float = 5.0
    #: The number of ids that a process takes from a ticket server in one request. The process uses
    #: one of these ids and keeps the others for later. With 1, it takes no id in advance.
    block_size: int = 1
    #: What to do if the partner of a ticket server does not answer. The partner is the next server
    #: in ``TICKETS``, and stores the highest id that the ticket server has handed out. With
    #: ``"refuse"``, no id is taken from the ticket server. With ``"proceed"``, ids are taken and a
    #: warning is logged.
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
