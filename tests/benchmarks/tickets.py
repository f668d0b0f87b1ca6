"""Draws ids: one, many, in blocks, from many processes; with each form; and a peer."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import MySQLdb
from django.db import connections

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.operations.tickets import begin
from sharded_orm.topology.aliases import complete
from tests.benchmarks.peer import NotAvailable, Peer
from tests.benchmarks.report import Line, at_least, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare, summary
from tests.services.mariadb import Address, MariaDBServer

PROCESSES = 8
BATCH = 1000
_DEADLOCK = 1213
_SCHEMA = "benchmark_tickets"
_TABLE = "CREATE TABLE {0} (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, stub CHAR(1) NOT NULL UNIQUE) ENGINE = {0}"


def tickets(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Run on a server of its own that syncs each commit, as a ticket server must."""
    with _durable_server() as address:
        alias = _alias(address)
        yield from _one_by_one(address, alias, rounds)
        yield from _processes(alias, rounds)
        yield from _forms(address, alias, rounds)
        yield from _peer(address, alias, rounds)


@contextmanager
def _durable_server() -> Iterator[Address]:
    with MariaDBServer(innodb_flush_log_at_trx_commit="1", innodb_doublewrite="1") as server:
        cursor = MySQLdb.connect(**server.address.mysqldb()).cursor()
        cursor.execute(f"CREATE DATABASE {_SCHEMA}")
        cursor.connection.close()
        yield server.address


def _alias(address: Address) -> str:
    engine = {"ENGINE": "django.db.backends.mysql", "NAME": _SCHEMA}
    connections.settings["durable"] = complete({**engine, **address.django()})
    with TicketGenerator(["durable"]).servers[0].session(time.monotonic() + 30) as lent:
        lent.ask(lambda session: session.create_catalog(time.monotonic() + 30))
    return "durable"


def _generator(alias: str, sequence: str, form: str = "update", **options: Any) -> TicketGenerator:
    generator = TicketGenerator([alias], TicketOptions(timeout=30.0, **options))
    begin(generator.servers[0], [sequence], form=form)
    return generator


def _bare(address: Address) -> Any:
    return MySQLdb.connect(**address.mysqldb(), database=_SCHEMA, autocommit=True).cursor()


def _one_by_one(address: Address, alias: str, rounds: Rounds) -> Iterator[Line]:
    ours, blocks = _generator(alias, "ours"), _generator(alias, "blocks", block_size=BATCH)
    begin(ours.servers[0], ["bare"])
    cursor = _bare(address)
    sql = "UPDATE sharded_orm_sequence SET value = LAST_INSERT_ID(value + %s) WHERE name = 'bare'"

    def bare(count: int) -> int:
        cursor.execute(sql, [count])
        return int(cursor.lastrowid)

    yield at_most(
        1.3,
        "one ticket",
        "the bare UPDATE through mysqlclient",
        compare(lambda: ours.next("ours"), lambda: bare(1), rounds, number=200),
    )
    batches = compare(lambda: ours.take("ours", BATCH), lambda: bare(BATCH), rounds, number=200)
    yield at_most(1.2, f"a batch of {BATCH}", "the bare UPDATE through mysqlclient", batches)
    speed = BATCH / batches.ours
    yield Line(f"ids/s in batches of {BATCH}", "-", f"{speed:,.0f}", ">= 1,000,000", speed >= 1e6)
    yield at_least(
        50,
        f"{BATCH} tickets with BLOCK_SIZE {BATCH}",
        "one ticket at a time",
        compare(
            lambda: [blocks.next("blocks") for _ in range(BATCH)],
            lambda: [ours.next("ours") for _ in range(BATCH)],
            Rounds(max(3, rounds.count // 4)),
        ),
    )


@dataclass(frozen=True)
class _Drawer:
    """Draws ids in one process; a child process opens a connection of its own."""

    make: Callable[[], Callable[[], object]]

    def __call__(self, count: int, start: Any, results: Any) -> None:
        draw = self.make()
        draw()
        failed = 0
        start.wait()
        began = time.perf_counter()
        for _ in range(count):
            try:
                draw()
            except MySQLdb.OperationalError as exc:
                if exc.args[0] != _DEADLOCK:
                    raise
                failed += 1
        results.put((began, time.perf_counter(), failed))


def _in_processes(processes: int, count: int, drawer: _Drawer) -> tuple[float, int]:
    """Return the seconds per id over all processes, and how many requests a deadlock ended."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(processes), context.SimpleQueue()
    running = [
        context.Process(target=drawer, args=(count, start, results)) for _ in range(processes)
    ]
    for process in running:
        process.start()
    spans = [results.get() for _ in running]
    for process in running:
        process.join()
    seconds = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    failed = sum(failed for _, _, failed in spans)
    return seconds / max(1, processes * count - failed), failed


def _processes(alias: str, rounds: Rounds) -> Iterator[Line]:
    generator = _generator(alias, "processes")
    drawer = _Drawer(lambda: lambda: generator.next("processes"))
    count, deadlocks, pairs = rounds.of(1500), 0, []
    for _ in range(max(3, rounds.count // 8)):
        many, failed = _in_processes(PROCESSES, count, drawer)
        one, _ = _in_processes(1, count, drawer)
        pairs.append((many, one))
        deadlocks += failed
    yield at_least(2, f"{PROCESSES} processes: ids/s", "one process", summary(pairs))
    yield Line(f"deadlocks of {PROCESSES} processes", "-", f"{deadlocks}", "0", deadlocks == 0)


def _forms(address: Address, alias: str, rounds: Rounds) -> Iterator[Line]:
    """Compare REPLACE as published, on each engine, with our UPDATE; the default rests on this."""
    update = _generator(alias, "update")
    replace = _generator(alias, "replaced", "replace")
    ours = _Drawer(lambda: lambda: update.next("update"))
    cursor = _bare(address)
    for engine in ("InnoDB", "MyISAM"):
        cursor.execute(_TABLE.format(engine))
    sides = {
        "our form 'replace' (Aria)": _Drawer(lambda: lambda: replace.next("replaced")),
        "bare REPLACE on InnoDB": _Drawer(lambda: _bare_replace(address, "InnoDB")),
        "bare REPLACE on MyISAM": _Drawer(lambda: _bare_replace(address, "MyISAM")),
    }
    count = rounds.of(800)
    for name, side in sides.items():
        for processes in (1, PROCESSES):
            pairs, deadlocks = [], 0
            for _ in range(max(3, rounds.count // 12)):
                mine, _ = _in_processes(processes, count, ours)
                theirs, failed = _in_processes(processes, count, side)
                pairs.append((mine, theirs))
                deadlocks += failed
            what = f"{processes} process{'es' if processes > 1 else ''}, form 'update'"
            against = f"{name}, {deadlocks} deadlocks" if processes > 1 else name
            yield at_most(1, what, against, summary(pairs), goal=False)


def _bare_replace(address: Address, table: str) -> Callable[[], int]:
    cursor = _bare(address)

    def draw() -> int:
        cursor.execute(f"REPLACE INTO {table} (stub) VALUES ('a')")
        return int(cursor.lastrowid)

    return draw


def _peer(address: Address, alias: str, rounds: Rounds) -> Iterator[Line]:
    generator = _generator(alias, "against_peer")
    count = rounds.of(500)
    with ExitStack() as stack:
        try:
            peer = stack.enter_context(Peer(address, _SCHEMA))
        except NotAvailable as exc:
            yield Line("one ticket", "django-sharding's ticket table", f"did not run: {exc}")
            return
        pairs = []
        for _ in range(max(3, rounds.count // 4)):
            theirs = peer.draw(count)
            began = time.perf_counter()
            for _ in range(count):
                generator.next("against_peer")
            pairs.append(((time.perf_counter() - began) / count, theirs / count))
        yield at_most(1, "one ticket", "django-sharding's ticket table", summary(pairs), goal=False)
