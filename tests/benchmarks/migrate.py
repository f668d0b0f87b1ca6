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
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.report import Line, at_least
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, summary
from tests.services.mariadb import Address

NEW, CHANGED, ALL = 256, 512, 4096
# The loop would need minutes for all shards, so it is timed on this many.
SAMPLE = 8
FEW = 64
BEFORE, ADD_FIELD = "0022_no_temporary", "0023_photo_checked"
GROUP = "fleet"


def migrations(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time new shards, current shards and one AddField, then a survey of many shards."""
    new, changed, everything = (rounds.of(number) for number in (NEW, CHANGED, ALL))
    ours = range(changed)
    loop = range(changed, changed + max(2, rounds.of(SAMPLE)))
    by_loop = f"a loop of migrate, timed on {len(loop)} shards"
    turns = Rounds(max(2, rounds.count // 10))
    with _Project(site, everything) as project:
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
                8,
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
        address = json.dumps(vars(site.address))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, site.prefix, str(shards)],
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


def configure(address: Address, prefix: str, shards: int) -> None:
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
                    "NAME": f"{prefix}_journal",
                    **connection,
                }
            }
        ),
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
            "NODES": {"node": {"ENGINE": "sharded_orm.backends.mysql", **connection}},
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

    def __init__(self) -> None:
        from django.core.management import call_command
        from django.db import connections

        from sharded_orm import runtime

        self._call = call_command
        self._connections = connections
        self._group = runtime.group(GROUP)
        with self._server() as cursor:
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS `{self._journal}`")
        self._migrate("default")

    @property
    def _journal(self) -> str:
        return str(self._connections["default"].settings_dict["NAME"])

    def _server(self) -> Any:
        return self._connections["default"]._nodb_cursor()

    def _schemas(self, shards: range) -> list[str]:
        return [self._group.schema_name(number) for number in shards]

    def _migrate(self, alias: str, *target: str) -> None:
        self._call("migrate", *target, database=alias, verbosity=0, interactive=False)

    def create(self, shards: range, target: list[str]) -> None:
        """Create empty schemas and drop existing ones."""
        with self._server() as cursor:
            for schema in self._schemas(shards):
                cursor.execute(f"DROP DATABASE IF EXISTS `{schema}`")
                cursor.execute(f"CREATE DATABASE `{schema}`")

    def drop(self, shards: range, target: list[str]) -> None:
        with self._server() as cursor:
            for schema in [*self._schemas(shards), self._journal]:
                cursor.execute(f"DROP DATABASE IF EXISTS `{schema}`")

    def fill(self, shards: range, target: list[str]) -> None:
        """Create schemas that hold only the ``django_migrations`` of the first shard; a survey
        reads
        nothing else.
        """
        records = f"`{self._group.schema_name(0)}`.django_migrations"
        with self._server() as cursor:
            for schema in self._schemas(shards):
                cursor.execute(f"CREATE DATABASE `{schema}`")
                cursor.execute(f"CREATE TABLE `{schema}`.django_migrations LIKE {records}")
                cursor.execute(f"INSERT INTO `{schema}`.django_migrations SELECT * FROM {records}")

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


def main(address: str, prefix: str, shards: str) -> None:
    configure(Address(**json.loads(address)), prefix, int(shards))
    orders = _Orders()
    for line in sys.stdin:
        order, start, stop, target = json.loads(line)
        work = getattr(orders, order)
        print(json.dumps(work(range(start, stop), [GROUP, target] if target else [])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
