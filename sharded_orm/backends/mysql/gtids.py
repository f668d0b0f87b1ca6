"""Positions of MariaDB's replication: lists of GTIDs (global transaction ids), one per replication
domain (``0-1-15,1-2-7``).
"""

from __future__ import annotations


def positions(text: str) -> dict[int, tuple[int, int]]:
    """Parse a replication position: a list of GTIDs, one per replication domain, such as
    ``0-1-15,1-2-7``.

    Return a dict: domain -> (server id, sequence number) of the domain's last event.
    """
    parts = (part.strip().split("-") for part in text.split(",") if part.strip())
    return {int(domain): (int(server), int(number)) for domain, server, number in parts}


def missing(wanted: str, have: str) -> str:
    """Return those GTIDs of the position ``wanted`` that a server at the position ``have`` has not
    reached.

    A position is a list of GTIDs, one per replication domain. The result is a text like ``wanted``;
    "" if the server has reached all of them.
    """
    reached = positions(have)
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (server, number) in sorted(positions(wanted).items())
        if reached.get(domain, (0, 0))[1] < number
    )
