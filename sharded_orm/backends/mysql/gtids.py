"""Positions of MariaDB's replication: lists of GTIDs (global transaction ids), one per replication
domain (``0-1-15,1-2-7``).
"""

from __future__ import annotations


def positions(text: str) -> dict[int, tuple[int, int]]:
    """Parse a replication position, such as ``0-1-15,1-2-7``: one GTID for each replication domain.

    Return a dict that maps each domain to a pair (server id, sequence number). For this example:
    ``{0: (1, 15), 1: (2, 7)}``.
    """
    parts = (part.strip().split("-") for part in text.split(",") if part.strip())
    return {int(domain): (int(server), int(number)) for domain, server, number in parts}


def missing(wanted: str, have: str) -> str:
    """Return which GTIDs of ``wanted`` a server at the position ``have`` has not reached yet.

    Both arguments are positions such as ``0-1-15,1-2-7``, with one GTID for each replication
    domain. The result has the same form. It is "" if the server has reached all GTIDs of
    ``wanted``.
    """
    reached = positions(have)
    return ",".join(
        f"{domain}-{server}-{number}"
        for domain, (server, number) in sorted(positions(wanted).items())
        if reached.get(domain, (0, 0))[1] < number
    )
