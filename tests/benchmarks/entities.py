"""Times puts of entities with two indexes, and the cleaner."""

from __future__ import annotations

import json
import os
import signal
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
#: Entities or rows per second that the build goes through at most.
BUILD_RATE = 2_000
#: Seconds of a turn with the build, and of one without.
BUILDING, QUIET = 8.0, 3.0
_FILL = """
from sharded_orm.contrib.entities import index_states
from sharded_orm.contrib.entities.properties import encode
index_states.set_state(by_user, "written")
def row(n):
    body = encode(feed.fields, {{"user_id": n % 10007, "title": f"a title of some length {{n}}"}})
    return feed.model(id=uuid.uuid4(), updated=moment(n), version=1, body=body)
for first in range(0, {count}, 10_000):
    feed.model.objects.bulk_create(map(row, range(first, min(first + 10_000, {count}))))
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
#: Puts per second beside the build.
BESIDE = 200


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
        own.run(_FILL.format(count=count))
        stop = own.folder / "stop"
        writer = own.start("run", PREAMBLE + _WRITER.format(stop=str(stop), rate=BESIDE))
        time.sleep(QUIET)
        build = ["index", "build", "feed.index_user", "--rate", str(BUILD_RATE)]
        builder = own.start("manage.py", "entities", *build)
        # The machine may be slower for a while. So the build is stopped now and then, and each turn
        # compares the writer during the build and without it.
        while builder.poll() is None:
            began = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                builder.wait(BUILDING)
            stopped = time.monotonic()
            builder.send_signal(signal.SIGSTOP)
            time.sleep(QUIET)
            if stopped - began > BUILDING / 2:  # The last turn may be short.
                turns.append((began, stopped, time.monotonic()))
            builder.send_signal(signal.SIGCONT)
        stop.touch()
        for process in (builder, writer):
            out, err = process.communicate()
            assert process.returncode == 0, err
    starts, taken = zip(*json.loads(out), strict=True)

    def seconds(first: float, last: float) -> float:
        return mean(taken[bisect(starts, first) : bisect(starts, last)])

    building = sum(stopped - began for began, stopped, _ in turns)
    yield at_most(
        SLOWER,
        f"put while an index of {count:,} entities is built, in {building:,.0f} s",
        "put while the build is stopped",
        summary([(seconds(*turn[:2]), seconds(*turn[1:])) for turn in turns]),
    )
