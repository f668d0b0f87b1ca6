"""Runs the sides as processes next to each other on one database server, in turns.

An exchange with memcached takes 7 or 70 microseconds, depending on whether the kernel runs
both ends on one processor, or on two of which one sleeps. So the work of one process is timed
twice: as the kernel schedules it, and with the servers on a processor of their own, as if they
ran on another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import MySQLdb

from tests.benchmarks.cache.project import PAGE, SHARDS, Side, shard_schema
from tests.benchmarks.peer import NotAvailable, environment
from tests.benchmarks.report import Line, at_least, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Both, Measured, Rounds, summary, summary_of_both
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer
from tests.services.memcached import MemcachedServer
from tests.services.redis import RedisServer
from tests.services.server import HOST

READERS, WRITES = 4, 60  # processes; writes per second
_CACHEOPS = ["Django>=5.2,<5.3", "django-cacheops==7.2", "mysqlclient>=2.3"]
_ROOT = Path(__file__).parents[3]
_TURNS = 4  # of each side in a round
_CALLS = 100  # in a turn

#: All processors that we may use (none: not Linux), and those of the servers while they are apart.
_PROCESSORS = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
_APART = {max(_PROCESSORS)} if len(_PROCESSORS) > 1 else _PROCESSORS

PLAIN, CACHEOPS, YUPOO = "plain ORM", "django-cacheops", "plain Yupoo, memcached"
TWIN, MEMCACHED, REDIS = "ours, not cached", "ours, memcached", "ours, Redis"


def cached(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time objects, lists and writes of one process; then four readers beside one writer."""
    with contextlib.ExitStack() as stack:
        try:
            bench = stack.enter_context(_bench(site.prefix))
        except ServiceMissing as exc:
            yield Line("cache", "-", f"did not run: {exc}")
            return
        yield from bench.start_all()
        yield from _reads(bench, rounds)
        for durable in (True, False):
            yield from _writes(bench, rounds, durable)
        yield from _readers_and_writer(bench, rounds)
        if len(_PROCESSORS) > 1:
            bench.place_servers_apart()
            yield from _reads(bench, rounds, apart=True)
            yield from _writes(bench, rounds, True, apart=True)


# ##### Processes #####


class Process:
    """A process of one side; a context manager.

    :raises NotAvailable: the side does not run; its methods raise this as well.
    """

    def __init__(self, python: str, side: Side) -> None:
        # A file, as nobody would empty a pipe.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__()
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "tests.benchmarks.cache.project", json.dumps(asdict(side))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, cwd=_ROOT,
        )  # fmt: skip

    def place(self, processors: set[int]) -> None:
        """Bind the process to these processors."""
        os.sched_setaffinity(self._process.pid, processors)

    def order(self, *words: object) -> None:
        """Send an order; :meth:`answer` waits for the result."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() raises with the reason
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the result of the order. The first answer is None: the process is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise NotAvailable((self._errors.read().strip().splitlines() or ["it ended"])[-1])
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise NotAvailable(answer["error"])
        return answer

    def ask(self, *words: object) -> Any:
        self.order(*words)
        return self.answer()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Bench:
    """The servers, and the running processes of each side."""

    def __init__(
        self, folder: Path, prefix: str, database: MariaDBServer, memcached: MemcachedServer,
        redis: RedisServer,
    ) -> None:  # fmt: skip
        address = database.address
        self._folder = folder
        self._prefix = prefix
        self._servers = (database, memcached, redis)
        self.cursor = MySQLdb.connect(**address.mysqldb(), autocommit=True).cursor()

        def side(kind: str, cache: dict[str, Any] | None = None) -> Side:
            return Side(kind, address.django(), prefix, cache)

        its_redis = {"host": HOST, "port": redis.port, "password": redis.password}
        self._sides = {
            PLAIN: side("plain"),
            CACHEOPS: side("cacheops", its_redis),
            YUPOO: side("yupoo", memcached.django()),
            MEMCACHED: side("ours", memcached.django()),
            REDIS: side("ours", redis.django()),
        }
        self._pythons: dict[str, str] = {}
        #: The first process of each side that runs.
        self.running: dict[str, Process] = {}
        self.stack = contextlib.ExitStack()

    def place_servers_apart(self) -> None:
        """Run the servers on one processor, and their clients on the others."""
        for server in self._servers:
            for thread in Path(f"/proc/{server.pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread.name), _APART)
        for process in self.running.values():
            process.place(_PROCESSORS - _APART)

    def start_all(self) -> Iterator[Line]:
        """Create the databases, start a process of each side and warm the caches.

        Print the sides that do not run.
        """
        self.cursor.execute(f"CREATE DATABASE `{self._prefix}_one`")
        for name in self._sides:
            try:
                self.running[name] = self.start(name)
                if name == PLAIN:
                    self.running[name].ask("make")
                    self._make_shards()
            except NotAvailable as exc:
                yield self._lost(name, exc)
        yield from self.warm()

    def start(self, name: str) -> Process:
        """Start one more process of a side."""
        if name not in self._pythons:
            # In an environment of its own, as this peer patches Django.
            requirements = {CACHEOPS: _CACHEOPS}.get(name)
            self._pythons[name] = (
                environment(self._folder / "cacheops", requirements)
                if requirements
                else sys.executable
            )
        process = self.stack.enter_context(Process(self._pythons[name], self._sides[name]))
        process.answer()
        return process

    def warm(self) -> Iterator[Line]:
        for process in self.running.values():
            process.order("warm")
        for name, process in list(self.running.items()):
            try:
                statements = process.answer()
            except NotAvailable as exc:
                yield self._lost(name, exc)
                continue
            if statements and name != PLAIN:
                yield Line("cache", name, f"is not warm: {statements} statements in a pass")

    def _lost(self, name: str, exc: NotAvailable) -> Line:
        self.running.pop(name, None)
        return Line("cache", name, f"did not run: {exc}")

    def _make_shards(self) -> None:
        source = f"`{self._prefix}_one`.photo"
        for number in range(SHARDS):
            schema = shard_schema(self._prefix, number)
            self.cursor.execute(f"CREATE DATABASE `{schema}`")
            for table in ("photo", "twin"):
                self.cursor.execute(f"CREATE TABLE `{schema}`.{table} LIKE {source}")
                self.cursor.execute(
                    f"INSERT INTO `{schema}`.{table} SELECT * FROM {source}"
                    f" WHERE user_id %% {SHARDS} = %s",
                    [number],
                )

    def selects(self) -> int:
        """The number of SELECT statements that the server has run."""
        self.cursor.execute("SHOW GLOBAL STATUS LIKE 'Com_select'")
        return int(self.cursor.fetchone()[1])


@contextlib.contextmanager
def _bench(prefix: str) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-"))
        # Sync each commit, as a production database does.
        durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
        database = stack.enter_context(MariaDBServer(**durable))
        memcached = stack.enter_context(MemcachedServer())
        redis = stack.enter_context(RedisServer())
        bench = Bench(Path(folder), prefix, database, memcached, redis)
        stack.enter_context(bench.stack)
        yield bench


# ##### Comparisons #####


@dataclass(frozen=True)
class Column:
    """The figures of one side for one kind of work.

    :param limit: the ratio of processor times to reach, or None.
    """

    name: str
    process: Process
    work: str
    limit: float | None = None


def _columns(bench: Bench, work: str, limits: dict[str, float]) -> list[Column]:
    columns = [Column(name, it, work, limits.get(name)) for name, it in bench.running.items()]
    if ours := bench.running.get(MEMCACHED):
        columns.append(Column(TWIN, ours, f"twin-{work}"))
    return columns


def _least(bench: Bench, work: str, what: str = "the least") -> list[Column]:
    return [
        Column(f"{name}, {what}", bench.running[name], f"least-{work}")
        for name in (MEMCACHED, REDIS)
        if name in bench.running
    ]


_FAR = ", servers apart"


def _reads(bench: Bench, rounds: Rounds, *, apart: bool = False) -> Iterator[Line]:
    for work, what, limits, again in (
        ("object", "object by key", {MEMCACHED: 0.15, REDIS: 0.15}, 0.10),
        ("page", f"list of {PAGE}", {MEMCACHED: 0.35, REDIS: 0.35}, 0.25),
    ):
        columns = _columns(bench, work, {} if apart else limits)
        columns += [
            Column(f"{name}, again in a request", bench.running[name], f"again-{work}", again)
            for name in (MEMCACHED, REDIS)
            if name in bench.running and not apart
        ]
        columns += _least(bench, work)
        if work == "object":
            # What is left if all our code took no time.
            columns += _least(bench, "packet", "the packet alone")
        yield from _lines(what + _FAR * apart, columns, rounds)


def _writes(bench: Bench, rounds: Rounds, durable: bool, *, apart: bool = False) -> Iterator[Line]:
    what = "save(), each commit synced" if durable else "save(), commits not synced"
    what += _FAR * apart
    is_goal = durable and not apart
    limits = {MEMCACHED: 1.4, REDIS: 1.5} if is_goal else {}
    of_blocks = {MEMCACHED: 1.3, REDIS: 1.4} if is_goal else {}
    rounds = Rounds(max(4, rounds.count // 2), rounds.scale / 2)
    bench.cursor.execute(f"SET GLOBAL innodb_flush_log_at_trx_commit = {durable:d}")
    columns = _columns(bench, "save", limits) + _least(bench, "save")
    yield from _lines(what, columns, rounds)
    yield from _lines(f"atomic() + {what}", _columns(bench, "transact", of_blocks), rounds)
    bench.cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


def _lines(what: str, columns: list[Column], rounds: Rounds) -> Iterator[Line]:
    able = []
    for column in columns:
        try:
            column.process.ask("time", column.work, 1)
            able.append(column)
        except NotAvailable as exc:
            yield Line(f"{what}: {column.name}", PLAIN, f"did not run: {exc}")
    for column, measured in _in_turns(able, rounds).items():
        if column.name == PLAIN:
            continue
        goal = column.limit is not None
        title = f"{what}: {column.name}"
        yield at_most(column.limit or 0, title, PLAIN, measured, goal=goal, of_cpu=True)


def _in_turns(columns: list[Column], rounds: Rounds) -> dict[Column, Measured]:
    calls = rounds.of(_CALLS)
    (plain,) = (column for column in columns if column.name == PLAIN)
    results: dict[Column, list[tuple[Both, Both]]] = {column: [] for column in columns}
    for number in range(rounds.count):
        turns: dict[Column, list[Both]] = {column: [] for column in columns}
        for turn in range(_TURNS):
            first = (number + turn) % len(columns)
            for column in columns[first:] + columns[:first]:
                turns[column].append(column.process.ask("time", column.work, calls))
        means = {
            column: (mean(wall for wall, _ in both) / calls, mean(cpu for _, cpu in both) / calls)
            for column, both in turns.items()
        }
        for column in columns:
            results[column].append((means[column], means[plain]))
    return {column: summary_of_both(results[column]) for column in columns}


def _readers_and_writer(bench: Bench, rounds: Rounds) -> Iterator[Line]:
    """Let four processes read objects and lists of all users while one writes random rows."""
    yield from bench.warm()
    seconds = max(0.5, 2 * rounds.scale)
    crews = {
        name: ([bench.start(name) for _ in range(READERS)], bench.start(name))
        for name in bench.running
    }
    reads: dict[str, list[float]] = {name: [] for name in crews}
    selects_per_read: dict[str, list[float]] = {name: [] for name in crews}
    written: dict[str, list[float]] = {name: [] for name in crews}
    for number in range(max(3, rounds.count // 6) + 1):
        for name, (readers, writer) in crews.items():
            before = bench.selects()
            writer.order("write", WRITES, seconds)
            for reader in readers:
                reader.order("read", seconds)
            done = sum(reader.answer() for reader in readers)
            writes = writer.answer()
            if number:  # the first round fills the caches of the process
                reads[name].append(done / seconds)
                selects_per_read[name].append((bench.selects() - before) / done)
                written[name].append(writes / seconds)
    for name in crews:
        pairs = [
            (1 / ours, 1 / plain) for ours, plain in zip(reads[name], reads[PLAIN], strict=True)
        ]
        limit = 2.5 if name in (MEMCACHED, REDIS) else None
        line = at_least(limit or 0, f"reads/s, {READERS} readers, {WRITES} writes/s: {name}", PLAIN,
                        summary(pairs))  # fmt: skip
        if limit is None:
            line = replace(line, to_reach="", reached=None)
        detail = (
            f"{median(reads[name]):,.0f} / {median(reads[PLAIN]):,.0f} reads/s,"
            f" {median(written[name]):.0f} writes/s, {median(selects_per_read[name]):.3f} SELECTs a read"
        )
        yield replace(line, detail=detail)
