"""Runs the benchmarks: ``python -m tests.benchmarks [--backend NAME] [--only NAME] [--rounds N] [--quick]``.

On MariaDB, it uses the first server of ``SHARDED_ORM_TEST_MYSQL`` (``python -m tests.services.mariadb --
COMMAND``) or starts a private one. On PostgreSQL, it starts a private one. The exit code says whether it
ran, not how fast.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

from tests.benchmarks.database import DATABASES
from tests.benchmarks.progress import tell
from tests.benchmarks.report import Line, show
from tests.benchmarks.site import Site, configure, new_prefix
from tests.benchmarks.timing import Rounds

Subject = Callable[[Site, Rounds], Iterator[Line]]


def subjects() -> dict[str, Subject]:
    """Return all subjects in the order of the table. Imports models: set Django up before."""
    from tests.benchmarks import (
        balance,
        connections,
        demo,
        entities,
        entity_index,
        lookups,
        migrate,
        mirrors,
        moves,
        objects,
        pair_throughput,
        plans,
        reads,
        rolling,
        scatter,
        session_recycling,
        shapes,
        shard_moves,
        side_switches,
        signals,
        steps,
        tickets,
        topology,
        two_phase,
        writes,
    )
    from tests.benchmarks.cache.run import cached
    from tests.benchmarks.made_ids.run import made_ids

    return {
        "get": reads.get_staying,
        "alternating": reads.get_alternating,
        "filter": reads.filter_page,
        "plans": plans.reads_by_plan,
        "shapes": shapes.first_uses,
        "steps": steps.steps_of_get,
        "bulk_create": writes.bulk_create,
        "lookups": lookups.reads_and_inserts,
        "scatter": scatter.top_rows,
        "update": writes.atomic_update,
        "save": writes.save,
        "signals": signals.request_signals,
        "connections": connections.connections_held,
        "tickets": tickets.tickets,
        "cache": cached,
        "demo": demo.pages,
        "migrations": migrate.migrations,
        "topology": topology.topology_change,
        "moves": moves.key_moves,
        "beside_moves": moves.beside_moves,
        "shard_moves": shard_moves.shard_moves,
        "side_switches": side_switches.side_switches,
        "rolling": rolling.rolling,
        "pairs": pair_throughput.pair_throughput,
        "balance": balance.balance_plan,
        "recycling": session_recycling.session_recycling,
        "mirrors": mirrors.mirrors,
        "entities": entities.entities,
        "entity_index": entity_index.entity_index,
        "two_phase": two_phase.two_phase_commit,
        "objects": objects.objects,
        "made_ids": made_ids,
    }


NAMES = (
    "get", "alternating", "filter", "plans", "shapes", "steps", "bulk_create", "lookups", "scatter", "update", "save", "signals", "connections",
    "tickets", "cache", "demo", "migrations", "topology", "moves", "beside_moves", "shard_moves", "side_switches", "rolling",
    "pairs",
    "balance", "recycling",
    "mirrors",
    "entities",
    "entity_index",
    "two_phase",
    "objects",
)  # fmt: skip
#: Subjects that are measured on PostgreSQL; "recycling" starts a server of PostgreSQL in any case.
ON_POSTGRESQL = (
    "get", "alternating", "filter", "plans", "shapes", "steps", "bulk_create", "scatter", "update", "save", "signals", "migrations",
    "recycling",
    "made_ids",
)  # fmt: skip

#: Subjects with servers and shards of their own, for which the shards of the site are not made.
WITH_OWN_SITE = frozenset({"entities", "entity_index", "objects"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--backend", choices=DATABASES, default="mariadb", help="default: %(default)s"
    )
    parser.add_argument("--only", action="append", metavar="NAME",
                        help=f"one of {', '.join(NAMES)}; may be repeated. On PostgreSQL there are"
                             f" {', '.join(ON_POSTGRESQL)}.")  # fmt: skip
    parser.add_argument("--rounds", type=int, metavar="N", help="turns per figure (default 40)")
    parser.add_argument("--quick", action="store_true", help="rough figures in some minutes")
    options = parser.parse_args()
    names = ON_POSTGRESQL if options.backend == "postgresql" else NAMES
    for name in options.only or ():
        if name not in names:
            parser.error(f"--only {name}: on {options.backend} there are {', '.join(names)}")
    rounds = Rounds(options.rounds or (8 if options.quick else 40), 0.2 if options.quick else 1.0)
    with contextlib.ExitStack() as stack:
        database = DATABASES[options.backend]
        address = stack.enter_context(database.server())
        site = Site(database, address, new_prefix(), 64 if options.quick else 512)
        configure(database, address, site.prefix, site.shards)
        print(show(run(site, rounds, options.only or names)))


def run(site: Site, rounds: Rounds, names: list[str] | tuple[str, ...]) -> list[Line]:
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        if not WITH_OWN_SITE.issuperset(names):
            tell(f"making {site.shards} shards")
            stack.enter_context(site.made())
        for name, subject in subjects().items():
            if name in names:
                tell(name)
                lines += subject(site, rounds)
    tell("done")
    return lines


if __name__ == "__main__":
    main()
