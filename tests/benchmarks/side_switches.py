"""Times what writers notice of a shard that changes the active side of its pair of servers.

:func:`side_switches` starts two servers that flush each commit and replicate from each other. A process
switches a shard to and fro, and processes write. All times come from the machine's monotonic clock,
which the processes share.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median

from tests.benchmarks.moves import milliseconds, percentile
from tests.benchmarks.ordered_process import OrderedProcess, obey
from tests.benchmarks.report import Line
from tests.benchmarks.shard_moves import (
    GROUP,
    STALL,
    WRITERS,
    Orders,
    configure,
    settings_of,
    stall,
)
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds
from tests.integration.side_switches.site import pair_of_servers
from tests.services import mariadb


def side_switches(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Switch a shard to and fro while writers are timed."""
    with contextlib.ExitStack() as stack:
        durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
        pair = stack.enter_context(pair_of_servers(**durable))
        (other,) = stack.enter_context(mariadb.servers(1, **durable))
        settings = settings_of(pair, other.address, new_prefix())
        for node in settings["nodes"].values():
            node.pop("REPLICATION", None)  # the account, which a switch does not need
        content = json.dumps(settings)

        def process(role: str) -> OrderedProcess:
            return stack.enter_context(OrderedProcess(__name__, content, role))

        process("publisher").ask("publish", "first", "second")
        operator = process("operator")
        operator.ask("create")
        operator.ask("make_pair")
        writers = [process("writer") for _ in range(WRITERS)]
        for number, writer in enumerate(writers):
            writer.ask("start", number)
        count = max(4, rounds.count // 4 * 2)
        switches = [
            stall(operator, writers, "switch", "first" if number % 2 else "second")
            for number in range(count)
        ]
        for writer in writers:
            writer.ask("stop")
        yield _stalls(switches)


def _stalls(switches: Sequence[tuple[float, float]]) -> Line:
    stalls, pauses = zip(*switches, strict=True)
    worst = percentile(stalls)
    return Line(
        f"longest stall of a writer while a shard changes its side of a pair; {WRITERS} writers",
        "a promotion: see shard_moves",
        f"{milliseconds(median(stalls))}, p99 {milliseconds(worst)}",
        f"p99 <= {milliseconds(STALL)}",
        worst <= STALL,
        f"{len(switches)} switches; pause as the command reports it: {milliseconds(median(pauses))},"
        f" p99 {milliseconds(percentile(pauses))}",
    )


# ##### The children #####


class SwitchOrders(Orders):
    """The orders of the parent; each is a method."""

    def make_pair(self) -> None:
        """Publish a topology whose shard is on the pair, and fence its passive side."""
        from sharded_orm.operations import topology
        from sharded_orm.operations.pairs import runner
        from sharded_orm.topology.document import Document

        def edit(document: Document) -> Document:
            content = document.content()
            entry = {"range": [0, 0], "pair": ["first", "second"], "active": "first"}
            content["groups"][GROUP]["RANGES"] = [entry]
            return Document.from_content(content)

        topology.change(edit)
        runner.fence_passive_sides(GROUP, [0])

    def switch(self, node: str) -> tuple[float, float, float]:
        """Make ``node`` the active side. Return when that began and ended, and the pause."""
        from sharded_orm.operations.pairs import runner

        began = time.monotonic()
        report = runner.switch_sides(GROUP, [0], to_side=node)
        assert report.ok and report.switched, report
        return began, time.monotonic(), max(report.pauses)


def main(settings: str, role: str) -> None:
    # The library lets only this command begin without a topology.
    sys.argv = ["manage.py", "topology" if role == "publisher" else role]
    configure(json.loads(settings))
    obey(SwitchOrders())


if __name__ == "__main__":
    main(*sys.argv[1:])
