"""Times what writers notice of a key that moves: its own writers, and those of other keys.

Each benchmark starts a server of its own that flushes each commit, a process that moves keys, and
processes that write. All times come from the machine's monotonic clock, which the processes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from tests.benchmarks.ordered_process import OrderedProcess, obey
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import GROUPS, Site, new_prefix
from tests.benchmarks.timing import Measured, Rounds, summary
from tests.services import mariadb
from tests.services.mariadb import Address

WRITERS, ROWS = 8, 2000
#: Rows of a key that stay. Each writer has one row more from time to time.
STEADY = ROWS - WRITERS
#: Seconds for which processes remember where a key is; and between two writes of a writer.
LEASE, THINK = 0.5, 0.005
#: The longest write that meets the pause of a move, at the 99th percentile of the moves; and how much slower a write and a
#: read of another key may be.
STALL, SLOWER, SLOWER_READ = 0.05, 1.3, 1.05
#: The variable with the folder of an older checkout; and how much slower a write may be than with that.
BEFORE, SLOWER_WRITE = "SHARDED_ORM_BENCHMARK_BEFORE", 1.02
KEY, OTHER = 7, 8
# Reads or writes of a turn, and turns per round, of the comparison with a site that moves no keys. Turns
# are short, because other work on the machine comes and goes.
CALLS, TURNS = 20, 10


def key_moves(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Move a key back and forth while its writers are timed."""
    with _processes() as process:
        mover = process("mover")
        mover.ask("create")
        yield from _stalls(mover, [process("writer") for _ in range(WRITERS)], rounds)


def beside_moves(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time reads and writes of other keys while a key moves, and those of a site that moves none."""
    with _processes() as process:
        mover, client, without_lease = process("mover"), process("client"), process("no lease")
        mover.ask("create")
        for what, slower in (("write", SLOWER), ("read", SLOWER_READ)):
            yield at_most(
                slower,
                f"a {what} of another key on the shard, while a key of it moves",
                "the same, while none moves",
                _other_key(mover, client, what, rounds),
            )
        for what in ("read", "write"):
            yield at_most(
                1.0,
                f"a {what} by key with PLACEMENT_LEASE, while no key moves",
                "the same without PLACEMENT_LEASE",
                _ordinary(client, without_lease, what, rounds),
                goal=False,
            )
        if BEFORE not in os.environ:
            return
        with TemporaryDirectory() as folder:
            Path(folder, "sharded_orm").symlink_to(Path(os.environ[BEFORE], "sharded_orm"))
            before = process("no lease", folder)
            for ours, setting in ((without_lease, "without"), (client, "with")):
                for what in ("write", "read"):
                    yield at_most(
                        SLOWER_WRITE,
                        f"a {what} by key {setting} PLACEMENT_LEASE, while no key moves",
                        f"the same with the package in {os.environ[BEFORE]}",
                        _ordinary(ours, before, what, rounds),
                        goal=what == "write",
                    )


@contextlib.contextmanager
def _processes() -> Iterator[Callable[..., OrderedProcess]]:
    """Start a server, and yield a function that starts a process with the role that it is given."""
    with contextlib.ExitStack() as stack:
        durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
        (server,) = stack.enter_context(mariadb.servers(1, **durable))
        address, prefix = json.dumps(vars(server.address)), new_prefix()

        def process(role: str, path: str | None = None) -> OrderedProcess:
            return stack.enter_context(OrderedProcess(__name__, address, prefix, role, path=path))

        yield process


def _stalls(
    mover: OrderedProcess, writers: Sequence[OrderedProcess], rounds: Rounds
) -> Iterator[Line]:
    for number, writer in enumerate(writers):
        writer.ask("start", KEY, number)
    # The first moves and writes open connections and import modules.
    for _ in range(2):
        mover.ask("move", KEY)
    paused, moving, still, pauses = [], [], [], []
    for _ in range(4 * rounds.count):
        began, ended, pause, switched = mover.ask("move", KEY)
        time.sleep(ended - began)
        writes = [write for writer in writers for write in writer.ask("writes")]
        # The switch is a moment of the pause.
        paused.append(longest(writes, switched - pause, switched + pause))
        moving.append(longest(writes, began, ended))
        still.append(longest(writes, ended, 2 * ended - began))
        pauses.append(pause)
    rows = mover.ask("rows", KEY)
    for writer in writers:
        writer.ask("stop")
    yield Line(
        f"longest write that meets the pause of a move; {WRITERS} writers, {rows} rows",
        "",
        percentiles(paused),
        f"p99 <= {milliseconds(STALL)}",
        percentile(paused) <= STALL,
        f"{len(paused)} moves; pause as the mover reports it: {percentiles(pauses)}",
    )
    yield Line(
        "longest write in the whole time of a move",
        f"in the same time without a move: {percentiles(still)}",
        percentiles(moving),
        "",
        None,
        "stalls of the disk are in both",
    )


def _other_key(
    mover: OrderedProcess, writer: OrderedProcess, what: str, rounds: Rounds
) -> Measured:
    writer.ask("start", OTHER, 0, what)
    pairs = []
    for _ in range(rounds.count):
        began, ended, _ = mover.ask("move", KEY)
        time.sleep(ended - began)
        writes = writer.ask("writes")
        during = [seconds for at, seconds in writes if began <= at < ended]
        after = [seconds for at, seconds in writes if ended <= at]
        pairs.append((sum(during) / len(during), sum(after) / len(after)))
    writer.ask("stop")
    return summary(pairs)


def _ordinary(ours: OrderedProcess, other: OrderedProcess, what: str, rounds: Rounds) -> Measured:
    calls = rounds.of(CALLS)
    for process in (ours, other):
        process.ask("timed", what, calls)
    pairs = []
    for number in range(rounds.count * TURNS):
        seconds = {}
        for process in (ours, other) if number % 2 else (other, ours):
            seconds[process] = process.ask("timed", what, calls)
        pairs.append((seconds[ours], seconds[other]))
    return summary(pairs)


def longest(writes: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    return max(seconds for at, seconds in writes if at + seconds >= began and at < ended)


def percentile(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def percentiles(values: Sequence[float]) -> str:
    return f"{milliseconds(median(values))}, p99 {milliseconds(percentile(values))}"


# ##### The children #####


def configure(address: Address, prefix: str, lease: float | None) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    options = {"charset": "utf8mb4", "isolation_level": "read committed"}
    connection = {**address.django(), "OPTIONS": options, "CONN_MAX_AGE": None}
    settings.configure(
        SECRET_KEY="benchmarks",
        USE_TZ=True,
        DATABASES=sharded_databases(
            {
                "default": {
                    "ENGINE": "django.db.backends.mysql",
                    "NAME": f"{prefix}_global",
                    **connection,
                }
            }
        ),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        INSTALLED_APPS=["sharded_orm", "tests.benchmarks"],
        SHARDED_ORM={
            "NODES": {"node": {"ENGINE": "sharded_orm.backends.mysql", **connection}},
            "GROUPS": {
                name: {
                    "STRATEGY": "directory" if name == "placed" else "modulo",
                    "RANGES": [{"range": (0, 1), "primary": "node"}],
                    "DATABASE_NAME": prefix + "_{group}_{shard:05d}",
                }
                for name in GROUPS
            },
            "TICKETS": ["default"],
            "DIRECTORY": "default",
            **({} if lease is None else {"PLACEMENT_LEASE": lease}),
        },
    )
    django.setup()


class _Orders:
    """The orders of the parent; each is a method."""

    def __init__(self) -> None:
        from tests.benchmarks.models import Placed

        self._model = Placed
        self._target = 0
        self._writes: list[tuple[float, float]] = []
        self._stopping = Event()
        self._writer: Thread | None = None

    def create(self) -> None:
        from django.core.management import call_command
        from django.db import connections

        from sharded_orm import runtime

        with connections["default"]._nodb_cursor() as cursor:
            group = runtime.group("placed")
            global_schema = connections["default"].settings_dict["NAME"]
            for schema in (global_schema, group.schema_name(0), group.schema_name(1)):
                cursor.execute(f"CREATE DATABASE `{schema}`")
        call_command("migrate", database="default", verbosity=0, interactive=False)
        for number in (0, 1):
            with connections[group.shard(number).alias].schema_editor() as editor:
                editor.create_model(self._model)
        strategy: Any = runtime.strategy("placed")
        strategy.store.place("placed", {str(KEY): 0, str(OTHER): 0})
        for key in (KEY, OTHER):
            self._model.objects.bulk_create(self._row(key, number) for number in range(STEADY))

    def _row(self, key: int, number: int) -> Any:
        from django.utils import timezone

        return self._model(
            photo_id=_pk(key, number),
            user_id=key,
            title=f"Photo number {number}",
            posted_at=timezone.now(),
            stars=0,
        )

    def rows(self, key: int) -> int:
        return self._model.objects.filter(user_id=key).count()

    def move(self, key: int) -> tuple[float, float, float, float]:
        """Move a key to the other shard. Return when that began and ended, its pause, and its switch."""
        from sharded_orm.models.tables.key_move import KeyMove
        from sharded_orm.operations import moves

        self._target = 1 - self._target
        began = time.monotonic()
        report = moves.move_keys("placed", [key], self._target)
        assert report.ok and report.moved, report
        ended = time.monotonic()
        # The move is told by the clock of the day, and the writes are timed by the other clock.
        switched = (
            KeyMove.objects.latest("id").switched_at.timestamp() - time.time() + time.monotonic()
        )
        return began, ended, max(report.pauses), switched

    def start(self, key: int, number: int, what: str = "write") -> None:
        """Write or read in another thread, until :meth:`stop`."""
        self._stopping.clear()
        self._writes = []
        work = self._write_on if what == "write" else self._read_on
        self._writer = Thread(target=work, args=(key, number))
        self._writer.start()

    def _read_on(self, key: int, number: int) -> None:
        chosen = random.Random(number)
        while not self._stopping.wait(THINK):
            pk = _pk(key, chosen.randrange(STEADY))
            began = time.monotonic()
            self._model.objects.get(user_id=key, photo_id=pk)
            self._writes.append((began, time.monotonic() - began))

    def _write_on(self, key: int, number: int) -> None:
        chosen = random.Random(number)
        own = self._model.objects.filter(user_id=key, photo_id=_pk(key, ROWS + number))
        turn = 0
        while not self._stopping.wait(THINK):
            turn += 1
            began = time.monotonic()
            if turn % 8 == 3:
                self._row(key, ROWS + number).save(force_insert=True)
            elif turn % 8 == 7:
                own.delete()
            else:
                self._update(key, chosen.randrange(STEADY))
            self._writes.append((began, time.monotonic() - began))

    def _update(self, key: int, number: int) -> None:
        from django.db.models import F

        rows = self._model.objects.filter(user_id=key, photo_id=_pk(key, number))
        assert rows.update(stars=F("stars") + 1) == 1

    def writes(self) -> list[tuple[float, float]]:
        """Return the writes (or reads) since this was called last: when each began, and its seconds."""
        writes, self._writes = self._writes, []
        return writes

    def stop(self) -> None:
        assert self._writer is not None
        self._stopping.set()
        self._writer.join()

    def timed(self, what: str, calls: int) -> float:
        """Return the seconds of a read or write by key."""
        began = time.perf_counter()
        for number in range(calls):
            if what == "read":
                self._model.objects.get(user_id=OTHER, photo_id=_pk(OTHER, number))
            else:
                self._update(OTHER, number)
        return (time.perf_counter() - began) / calls


def _pk(key: int, number: int) -> int:
    return key * 10**6 + number


def main(address: str, prefix: str, role: str) -> None:
    configure(Address(**json.loads(address)), prefix, None if role == "no lease" else LEASE)
    obey(_Orders())


if __name__ == "__main__":
    main(*sys.argv[1:])
