"""Runs the benchmarks: ``python -m tests.benchmarks [--only NAME] [--rounds N] [--quick]``.

Uses the first server of ``SHARDED_ORM_TEST_MYSQL`` (``python -m tests.services.mariadb --
COMMAND``) or starts a private one. The exit code says whether it ran, not how fast.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tests.benchmarks.report import Line, show
from tests.benchmarks.site import Site, configure, new_prefix
from tests.benchmarks.timing import Rounds
from tests.services import mariadb

Subject = Callable[[Site, Rounds], Iterator[Line]]


def subjects() -> dict[str, Subject]:
    """Return all subjects in the order of the table. Imports models: set Django up before."""
    from tests.benchmarks import (
        balance,
        connections,
        entities,
        lookups,
        migrate,
        mirrors,
        moves,
        objects,
        reads,
        scatter,
        session_recycling,
        shard_moves,
        signals,
        tickets,
        topology,
        two_phase,
        writes,
    )
    from tests.benchmarks.cache.run import cached

    return {
        "get": reads.get_staying,
        "alternating": reads.get_alternating,
        "filter": reads.filter_page,
        "bulk_create": writes.bulk_create,
        "lookups": lookups.reads_and_inserts,
        "scatter": scatter.top_rows,
        "update": writes.atomic_update,
        "signals": signals.request_signals,
        "connections": connections.connections_held,
        "tickets": tickets.tickets,
        "cache": cached,
        "migrations": migrate.migrations,
        "topology": topology.topology_change,
        "moves": moves.key_moves,
        "beside_moves": moves.beside_moves,
        "shard_moves": shard_moves.shard_moves,
        "balance": balance.balance_plan,
        "recycling": session_recycling.session_recycling,
        "mirrors": mirrors.mirrors,
        "entities": entities.entities,
        "entity_index": entities.entity_index,
        "two_phase": two_phase.two_phase_commit,
        "objects": objects.objects,
    }


NAMES = (
    "get", "alternating", "filter", "bulk_create", "lookups", "scatter", "update", "signals", "connections",
    "tickets", "cache", "migrations", "topology", "moves", "beside_moves", "shard_moves", "balance",
    "recycling",
    "mirrors",
    "entities",
    "entity_index",
    "two_phase",
    "objects",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME",
                        help=f"one of {', '.join(NAMES)}; may be repeated")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="turns per figure (default 40)")
    parser.add_argument("--quick", action="store_true", help="rough figures in some minutes")
    options = parser.parse_args()
    rounds = Rounds(options.rounds or (8 if options.quick else 40), 0.2 if options.quick else 1.0)
    with contextlib.ExitStack() as stack:
        running = mariadb.addresses_from_environment()
        if not running:
            running = [server.address for server in stack.enter_context(mariadb.servers(1))]
        site = Site(running[0], new_prefix(), 64 if options.quick else 512)
        configure(site.address, site.prefix, site.shards)
        print(show(run(site, rounds, options.only or NAMES)))


def run(site: Site, rounds: Rounds, names: list[str] | tuple[str, ...]) -> list[Line]:
    lines: list[Line] = []
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f}s {text}", file=sys.stderr, flush=True)

    progress(f"making {site.shards} shards")
    with site.made():
        for name, subject in subjects().items():
            if name in names:
                progress(name)
                lines += subject(site, rounds)
    progress("done")
    return lines


if __name__ == "__main__":
    main()
