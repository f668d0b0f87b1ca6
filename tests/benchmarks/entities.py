"""Times puts of entities with two indexes, and the cleaner."""

from __future__ import annotations

import json
import os
import subprocess
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary
from tests.services import mariadb

#: What the issue asks for: a put, entities per second of a cleaner, seconds until a lost index row is there.
PUT, CLEANED, LAG = 1.3, 5000, 1.0
CALLS, ENTITIES, PUTS_PER_SECOND = 20, 20_000, 500

_PROGRAM = """
import json, time
from sharded_orm.contrib.entities import cleaner, index_rows
feed.indexes[:] = [by_user, by_link]
numbers = iter(range(10**9))

def put():
    n = next(numbers)
    return feed.put(Entity(user_id=n % 97, link=f"https://example.org/{{n % 89}}", published=moment(n), title="a title of some length"))

def by_hand():
    n, id = next(numbers), uuid.uuid4()
    body = b'{{"user_id": 1, "title": "a title of some length"}}'
    feed.model(id=id, updated=moment(n), version=1, body=body).save(force_insert=True)
    by_user.model(user_id=n % 97, entity_id=id, version=1).save(force_insert=True)
    by_link.model(link=f"https://example.org/{{n % 89}}", published=moment(n), entity_id=id, version=1).save(force_insert=True)

def seconds(work):
    began = time.perf_counter()
    for _ in range({calls}):
        work()
    return (time.perf_counter() - began) / {calls}

seconds(put), seconds(by_hand)
result = {{"put": [(seconds(put), seconds(by_hand)) for _ in range({rounds})]}}
feed.model.objects.scatter().delete()
follow, index_rows.follow = index_rows.follow, lambda *ignored: None
for _ in range({entities}):
    put()
def cleaned():
    report = cleaner.CleanReport()
    began = time.perf_counter()
    cleaner.clean_marked(report, min_age=0)
    assert report.settled >= {entities} and not report.failed, report
    return report.settled / (time.perf_counter() - began)
result["written"] = cleaned()
feed.model.objects.scatter().update(marked_at=moment(0))
result["cleaned"] = cleaned()
print(json.dumps(result))
"""
#: Puts at a steady rate, and dies after each commit, as it were. The users of some entities are watched.
_DYING_WRITER = """
import time
from sharded_orm.contrib.entities import index_rows
feed.indexes[:] = [by_user, by_link]
index_rows.follow = lambda *ignored: None
began = time.monotonic()
for n in range({puts}):
    time.sleep(max(began + n / {rate} - time.monotonic(), 0))
    watched = {number} == 0 and n % {each} == 0
    user = -1 - n // {each} if watched else n
    feed.put(Entity(user_id=user, title="a title of some length", at=time.time()))
print({puts} / (time.monotonic() - began))
"""
_WATCHER = """
import json, time
lags = []
for n in range({watched}):
    while (row := by_user.model.objects.filter(user_id=-1 - n).first()) is None:
        time.sleep(0.02)
    lags.append(time.time() - feed.get(row.entity_id)["at"])
print(json.dumps(sorted(lags)))
"""
#: Ends when the cleaner works.
_AWAIT_CLEANER = """
import time
from sharded_orm.contrib.entities import index_rows
index_rows.follow = lambda *ignored: None
e = feed.put(Entity(user_id=0))
while not by_user.model.objects.filter(user_id=0, entity_id=e.id).exists():
    time.sleep(0.1)
"""
_WRITERS, _EACH = 4, 25


def _lags(own: Any, puts: int) -> tuple[list[float], float]:
    """Return after how many seconds index rows arrive that only the cleaner writes, and the puts per second."""
    from tests.integration.entities.site import PREAMBLE

    rate, own_puts = PUTS_PER_SECOND / _WRITERS, puts // _WRITERS
    with ExitStack() as ending:

        def start(*arguments: str) -> Any:
            process = own.start(*arguments)
            ending.callback(process.kill)
            return process

        start("manage.py", "entities", "clean", "-v", "0")
        own.run(_AWAIT_CLEANER)
        watcher = start("run", PREAMBLE + _WATCHER.format(watched=-(-own_puts // _EACH)))
        writers = [
            start(
                "run",
                PREAMBLE
                + _DYING_WRITER.format(puts=own_puts, rate=rate, number=number, each=_EACH),
            )
            for number in range(_WRITERS)
        ]
        outputs = [process.communicate() for process in (watcher, *writers)]
    lags, *rates = (json.loads(out) for out, _ in outputs)
    return lags, sum(rates)


#: Entities that an index is built for, and how much slower a writer may become.
BUILT, SLOWER = int(os.environ.get("ENTITIES_BUILT", 100_000)), 1.1
#: Seconds of the parts of a turn in which puts are compared: the build works its share of the time, and it pauses.
BUILDING, QUIET = 8.0, 3.0
#: Seconds of the third part for each entity. The build then works all the time, so that the run is short.
HASTE = 1e-5
_NOT_BUILT = 'index_states.set_state(by_user, "written")'
#: Stores entities without index rows, as those that are there before an index is declared.
_FILL = """
from collections import defaultdict
from django.db import IntegrityError
from sharded_orm.contrib.entities.properties import encode
bodies = [
    encode(feed.fields, {{"user_id": n, "title": f"a title of some length {{n}}"}}) for n in range(10007)
]
table, field = feed.model._meta.db_table, feed.model._meta.get_field("added_id")
columns, values = "added_id, id, updated, version, body", "%s, %s, '2026-01-01', 1, %s"
for first in range({first}, {last}, 10_000):
    ids = [uuid.uuid4() for _ in range(first, min(first + 10_000, {last}))]
    rows_by_shard = defaultdict(list)
    for id, number in runtime.strategy("accounts").locate_many(ids).items():
        rows_by_shard[number].append(id)
    for number, ids in rows_by_shard.items():
        alias = runtime.shard_in(runtime.group("accounts"), number).alias
        while True:
            added = field.clock.take(number, f"{{alias}}.{{table}}", len(ids))
            rows = [(new, id.hex, bodies[new % 10007]) for new, id in zip(added, ids)]
            try:
                with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
                    cursor.executemany(f"INSERT INTO {{table}} ({{columns}}) VALUES ({{values}})", rows)
            except IntegrityError:
                continue  # The other process has taken an id in the same millisecond.
            break
"""
_WRITER = """
import json, os, time
feed.indexes[:] = [by_user]
began, n, puts = time.monotonic(), 0, []
while not os.path.exists({stop!r}):
    n += 1
    time.sleep(max(began + n / {rate} - time.monotonic(), 0))
    start = time.monotonic()
    feed.put(Entity(user_id=n % 97, title="a title of some length"))
    puts.append((start, time.monotonic() - start))
print(json.dumps(puts))
"""
#: Puts per second beside the build, whose process gives way to others.
BESIDE, NICE = 200, 10
#: Builds the index as the command does. While a file exists, it pauses after its batch, or does not wait.
_BUILDER = """
import os, time
from sharded_orm.contrib.entities import index_build
os.nice({nice})
def pause(seconds):
    if not os.path.exists({hasty!r}):
        time.sleep(seconds)
    while os.path.exists({held!r}):
        time.sleep(0.02)
*_, report = index_build.build(by_user, pause=pause)
assert report.is_served, report
"""


@contextmanager
def _entity_site(prefix: str) -> Iterator[Any]:
    """A site on two servers that flush each commit."""
    from tests.integration.entities.site import Site as EntitySite

    durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
    with mariadb.servers(2, **durable) as servers, TemporaryDirectory() as folder:
        nodes = [server.address.django() for server in servers]
        own = EntitySite(Path(folder), nodes, f"{prefix}_", "mysql")
        own.prepare()
        yield own


def entities(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Put entities whose index rows are on two servers, and clean them. Each commit is flushed."""
    with _entity_site(new_prefix()) as own:
        count = rounds.of(ENTITIES)
        program = _PROGRAM.format(calls=CALLS, rounds=rounds.count, entities=count)
        result = json.loads(own.run(program))
        lags, rate = _lags(own, rounds.of(20) * PUTS_PER_SECOND)
    yield at_most(
        PUT,
        "put an entity with two indexes",
        "three plain inserts on the same shards",
        summary(result["put"]),
    )
    for name, what in (
        ("cleaned", "the cleaner: marked entities/s, all index rows there"),
        ("written", "the same, all index rows missing"),
    ):
        speed = result[name]
        yield Line(what, "", f"{speed:,.0f}", f">= {CLEANED:,}", speed >= CLEANED)
    lag = lags[int(len(lags) * 0.99) - 1]
    yield Line(
        f"a lost index row is there again, at {rate:,.0f} puts/s: p99 in s",
        "",
        f"{lag:.2f}",
        f"<= {LAG}",
        lag <= LAG,
    )


def entity_index(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Build an index of many entities while a writer puts others."""
    from tests.integration.entities.site import PREAMBLE

    count = rounds.of(BUILT)
    turns: list[tuple[float, float, float]] = []
    with _entity_site(new_prefix()) as own:
        own.run("from sharded_orm.contrib.entities import index_states\n" + _NOT_BUILT)
        halves = [(0, count // 2), (count // 2, count)]
        fills = [own.start("run", PREAMBLE + _FILL.format(first=a, last=b)) for a, b in halves]
        for fill in fills:
            _finish(fill)
        stop, held, hasty = (own.folder / name for name in ("stop", "held", "hasty"))
        writer = own.start("run", PREAMBLE + _WRITER.format(stop=str(stop), rate=BESIDE))
        time.sleep(QUIET)
        began = time.monotonic()
        program = _BUILDER.format(held=str(held), hasty=str(hasty), nice=NICE)
        builder = own.start("run", PREAMBLE + program)
        # The machine may be slower for a while. So the build pauses now and then, and each turn
        # compares the writer during the build and without it.
        while builder.poll() is None:
            at = time.monotonic()
            _wait(builder, BUILDING)
            paused = time.monotonic()
            held.touch()
            time.sleep(QUIET)
            if paused - at > BUILDING / 2:  # The last turn may be short.
                turns.append((at, paused, time.monotonic()))
            hasty.touch()
            held.unlink()
            _wait(builder, HASTE * count)
            hasty.unlink()
        seconds = time.monotonic() - began
        stop.touch()
        _finish(builder)
        starts, taken = zip(*json.loads(_finish(writer)), strict=True)

    def puts(first: float, last: float) -> list[float]:
        return sorted(taken[bisect(starts, first) : bisect(starts, last)])

    for what, measure, is_goal in (
        ("mean", mean, True),
        ("p99", lambda some: some[int(len(some) * 0.99)], False),
    ):
        yield at_most(
            SLOWER,
            f"put while an index of {count:,} entities is built, in {seconds:,.0f} s: {what}",
            "put while the build pauses",
            summary([(measure(puts(*turn[:2])), measure(puts(*turn[1:]))) for turn in turns]),
            goal=is_goal,
        )


def _wait(process: Any, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _finish(process: Any) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return str(out)
