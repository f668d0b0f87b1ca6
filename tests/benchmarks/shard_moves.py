"""Times what writers notice of a shard that moves to another server, beside a promotion; and the copying.

:func:`shard_moves` starts three servers that flush each commit: one, a replica of it, and another one.
A process moves a shard and promotes the replica, and processes write. All times come from the
machine's monotonic clock, which the processes share.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from threading import Event, Thread
from typing import Any

from tests.benchmarks.moves import longest, milliseconds, percentile
from tests.benchmarks.ordered_process import OrderedProcess, obey
from tests.benchmarks.report import Line, at_least
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Measured, Rounds, summary
from tests.services import mariadb
from tests.services.replication import Pair, execute, replicated_pair, wait_until_equal

WRITERS, ROWS, BATCH = 8, 100_000, 2000
#: Seconds between two writes of a writer, and for which writers are looked at after a change.
THINK, AFTER = 0.02, 1.5
#: The longest stall of a writer, at the 99th percentile of the moves; and how much faster the copy is.
STALL, FASTER = 0.1, 3.0
GROUP = "uploads"
#: Options of servers that flush each commit.
DURABLE = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
#: MariaDB's error for a write on a read-only server.
_READ_ONLY = 1290


def shard_moves(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Promote a replica and move a shard, both back and forth, while writers are timed."""
    with _writing() as (pair, process, mover, writers):
        promotions = list(_promotions(pair, mover, writers, max(2, rounds.count // 8 * 2)))
        moves = list(_moves(pair, mover, writers, max(4, rounds.count // 4 * 2)))
        for writer in writers:
            writer.ask("stop")
        yield _stalls(moves, promotions)
        alone, compared = _copying(mover, process("copier"), max(2, rounds.count // 10))
        stock = "iterator() and bulk_create(), without writers"
        yield at_least(FASTER, f"copying a shard of {ROWS:,} rows to another server", stock, alone)
        yield at_least(
            1.0, "the same, and comparing the rows on both servers", stock, compared, goal=False
        )


def promotions(count: int) -> list[Stall]:
    """Promote a replica to and fro while processes write, on servers of its own. The first two promotions,
    in which the processes connect, are left out.
    """
    with _writing() as (pair, _, mover, writers):
        stalls = list(_promotions(pair, mover, writers, 2 + count // 2 * 2))
        for writer in writers:
            writer.ask("stop")
    return stalls[2:]


@contextlib.contextmanager
def _writing() -> Iterator[
    tuple[Pair, Callable[[str], OrderedProcess], OrderedProcess, list[OrderedProcess]]
]:
    """Start three servers and writers. Yield the primary with its replica, a function that starts a
    process with the role that it is given, the mover, and the writers.
    """
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(replicated_pair(**DURABLE))
        (other,) = stack.enter_context(mariadb.servers(1, **DURABLE))
        pair.reset(GROUP)
        content = json.dumps(settings_of(pair, other.address, new_prefix()))

        def process(role: str) -> OrderedProcess:
            return stack.enter_context(OrderedProcess(__name__, content, role))

        process("publisher").ask("publish", "first", "second")
        mover = process("mover")
        mover.ask("create")
        wait_until_equal(pair)
        writers = [process("writer") for _ in range(WRITERS)]
        for number, writer in enumerate(writers):
            writer.ask("start", number)
        yield pair, process, mover, writers


@dataclass(frozen=True)
class Stall:
    """The longest writes of all writers at a change of a shard's node, in seconds.

    :param paused: of those that meet the pause; ``during`` the whole time of the command; ``still`` as
        long after its end.
    :param pause: the pause as the command reports it.
    """

    paused: float
    during: float
    still: float
    pause: float


def _promotions(
    pair: Pair, mover: OrderedProcess, writers: Sequence[OrderedProcess], count: int
) -> Iterator[Stall]:
    names = {"first": pair.first, "second": pair.second}
    old, new = names
    for _ in range(count):
        wait_until_equal(Pair(names[old], names[new]))
        yield stall(mover, writers, "promote", old)
        # The old primary becomes the replica.
        pair.follow(names[old], names[new])
        mover.ask("publish", new, old)
        old, new = new, old
    assert old == "first"
    execute(pair.second, "STOP ALL SLAVES")
    mover.ask("publish", old, None)


def _moves(
    pair: Pair, mover: OrderedProcess, writers: Sequence[OrderedProcess], count: int
) -> Iterator[Stall]:
    for number in range(count):
        yield stall(mover, writers, "move", "first" if number % 2 else "other")


def stall(mover: OrderedProcess, writers: Sequence[OrderedProcess], order: str, node: str) -> Stall:
    for writer in writers:
        writer.ask("writes")
    began, ended, pause, published, *_ = mover.ask(order, node)
    time.sleep(max(AFTER, ended - began))
    writes = [write for writer in writers for write in writer.ask("writes")]
    return Stall(
        # The publication is a moment of the pause.
        longest(writes, published - pause, published + pause),
        longest(writes, began, ended),
        longest(writes, ended, 2 * ended - began),
        pause,
    )


def _stalls(moves: Sequence[Stall], promotions: Sequence[Stall]) -> Line:
    stalls, pauses = [each.during for each in moves], [each.pause for each in moves]
    others = [each.during for each in promotions]
    worst = percentile(stalls)
    return Line(
        f"longest stall of a writer while a shard of {ROWS:,} rows moves; {WRITERS} writers",
        f"while the replica is promoted: {milliseconds(median(others))}, longest"
        f" {milliseconds(max(others))}",
        f"{milliseconds(median(stalls))}, p99 {milliseconds(worst)}",
        f"p99 <= {milliseconds(STALL)}",
        worst <= STALL,
        f"{len(moves)} moves, {len(promotions)} promotions; pause as the mover reports it:"
        f" {milliseconds(median(pauses))}, p99 {milliseconds(percentile(pauses))}",
    )


def _copying(
    mover: OrderedProcess, copier: OrderedProcess, count: int
) -> tuple[Measured, Measured]:
    """Return the seconds of copying, and of copying and comparing, each beside those of ``copier``."""
    copier.ask("create_copy")
    alone, compared = [], []
    for _ in range(count):
        *_, copying, comparing = mover.ask("move", "other")
        mover.ask("move", "first")
        stock = copier.ask("copy")
        alone.append((copying, stock))
        compared.append((copying + comparing, stock))
    return summary(alone), summary(compared)


# ##### The children #####


def settings_of(pair: Pair, other: mariadb.Address, prefix: str) -> dict[str, Any]:
    root = pair.first.address.django()
    operator = {"USER": root["USER"], "PASSWORD": root["PASSWORD"]}
    options = {"charset": "utf8mb4", "isolation_level": "read committed"}
    nodes = {
        "first": pair.node(pair.first, OPERATOR=operator, OPTIONS=options),
        "second": pair.node(
            pair.second,
            OPERATOR={key: pair.second.address.django()[key] for key in operator},
            OPTIONS=options,
        ),
        "other": {
            "ENGINE": "sharded_orm.backends.mysql",
            **other.django(),
            "OPTIONS": options,
        },
    }
    stock = {"ENGINE": "django.db.backends.mysql", "OPTIONS": options}
    return {
        "nodes": nodes,
        "databases": {
            "default": {**stock, **other.django(), "NAME": f"{prefix}_global"},
        },
        # Only the copier knows the server of a shard under an alias that it may write to, because
        # a promotion refuses such an alias.
        "stock": {
            "stock_first": {**stock, **root, "NAME": f"{GROUP}_00000"},
            "stock_other": {**stock, **other.django(), "NAME": f"{prefix}_copy"},
        },
    }


def configure(content: dict[str, Any]) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    settings.configure(
        SECRET_KEY="benchmarks",
        USE_TZ=True,
        DATABASES=sharded_databases(content["databases"]),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        INSTALLED_APPS=["sharded_orm", "tests.benchmarks"],
        SHARDED_ORM={
            "NODES": content["nodes"],
            "GROUPS": {
                name: {"STRATEGY": "modulo", "DATABASE_NAME": "{group}_{shard:05d}"}
                for name in ("photos", GROUP, "placed")
            },
            "TOPOLOGY": {"SOURCE": "database", "OPTIONS": {"ALIAS": "default"}},
            "TICKETS": ["default"],
        },
    )
    django.setup()


class Orders:
    """The orders of the parent; each is a method."""

    def __init__(self) -> None:
        from tests.benchmarks.models import Upload

        self._model = Upload
        self._writes: list[tuple[float, float]] = []
        self._stopping = Event()
        self._writer: Thread | None = None

    def publish(self, primary: str, replica: str | None) -> None:
        """Publish a topology whose only shard is on ``primary``."""
        replicas = {"replica": replica} if replica else {}
        self._publish({"range": [0, 0], "primary": primary, **replicas})

    def _publish(self, entry: dict[str, Any]) -> None:
        from django.db import connections

        from sharded_orm.exceptions import TopologyError
        from sharded_orm.operations import topology
        from sharded_orm.topology.document import Document

        stock: Any = connections["default"]
        with stock._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE IF NOT EXISTS `{stock.settings_dict['NAME']}`")
        try:
            from sharded_orm import runtime

            version = runtime.document().version
        except TopologyError:
            version = 1
        others = {"range": [0, 0], "primary": "other"}
        groups = {name: {"RANGES": [others]} for name in ("photos", "placed")}
        groups[GROUP] = {"RANGES": [entry]}
        document = {"format": 1, "version": version, "nodes": {}, "groups": groups}
        topology.push(Document.from_content(document))

    def create(self) -> None:
        from django.core.management import call_command
        from django.db import connections
        from django.utils import timezone

        call_command("migrate", database="default", verbosity=0, interactive=False)
        shard: Any = connections[f"{GROUP}_00000"]
        shard.create_shard_database()
        with shard.schema_editor() as editor:
            editor.create_model(self._model)
        rows = (
            self._model(
                photo_id=pk,
                user_id=pk % 50,
                title=f"Photo number {pk}",
                posted_at=timezone.now(),
                stars=0,
            )
            for pk in range(1, ROWS + 1)
        )
        while batch := list(islice(rows, BATCH)):
            self._model.objects.using(f"{GROUP}_00000").bulk_create(batch)

    def promote(self, node: str) -> tuple[float, float, float, float]:
        """Promote the replica of ``node``.

        Return when that began and ended, the pause, and when the topology was published.
        """
        from sharded_orm.operations import promotion

        began = time.monotonic()
        report = promotion.promote(node)
        assert report.outcome == "promoted" and report.pause is not None, report
        ended = time.monotonic()
        return began, ended, report.pause.to_json()["refused_for"], self.published()

    def published(self) -> float:
        """Return when the latest topology was published, by the machine's monotonic clock."""
        from sharded_orm import runtime

        (latest,) = runtime.source().history(1)
        assert latest.published_at is not None
        return latest.published_at.timestamp() - time.time() + time.monotonic()

    def move(self, node: str) -> tuple[float, float, float, float, float, float]:
        """Move the shard to ``node``.

        Return when that began and ended, the pause, when the topology was published, and the seconds of
        copying and of comparing.
        """
        from sharded_orm.operations import shard_moves

        began = time.monotonic()
        report = shard_moves.move_shards(GROUP, [0], node)
        ended = time.monotonic()
        assert report.ok and report.moved, report
        published = self.published()
        shard_moves.repair(GROUP, discard=True)
        return began, ended, max(report.pauses), published, report.copying, report.comparing

    def create_copy(self) -> None:
        from django.db import connections

        from tests.benchmarks.models import Plain

        copy: Any = connections["stock_other"]
        with copy._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE `{copy.settings_dict['NAME']}`")
        with copy.schema_editor() as editor:
            editor.create_model(Plain)

    def copy(self) -> float:
        """Return the seconds that it takes to copy the rows to "other" without this library."""
        from django.db import connections

        from tests.benchmarks.models import Plain

        with connections["stock_other"].cursor() as cursor:
            cursor.execute("TRUNCATE TABLE photo")
        began = time.monotonic()
        rows = iter(Plain.objects.using("stock_first").order_by("pk").iterator(BATCH))
        while batch := list(islice(rows, BATCH)):
            Plain.objects.using("stock_other").bulk_create(batch)
        return time.monotonic() - began

    def start(self, number: int) -> None:
        """Write in another thread, until :meth:`stop`."""
        self._writer = Thread(target=self._write_on, args=(number,))
        self._writer.start()

    def _write_on(self, number: int) -> None:
        from django.db import OperationalError
        from django.db.models import F

        chosen = random.Random(number)
        while not self._stopping.wait(THINK):
            pk = chosen.randrange(1, ROWS + 1)
            row = self._model.objects.filter(user_id=pk % 50, photo_id=pk)
            began = time.monotonic()
            while True:
                try:
                    assert row.update(stars=F("stars") + 1) == 1
                except OperationalError as exc:
                    # A promotion refuses writes; a move must not.
                    if exc.args[0] != _READ_ONLY:
                        raise
                    time.sleep(0.001)  # between two attempts
                else:
                    break
            self._writes.append((began, time.monotonic() - began))

    def writes(self) -> list[tuple[float, float]]:
        """Return the writes since this was called last: when each began, and its seconds."""
        assert self._writer is not None and self._writer.is_alive(), "a writer has failed"
        writes, self._writes = self._writes, []
        return writes

    def stop(self) -> None:
        assert self._writer is not None
        self._stopping.set()
        self._writer.join()


def main(settings: str, role: str) -> None:
    # The library lets only this command begin without a topology.
    sys.argv = ["manage.py", "topology" if role == "publisher" else role]
    content = json.loads(settings)
    if role == "copier":
        content["databases"] |= content["stock"]
    configure(content)
    obey(Orders())


if __name__ == "__main__":
    main(*sys.argv[1:])
