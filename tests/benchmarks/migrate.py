"""``migrate_shards`` against a loop of ``migrate --database``, over the 28 migrations of
``tests.fleet``.

:func:`migrations` starts a process with the project; its group has thousands of shards. The
process reads one order in JSON per line of its standard input, and answers with JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.database import DATABASES, Database
from tests.benchmarks.report import Line, at_least
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, summary
from tests.services.addresses import ServerAddress

NEW, CHANGED, ALL = 256, 512, 4096
# The loop would need minutes for all shards, so it is timed on this many.
SAMPLE = 8
FEW = 64
BEFORE, ADD_FIELD = "0022_no_temporary", "0023_photo_checked"
GROUP = "fleet"
#: What one AddField is to reach. On PostgreSQL, definitions of the loop are one transaction as well.
FIELD_GOAL = {"mariadb": 8, "postgresql": 4}


def migrations(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time new shards, current shards and one AddField, then a survey of many shards."""
    new, changed, everything = (rounds.of(number) for number in (NEW, CHANGED, ALL))
    ours = range(changed)
    loop = range(changed, changed + max(2, rounds.of(SAMPLE)))
    by_loop = f"a loop of migrate, timed on {len(loop)} shards"
    turns = Rounds(max(2, rounds.count // 10))
    with _journal(site), _Project(site, everything) as project:
        try:

            def empty() -> None:
                project.ask("create", ours[:new])
                project.ask("create", loop)

            yield at_least(
                8,
                f"{new} new shards, 28 migrations: speed per shard",
                by_loop,
                project.compare(ours[:new], loop, turns, empty),
            )
            yield at_least(
                100,
                f"{new} current shards: speed per shard",
                by_loop,
                project.compare(ours[:new], loop, Rounds(2 * turns.count)),
            )
            project.ask("create", ours[new:])
            project.ask("ours", ours)

            def back() -> None:
                project.ask("ours", ours, BEFORE)
                project.ask("loop", loop, BEFORE)

            yield at_least(
                FIELD_GOAL[site.database.name],
                f"one AddField on {changed} shards: speed per shard",
                by_loop,
                project.compare(ours, loop, turns, back, ADD_FIELD),
            )
            project.ask("ours", ours)
            project.ask("loop", loop)
            project.ask("fill", range(loop.stop, everything))
            for shards in (range(FEW), range(everything)):
                yield _nothing_to_do(site, everything, shards, turns)
        finally:
            project.ask("drop", range(everything))


@contextmanager
def _journal(site: Site) -> Iterator[None]:
    """The global database of the child process."""
    name = f"{site.prefix}_journal"
    with site.session() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    try:
        yield
    finally:
        with site.session() as cursor:
            cursor.execute(site.database.drop_database(name))


def _nothing_to_do(site: Site, everything: int, shards: range, turns: Rounds) -> Line:
    samples = []
    for _ in range(turns.count):
        with _Project(site, everything) as fresh:
            samples.append(fresh.ask("nothing", shards))
    first, again, grown = (median(column) for column in zip(*samples, strict=True))
    return Line(
        f"{len(shards)} shards with nothing to do, in a new process",
        "",
        f"{first:.2f} s, {grown:.1f} MB",
        detail=f"again in the same process {again:.3f} s; MB: what the process grew by at most",
    )


class _Project:
    """The child process; a context manager."""

    def __init__(self, site: Site, shards: int) -> None:
        where = [site.database.name, json.dumps(vars(site.address)), site.prefix]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *where, str(shards)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: str, shards: range, target: str = "") -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([order, shards.start, shards.stop, target]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def compare(
        self,
        ours: range,
        loop: range,
        rounds: Rounds,
        before: Callable[[], None] = lambda: None,
        target: str = "",
    ) -> Any:
        """Seconds per shard of both, measured in turns."""
        pairs = []
        for number in range(rounds.count):
            before()
            seconds: dict[str, float] = {}
            sides = [("ours", ours), ("loop", loop)]
            for side, shards in sides if number % 2 else reversed(sides):
                seconds[side] = self.ask(side, shards, target) / len(shards)
            pairs.append((seconds["ours"], seconds["loop"]))
        return summary(pairs)

    def __enter__(self) -> _Project:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ##### The child #####


def configure(database: Database, address: ServerAddress, prefix: str, shards: int) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    settings.configure(
        SECRET_KEY="benchmarks",
        USE_TZ=True,
        DATABASES=sharded_databases({"default": database.database(address, f"{prefix}_journal")}),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        # The apps of a new startproject project, and the app that is migrated.
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.staticfiles",
            "sharded_orm",
            "tests.fleet",
        ],
        SHARDED_ORM={
            "NODES": {"node": database.node(address)},
            "GROUPS": {
                GROUP: {
                    "STRATEGY": "embedded",
                    "RANGES": [{"range": (0, shards - 1), "primary": "node"}],
                    "DATABASE_NAME": prefix + "_{group}_{shard:05d}",
                }
            },
        },
    )
    django.setup()


class _Orders:
    """The orders of the parent; each is a method."""

    def __init__(self, database: Database, address: ServerAddress) -> None:
        from django.core.management import call_command

        from sharded_orm import runtime

        self._database, self._address = database, address
        self._call = call_command
        self._group = runtime.group(GROUP)
        self._migrate("default")

    def _session(self) -> AbstractContextManager[Any]:
        return self._database.session(self._address)

    def _schemas(self, shards: range) -> list[str]:
        return [self._group.schema_name(number) for number in shards]

    def _migrate(self, alias: str, *target: str) -> None:
        self._call("migrate", *target, database=alias, verbosity=0, interactive=False)

    def create(self, shards: range, target: list[str]) -> None:
        """Create empty schemas and drop existing ones."""
        with self._session() as cursor:
            for schema in self._schemas(shards):
                cursor.execute(self._database.drop_schema(schema))
                cursor.execute(f"CREATE SCHEMA {schema}")

    def drop(self, shards: range, target: list[str]) -> None:
        with self._session() as cursor:
            for schema in self._schemas(shards):
                cursor.execute(self._database.drop_schema(schema))

    def fill(self, shards: range, target: list[str]) -> None:
        """Create schemas that hold only the ``django_migrations`` of the first shard.

        A survey reads nothing else.
        """
        records = f"{self._group.schema_name(0)}.django_migrations"
        with self._session() as cursor:
            for schema in self._schemas(shards):
                copied = f"{schema}.django_migrations"
                cursor.execute(f"CREATE SCHEMA {schema}")
                cursor.execute(self._database.copy_table(records, copied))
                cursor.execute(f"INSERT INTO {copied} SELECT * FROM {records}")

    def ours(self, shards: range, target: list[str]) -> float:
        began = time.perf_counter()
        numbers = f"{shards.start}-{shards.stop - 1}"
        self._call("migrate_shards", *target, group=GROUP, shards=numbers, verbosity=0)
        return time.perf_counter() - began

    def loop(self, shards: range, target: list[str]) -> float:
        began = time.perf_counter()
        for number in shards:
            self._migrate(self._group.shard(number).alias, *target)
        return time.perf_counter() - began

    def nothing(self, shards: range, target: list[str]) -> tuple[float, float, float]:
        """Seconds of the first call and of a second one; growth of the process in MB."""
        status = Path("/proc/self/status").read_text()
        before = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
        first = self.ours(shards, target)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return first, self.ours(shards, target), (peak - before) / 1024


def main(database: str, address: str, prefix: str, shards: str) -> None:
    measured = DATABASES[database]
    where = measured.address(json.loads(address))
    configure(measured, where, prefix, int(shards))
    orders = _Orders(measured, where)
    for line in sys.stdin:
        order, start, stop, target = json.loads(line)
        work = getattr(orders, order)
        print(json.dumps(work(range(start, stop), [GROUP, target] if target else [])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
