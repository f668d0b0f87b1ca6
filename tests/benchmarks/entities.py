"""Times puts of entities with two indexes, and the cleaner."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.progress import tell
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
import json, time
from sharded_orm.contrib.entities import index_rows
feed.indexes[:] = [by_user, by_link]
index_rows.follow = lambda *ignored: None
began, cpu = time.monotonic(), time.process_time()
for n in range({puts}):
    time.sleep(max(began + n / {rate} - time.monotonic(), 0))
    watched = {number} == 0 and n % {each} == 0
    user = -1 - n // {each} if watched else n
    feed.put(Entity(user_id=user, title="a title of some length", at=time.time()))
print(json.dumps([{puts} / (time.monotonic() - began), time.process_time() - cpu]))
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


@dataclass(frozen=True)
class _Repairs:
    """What became of entities whose writers have written no index rows.

    :ivar lags: seconds until the rows were there, of some entities, in their order.
    :ivar rate: puts per second.
    :ivar put: seconds that the processor worked in the writer for a put.
    :ivar repair: seconds that it worked in the cleaner for an entity.
    """

    lags: list[float]
    rate: float
    put: float
    repair: float


def _repairs(own: Any, puts: int) -> _Repairs:
    """Put entities and write none of their index rows, while a cleaner runs."""
    from tests.integration.entities.site import PREAMBLE

    rate, own_puts = PUTS_PER_SECOND / _WRITERS, puts // _WRITERS
    with ExitStack() as ending:

        def start(*arguments: str) -> Any:
            process = own.start(*arguments)
            ending.callback(process.kill)
            return process

        cleaner = start("manage.py", "entities", "clean", "-v", "0")
        own.run(_AWAIT_CLEANER)
        before = _processor_seconds(cleaner)
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
        repair = _processor_seconds(cleaner) - before
    lags, *written = (json.loads(out) for out, _ in outputs)
    rates, seconds = zip(*written, strict=True)
    return _Repairs(lags, sum(rates), sum(seconds) / puts, repair / puts)


def _processor_seconds(process: Any) -> float:
    """Return the seconds that the processor has worked for a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def entity_site(prefix: str) -> Iterator[Any]:
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
    with entity_site(new_prefix()) as own:
        count = rounds.of(ENTITIES)
        program = _PROGRAM.format(calls=CALLS, rounds=rounds.count, entities=count)
        result = json.loads(own.run(program))
        tell("entities: repairs")
        repairs = _repairs(own, rounds.of(20) * PUTS_PER_SECOND)
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
    lag = repairs.lags[int(len(repairs.lags) * 0.99) - 1]
    yield Line(
        f"a lost index row is there again, at {repairs.rate:,.0f} puts/s: p99 in s",
        "",
        f"{lag:.2f}",
        f"<= {LAG}",
        lag <= LAG,
        # If these times PUTS_PER_SECOND are more than the machine has left, the rate is lower.
        f"processor: {repairs.put * 1e3:.2f} ms for a put in the writer, {repairs.repair * 1e3:.2f} ms for its"
        " repair in the cleaner",
    )
