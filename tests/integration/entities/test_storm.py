"""Writers and cleaners are killed at random, and a node goes down, while entities are read all the time.

A *read* is one ``get()``, one ``get_many()`` of three ids, or one page of ``get_all()``; ``pages`` counts the
last kind. Each entity of each read is compared with what its writer has recorded. Readers count
themselves, so reads that were refused while a node was down are counted as ``failed``.

In the environment, ``STORM_READS`` is the number of reads after which a long storm ends, ``STORM_SECONDS`` its
longest time, ``STORM_READERS`` the number of reading processes, and ``STORM_PAUSE`` the longest pause of a writer
between two writes in seconds. This is a storm of a million reads, a third on each database::

    STORM_READS=340000 STORM_PAUSE=0.5 python -m pytest --ds=tests.settings.sqlite --long -s \\
        -o faulthandler_timeout=0 tests/integration/entities/test_storm.py -k long_storm
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.entities.outages import Node, mortal_site
from tests.integration.entities.record import Record
from tests.integration.entities.site import PREAMBLE, Site
from tests.integration.imports.site import BACKENDS
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

#: A node is down now and then. Nobody knows whether what was under way is committed.
_COMMON = """
import json, os, time
from django.db import InterfaceError, OperationalError
from sharded_orm.exceptions import ScatterError
from tests.integration.entities.record import *
DOWN = (OperationalError, InterfaceError, ScatterError)
record = Record({record!r}, {writers})
random.seed({seed})
def own_entry(number, change):
    user, link, at = properties_of(number, change)
    return dict(user_id=user, link=link, published=moment(at), n=change, title="own")
"""
_BEFORE = """
for n in range(ANCHORS):
    feed.put(entry(n % 5, f"l{n % LINKS}", n, title="anchor", slug=f"anchor {n}", number=n, id=id_of("anchor", n)))
for n in range(COUNTERS):
    feed.put(entry(9, "counters", n, id=id_of("counter", n), n=0))
for n in range(record.own):
    record.done[n] = record.begun[n] = 1
    feed.put(Entity(own_entry(n, 1), id=id_of("own", n)))
"""
_WRITER = """
passing, failed = [], 0
while not os.path.exists({stop!r}):
    time.sleep(random.uniform(0, {pause}))
    what = random.random()
    try:
        if what < 0.1 or not passing:
            passing.append(feed.put(entry(random.randrange(5), f"l{{random.randrange(3)}}", random.randrange(30), title="x")).id)
        elif what < 0.2 or len(passing) > 8:
            feed.delete(passing.pop())
        elif what < 0.3:
            e = feed.get(random.choice(passing))
            e["slug"] = f"s{{random.randrange(6)}}"
            try:
                feed.put(e)
            except UniqueValueTaken:
                pass
        elif what < 0.6:
            n = random.randrange(COUNTERS)
            place = record.place(n, {writer})
            record.begun[place] += 1
            with feed.edit(id_of("counter", n)) as counter:
                counter["n"] += 1
            record.done[place] += 1
        else:
            number = {writer} * OWN + random.randrange(OWN)
            record.begun[number] = change = record.begun[number] + 1
            if what < 0.8:
                e = feed.get(id_of("own", number))
                e.update(own_entry(number, change))
                feed.put(e)
            else:
                with feed.edit(id_of("own", number)) as e:
                    e.update(own_entry(number, change))
            record.done[number] = change
    except (EntityNotFound, EntityChanged):
        # A write that was under way when a node or a process went down has been committed since.
        pass
    except DOWN:
        failed += 1
        connections.close_all()
print(json.dumps(dict(writes_failed=failed)))
"""
_READER = """
{ablation}
counts = dict(reads=0, pages=0, entities=0, wrong=0, short=0, doubled=0, failed=0)
constant = [
    *(id_of("anchor", n) for n in range(ANCHORS)),
    *(id_of("counter", n) for n in range(COUNTERS)),
    *(id_of("own", n) for n in range(record.own)),
]
def judge(entities, before):
    counts["reads"] += 1
    counts["entities"] += len(entities)
    counts["wrong"] += sum(not record.is_right(e, before) for e in entities)
    record.reads[{reader}] = counts["reads"]
def read_by_ids():
    for id in random.choices(constant, k=5):
        before = record.done.tolist()
        judge([feed.get(id)], before)
    before, ids = record.done.tolist(), random.sample(constant, 3)
    found = feed.get_many(ids)
    judge(found.values(), before)
    counts["short"] += found.keys() != {{*ids}}
def read_pages():
    link, after, last, anchors = f"l{{random.randrange(LINKS)}}", None, [], 0
    while True:
        limit, before = random.choice([1, 5, 20]), record.done.tolist()
        page = by_link.get_all(link=link, limit=limit, after=after)
        judge(page, before)
        counts["pages"] += 1
        counts["wrong"] += sum(e["link"] != link for e in page)
        counts["short"] += len(page) < limit and page.after is not None
        counts["doubled"] += len(page) - len({{e.id for e in page}})
        times = [e["published"] for e in [*last, *page]]
        counts["wrong"] += times != sorted(times, reverse=True)
        anchors += sum(e["title"] == "anchor" for e in page)
        last, after = page[-1:], page.after
        if after is None:
            counts["short"] += anchors * LINKS != ANCHORS
            return
        read_by_ids()
while not os.path.exists({stop!r}):
    try:
        read_pages()
    except DOWN:
        counts["failed"] += 1
        connections.close_all()
        time.sleep(0.02)  # The node gets the processor for its start.
print(json.dumps(counts))
"""
#: Starts before the writers end, so that the start of a process is not part of the measured time.
_AFTER = """
while not os.path.exists({stopped!r}):
    time.sleep(0.01)
stopped_at = time.time()
while marks() or differences():
    if time.time() - stopped_at > {patience}:
        break
    time.sleep(0.05)
print(round(time.time() - stopped_at, 2))
print(differences(), marks())
entities = [e for link in range(LINKS) for e in every(by_link, link=f"l{{link}}")]
slugs = [e["slug"] for e in entities if e.get("slug")]
print(len(slugs) - len(set(slugs)))
counters = feed.get_many(id_of("counter", n) for n in range(COUNTERS)).values()
print([e.id.int for e in (*entities, *counters) if not record.is_right(e, record.done)])
"""
_CLEAN = ["manage.py", "entities", "clean", "--interval", "0.2", "-v", "0", "--whole-every"]


def _storm(
    site: Site,
    node: Node,
    folder: Path,
    *,
    reads: int,
    seconds: float = float("inf"),
    writers: int,
    readers: int,
    pause: float = 0,
    whole_every: float = 0,
    kill_after: float = 0.8,
    ablation: str = "",
) -> dict[str, int]:
    """Let writers, readers and two cleaners run, kill one of them now and then, and a node.

    :param reads: the number of reads of all readers after which the storm ends.
    :param seconds: the time after which it ends in any case.
    :param pause: the longest pause of a writer between two writes, in seconds.
    :param whole_every: seconds between two passes of a cleaner over all entities.
    :param kill_after: the longest time until a cleaner is killed, in seconds.
    :returns: the counts of the readers.
    """
    clean = [*_CLEAN, str(whole_every)]
    stop, stopped, chance = folder / "stop", folder / "stopped", random.Random(3)
    path, numbers = str(folder / "record"), iter(range(10**6))
    record = Record(path, writers)

    def program(code: str, **values: object) -> str:
        common = _COMMON.format(record=path, writers=writers, seed=next(numbers))
        return common + (code.format(stop=str(stop), **values) if values else code)

    with ExitStack() as ending:

        def start(*arguments: str) -> PythonProcess:
            process = site.start(*arguments)
            ending.callback(process.kill)
            return process

        def run(code: str, **values: object) -> PythonProcess:
            return start("run", PREAMBLE + program(code, **values))

        def start_writer(n: int) -> PythonProcess:
            return run(_WRITER, writer=n, pause=pause)

        site.run(program(_BEFORE))
        writing = [start_writer(n) for n in range(writers)]
        reading = [run(_READER, reader=n, ablation=ablation) for n in range(readers)]
        cleaners = [start(*clean) for _ in range(2)]
        after = run(_AFTER, stopped=str(stopped), patience=PATIENCE)
        is_over, until = False, time.monotonic() + seconds
        while not is_over:
            time.sleep(chance.uniform(kill_after / 4, kill_after))
            _kill(cleaners, n := chance.randrange(2))
            cleaners[n] = start(*clean)
            if chance.random() < 0.3:
                _kill(writing, n := chance.randrange(writers))
                writing[n] = start_writer(n)
            is_over = sum(record.reads) >= reads or time.monotonic() > until
            if chance.random() < 0.2 or is_over:
                node.kill()
                time.sleep(chance.uniform(0.1, 1.5))
                node.start()
            for process in (*writing, *reading):
                assert process.poll() is None, process.communicate()
        writing.pop().kill()
        stop.touch()
        counts: dict[str, int] = {}
        for process in writing:
            _add(counts, process)
        stopped.touch()
        out = _output(after)
        for process in reading:
            _add(counts, process)
        for cleaner in cleaners:
            cleaner.send_signal(signal.SIGTERM)
            cleaner.communicate(timeout=PATIENCE)
    seconds, *problems = out.splitlines()
    print(f"{counts}; nothing missing or stale after {seconds} s; {sum(record.done)} writes")
    assert problems == ["[] 0", "0", "[]"]
    return counts


def _kill(processes: list[PythonProcess], n: int) -> None:
    processes[n].kill()
    processes[n].communicate()  # Closes its pipes. A long storm kills very many.


def _output(process: PythonProcess) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def _add(counts: dict[str, int], process: PythonProcess) -> None:
    for name, number in json.loads(_output(process)).items():
        counts[name] = counts.get(name, 0) + number


def test_reads_are_right_in_a_storm(tmp_path: Path) -> None:
    with mortal_site("sqlite", tmp_path) as (site, node):
        counts = _storm(site, node, tmp_path, reads=300, writers=2, readers=1)
    assert counts["wrong"] == counts["short"] == counts["doubled"] == 0


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_are_right_in_a_long_storm(backend: str, tmp_path: Path) -> None:
    reads = int(os.environ.get("STORM_READS", 20_000))
    seconds = float(os.environ.get("STORM_SECONDS", "inf"))
    readers = int(os.environ.get("STORM_READERS", 3))
    pause = float(os.environ.get("STORM_PAUSE", 0.2))
    with mortal_site(backend, tmp_path) as (site, node):
        counts = _storm(
            site,
            node,
            tmp_path,
            reads=reads,
            seconds=seconds,
            writers=8,
            readers=readers,
            pause=pause,
            whole_every=5,
            kill_after=8,
        )
    assert counts["failed"] > 0
    assert counts["wrong"] == counts["short"] == counts["doubled"] == 0


@pytest.mark.long
def test_the_storm_catches_reads_without_the_second_filter(tmp_path: Path) -> None:
    ablation = "by_link.is_current = lambda entity, values: True"
    with mortal_site("sqlite", tmp_path) as (site, node):
        counts = _storm(site, node, tmp_path, reads=1000, writers=2, readers=1, ablation=ablation)
    assert counts["wrong"] > 0
