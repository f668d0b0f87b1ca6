"""Times puts of entities while an index of many others is built.

The build works 15 % of the time by default, so a million entities would take it some 15 minutes on
an idle machine. Puts are compared during some seconds of each part of the build; then the build
works all the time until it reaches the next part. From the time of its batches follows how long the
build would take if it always waited.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from tests.benchmarks.entities import entity_site
from tests.benchmarks.progress import tell
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary

#: Entities that an index is built for, and how much slower a writer may become.
BUILT, SLOWER = int(os.environ.get("ENTITIES_BUILT", 100_000)), 1.1
#: Seconds of a turn in which puts are compared: the build works its share of the time, and it pauses.
BUILDING, QUIET = 8.0, 3.0
#: Seconds between two lines about the progress.
TOLD_EVERY = 20.0
#: Stores entities without index rows on the shards of one node, as those that are there before an
#: index is declared. The server makes them: that is three times as fast as rows from here.
_FILL = """
from pathlib import Path
field, table = feed.model._meta.get_field("added_id"), feed.model._meta.db_table
layout, group = field.clock.layout, runtime.group("accounts")
millisecond = layout.pack(1, 0, 0) - layout.pack(0, 0, 0)
now = {{number: field.clock.take(number, f"{{number}}.{{table}}")[0] for number in {numbers}}}
for first in range(0, {count}, {chunk}):
    last = min(first + {chunk}, {count}) - 1
    for number in {numbers}:
        with connections[runtime.shard_in(group, number).alias].cursor() as cursor:
            cursor.execute(f'''
                INSERT INTO {{table}} (added_id, id, updated, version, body)
                SELECT %s + seq * %s, id, '2026-01-01', 1, SUBSTRING(COMPRESS(CONCAT(
                    '{{{{"user_id":', seq %% 10007, ',"title":"a title of some length ', seq, '"}}}}')), 5)
                FROM (SELECT seq, INSERT(INSERT(MD5(seq), 13, 1, '4'), 17, 1, '8') AS id FROM seq_{{first}}_to_{{last}}) AS candidates
                WHERE CONV(RIGHT(MD5(UNHEX(id)), 1), 16, 10) %% {shards} = %s
            ''', [now[number] - {count} * millisecond, millisecond, number])
    Path({told!r}).write_text(str(last + 1))
"""
_SHARDS, _CHUNK = 4, 20_000
#: Withdraws the index until it is built.
_NOT_BUILT = """
from sharded_orm.contrib.entities import index_states
index_states.set_state(by_user, "written")
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
#: Only root may be less nice meanwhile.
_BUILDER = """
import contextlib, json, os, time
from pathlib import Path
from sharded_orm.contrib.entities import index_build
own, waits = os.getpriority(os.PRIO_PROCESS, 0), 0.0
os.nice({nice})
def pause(seconds):
    global waits
    waits += seconds
    is_hasty = os.path.exists({hasty!r})
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, own if is_hasty else own + {nice})
    if not is_hasty:
        time.sleep(seconds)
    while os.path.exists({held!r}):
        time.sleep(0.02)
for batches, report in enumerate(index_build.build(by_user, pause=pause)):
    Path({told!r}).write_text(str(batches))
assert report.is_served and report.entities >= {count} and not report.removed, report
print(json.dumps([time.process_time(), waits / (1 - index_build.SHARE)]))
"""
#: The batches of a build for each entity: it writes its row, compares it, and compares its row.
_BATCHES = 3 / 900


def entity_index(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Build an index of many entities while a writer puts others."""
    from tests.integration.entities.site import PREAMBLE

    count = rounds.of(BUILT)
    with entity_site(new_prefix()) as own:
        own.run(_NOT_BUILT)
        _fill(own, PREAMBLE, count)
        stop, held, hasty, told = (own.folder / n for n in ("stop", "held", "hasty", "told"))
        writer = own.start("run", PREAMBLE + _WRITER.format(stop=str(stop), rate=BESIDE))
        time.sleep(QUIET)
        began = time.monotonic()
        program = _BUILDER.format(
            held=str(held), hasty=str(hasty), told=str(told), nice=NICE, count=count
        )
        builder = own.start("run", PREAMBLE + program)
        turns = _turns(builder, held, hasty, told, int(count * _BATCHES), rounds.count)
        seconds = time.monotonic() - began
        stop.touch()
        cpu, whole = json.loads(_finish(builder))
        starts, taken = zip(*json.loads(_finish(writer)), strict=True)
    tell(f"{len(turns)} turns; the build took {cpu:.0f} s of a processor")
    tell(
        f"{whole:,.0f} s would be its time if it had waited after each batch, as it does by default"
    )

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


def _fill(own: Any, preamble: str, count: int) -> None:
    fills = []
    for node in range(2):
        numbers = (2 * node, 2 * node + 1)
        told = own.folder / f"filled {node}"
        code = _FILL.format(
            numbers=numbers, shards=_SHARDS, count=count, chunk=_CHUNK, told=str(told)
        )
        fills.append((own.start("run", preamble + code), told))
    for node, (fill, told) in enumerate(fills):
        while fill.poll() is None:
            _wait(fill, TOLD_EVERY)
            tell(f"node {node}: {_number(told):,} of {count:,} entities are stored")
        _finish(fill)


def _turns(
    builder: Any, held: Path, hasty: Path, told: Path, batches: int, count: int
) -> list[tuple[float, float, float]]:
    """Return the times of turns: the build works from the first to the second, and pauses to the third.

    The machine may be slower for a while, so each turn compares neighbouring times. Between two
    turns, the build works without waiting, so that the run is short.
    """
    turns: list[tuple[float, float, float]] = []
    told_at = time.monotonic()
    for turn in range(1, count + 1):
        at = time.monotonic()
        _wait(builder, BUILDING)
        paused = time.monotonic()
        if builder.poll() is not None:
            break
        held.touch()
        time.sleep(QUIET)
        turns.append((at, paused, time.monotonic()))
        hasty.touch()
        held.unlink()
        while builder.poll() is None and (turn == count or _number(told) < batches * turn / count):
            _wait(builder, 0.1)
            if time.monotonic() - told_at > TOLD_EVERY:
                told_at = time.monotonic()
                tell(f"turn {turn} of {count}: {_number(told):,} of {batches:,} batches are done")
        hasty.unlink()
    builder.wait()
    return turns


def _number(path: Path) -> int:
    with suppress(FileNotFoundError):
        return int(path.read_text() or 0)  # Empty at the moment when it is written.
    return 0


def _wait(process: Any, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _finish(process: Any) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return str(out)
