"""Counts the writes of a pair of servers whose shards are active half on each side, or all on one side.

:func:`pair_throughput` starts two servers that flush each commit and replicate from each other. A process
switches the shards, and processes write as fast as they can.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.ordered_process import OrderedProcess, obey
from tests.benchmarks.report import Line
from tests.benchmarks.shard_moves import GROUP, WRITERS, Orders, configure, settings_of
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds
from tests.integration.side_switches.site import pair_of_servers
from tests.services import mariadb
from tests.services.replication import MasterPair

SHARDS, ROWS = 8, 1000
#: Seconds of one measurement.
SECONDS = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")

#: Writes per second, and how many cores the two servers have used.
Throughput = tuple[float, float]


def pair_throughput(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Write to a pair half and half, and with one active side, in turns."""
    with contextlib.ExitStack() as stack:
        durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
        pair = stack.enter_context(pair_of_servers(**durable))
        (other,) = stack.enter_context(mariadb.servers(1, **durable))
        content = json.dumps(settings_of(pair, other.address, new_prefix()))

        def process(role: str) -> OrderedProcess:
            return stack.enter_context(OrderedProcess(__name__, content, role))

        process("publisher").ask("publish_pair")
        operator = process("operator")
        operator.ask("create_shards")
        writers = [process("writer") for _ in range(WRITERS)]
        half: list[Throughput] = []
        one: list[Throughput] = []
        for _ in range(max(2, rounds.count // 8)):
            for results, order in ((half, "balance"), (one, "leave_second")):
                operator.ask(order)
                _measure(pair, writers, 0.2)  # connects
                pair.settle()
                results.append(_measure(pair, writers, max(0.5, SECONDS * rounds.scale)))
                pair.settle()
        yield _line(half, one)


def _measure(pair: MasterPair, writers: Sequence[OrderedProcess], seconds: float) -> Throughput:
    began, processor = time.monotonic(), _processor_seconds(pair)
    for writer in writers:
        writer.send("write_for", seconds)
    writes = sum(writer.receive() for writer in writers)
    # The passive sides must have the writes, too.
    pair.settle()
    elapsed = time.monotonic() - began
    return writes / elapsed, (_processor_seconds(pair) - processor) / elapsed


def _processor_seconds(pair: MasterPair) -> float:
    fields = [
        Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        for server in (pair.first, pair.second)
    ]
    # The times in user mode and in the kernel.
    return sum(int(each[11]) + int(each[12]) for each in fields) / _TICKS


def _line(half: Sequence[Throughput], one: Sequence[Throughput]) -> Line:
    (writes, cores), (other_writes, other_cores) = (
        tuple(map(median, zip(*results, strict=True))) for results in (half, one)
    )
    return Line(
        f"writes of a pair whose shards are active half on each side; {WRITERS} writers",
        "all active on one side",
        f"{writes / other_writes:.2f}x as many",
        detail=f"{writes:,.0f} and {other_writes:,.0f} writes a second, replication included; of"
        f" {os.cpu_count()} cores, which the writers use as well, the servers have used"
        f" {cores:.1f} and {other_cores:.1f}",
    )


# ##### The children #####


class ThroughputOrders(Orders):
    """The orders of the parent; each is a method."""

    def publish_pair(self) -> None:
        """Publish a topology whose shards are on the pair, and active on its first side."""
        self._publish({"range": [0, SHARDS - 1], "pair": ["first", "second"], "active": "first"})

    def create_shards(self) -> None:
        """Create all shards with rows, and fence their passive sides."""
        from django.core.management import call_command
        from django.db import connections
        from django.utils import timezone

        from sharded_orm import runtime
        from sharded_orm.operations.pairs import switch_runner

        call_command("migrate", database="default", verbosity=0, interactive=False)
        for shard in runtime.group(GROUP).shards():
            connection: Any = connections[shard.alias]
            connection.create_shard_database()
            with connection.schema_editor() as editor:
                editor.create_model(self._model)
            self._model.objects.using(shard.alias).bulk_create(
                self._model(
                    photo_id=pk,
                    user_id=shard.number,
                    title=f"Photo number {pk}",
                    posted_at=timezone.now(),
                    stars=0,
                )
                for pk in range(1, ROWS + 1)
            )
        switch_runner.fence_passive_sides(GROUP, range(SHARDS))

    def balance(self) -> None:
        from sharded_orm.operations.pairs import side_balance

        assert all(report.ok for report in side_balance.balance_sides(GROUP))

    def leave_second(self) -> None:
        from sharded_orm.operations.pairs import switch_runner

        assert switch_runner.switch_sides(GROUP, None, all_from="second").ok

    def write_for(self, seconds: float) -> int:
        """Write rows for so many seconds. Return their number."""
        from django.db.models import F

        end = time.monotonic() + seconds
        writes = 0
        while time.monotonic() < end:
            user, pk = random.randrange(SHARDS), random.randrange(1, ROWS + 1)
            row = self._model.objects.filter(user_id=user, photo_id=pk)
            assert row.update(stars=F("stars") + 1) == 1
            writes += 1
        return writes


def main(settings: str, role: str) -> None:
    # The library lets only this command begin without a topology.
    sys.argv = ["manage.py", "topology" if role == "publisher" else role]
    configure(json.loads(settings))
    obey(ThroughputOrders())


if __name__ == "__main__":
    main(*sys.argv[1:])
