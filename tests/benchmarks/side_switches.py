"""Times what writers notice of a shard that changes the active side of its pair of servers, and of a promotion.

:func:`side_switches` starts two servers that flush each commit and replicate from each other. A process
switches a shard to and fro, and processes write. Before, replicas are promoted in the same way. All times come from the machine's monotonic clock,
which the processes share.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence

from tests.benchmarks.moves import milliseconds, percentile, percentiles
from tests.benchmarks.ordered_process import OrderedProcess, obey
from tests.benchmarks.report import Line
from tests.benchmarks.shard_moves import (
    DURABLE,
    GROUP,
    STALL,
    WRITERS,
    Orders,
    Stall,
    configure,
    promotions,
    settings_of,
    stall,
)
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds
from tests.integration.side_switches.site import pair_of_servers
from tests.services import mariadb


def side_switches(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Promote a replica, and switch a shard to and fro, while writers are timed."""
    by_promotions = promotions(max(2, rounds.count // 8 * 2))
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(pair_of_servers(**DURABLE))
        (other,) = stack.enter_context(mariadb.servers(1, **DURABLE))
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
        # In the first two, the processes import modules and connect.
        switches = [
            stall(operator, writers, "switch", "first" if number % 2 else "second")
            for number in range(2 + count)
        ][2:]
        for writer in writers:
            writer.ask("stop")
        yield from _lines(switches, by_promotions)


def _lines(switches: Sequence[Stall], by_promotions: Sequence[Stall]) -> Iterator[Line]:
    paused = [each.paused for each in switches]
    yield Line(
        f"longest write that meets the pause of a switch of sides; {WRITERS} writers",
        f"the pause of a promotion: {percentiles([each.paused for each in by_promotions])}",
        percentiles(paused),
        f"p99 <= {milliseconds(STALL)}",
        percentile(paused) <= STALL,
        f"{len(switches)} switches, {len(by_promotions)} promotions; pause as the commands report it:"
        f" {percentiles([each.pause for each in switches])};"
        f" promotion {percentiles([each.pause for each in by_promotions])}",
    )
    yield Line(
        "longest write in the whole time of a switch of sides",
        f"in the same time without a switch: {percentiles([each.still for each in switches])}",
        percentiles([each.during for each in switches]),
        "",
        None,
        f"stalls of the disk are in both; in the time of a promotion:"
        f" {percentiles([each.during for each in by_promotions])}",
    )


# ##### The children #####


class SwitchOrders(Orders):
    """The orders of the parent; each is a method."""

    def make_pair(self) -> None:
        """Publish a topology whose shard is on the pair, and fence its passive side."""
        from sharded_orm.operations import topology
        from sharded_orm.operations.pairs import switch_runner
        from sharded_orm.topology.document import Document

        def edit(document: Document) -> Document:
            content = document.content()
            entry = {"range": [0, 0], "pair": ["first", "second"], "active": "first"}
            content["groups"][GROUP]["RANGES"] = [entry]
            return Document.from_content(content)

        topology.change(edit)
        switch_runner.fence_passive_sides(GROUP, [0])

    def switch(self, node: str) -> tuple[float, float, float, float]:
        """Make ``node`` the active side.

        Return when that began and ended, the pause, and when the topology was published.
        """
        from sharded_orm.operations.pairs import switch_runner

        began = time.monotonic()
        report = switch_runner.switch_sides(GROUP, [0], to_side=node)
        assert report.ok and report.switched, report
        return began, time.monotonic(), max(report.pauses), self.published()


def main(settings: str, role: str) -> None:
    # The library lets only this command begin without a topology.
    sys.argv = ["manage.py", "topology" if role == "publisher" else role]
    configure(json.loads(settings))
    obey(SwitchOrders())


if __name__ == "__main__":
    main(*sys.argv[1:])
