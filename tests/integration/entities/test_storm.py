"""Writers and cleaners are killed at random, and a node goes down, while pages are read all the time.

``STORM_SECONDS`` in the environment changes the length of the long storms, and ``STORM_PAUSE`` the longest
pause of a writer between two writes in seconds: with 0.2, most of the processor time is for readers.
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
from tests.integration.entities.site import PREAMBLE, Site
from tests.integration.imports.site import BACKENDS
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

#: Entities that nobody changes. Every list of their link has them, whatever happens around them.
_BEFORE = """
for n in range(30):
    feed.put(entry(n % 5, f"l{n % 3}", n, title="anchor", slug=f"anchor {n}"))
for n in range(8):
    feed.put(entry(9, "counters", n, id=uuid.UUID(int=n + 1), n=0))
"""
#: A node is down now and then. Nobody knows whether what was under way is committed.
_OUTAGES = """
import json, os
from django.db import InterfaceError, OperationalError
from sharded_orm.exceptions import ScatterError
DOWN = (OperationalError, InterfaceError, ScatterError)
"""
_WRITER = """
import time
random.seed({seed})
edits, uncertain, own, failed = [0] * 8, [0] * 8, [], 0
while not os.path.exists({stop!r}):
    time.sleep(random.uniform(0, {pause}))
    what = random.random()
    try:
        if (what < 0.3 and len(own) < 500) or not own:
            own.append(feed.put(entry(random.randrange(5), f"l{{random.randrange(3)}}", random.randrange(30), title="x")).id)
        elif what < 0.4:
            feed.delete(own.pop())
        elif what < {edits}:
            n = random.randrange(8)
            uncertain[n] += 1
            with feed.edit(uuid.UUID(int=n + 1)) as counter:
                counter["n"] += 1
            uncertain[n] -= 1
            edits[n] += 1
        elif what < 0.7:
            e = feed.get(random.choice(own))
            e["slug"] = f"s{{random.randrange(6)}}"
            try:
                feed.put(e)
            except UniqueValueTaken:
                pass
        else:
            e = feed.get(random.choice(own))
            e["user_id"], e["link"], e["published"] = random.randrange(5), f"l{{random.randrange(3)}}", moment(random.randrange(30))
            feed.put(e)
    except EntityNotFound:
        pass
    except DOWN:
        failed += 1
        connections.close_all()
print(json.dumps([edits, uncertain, failed]))
"""
_READER = """
{ablation}
random.seed({seed})
counts = dict(reads=0, entities=0, wrong=0, short=0, doubled=0, failed=0)
while not os.path.exists({stop!r}):
    link, after, found = f"l{{random.randrange(3)}}", None, []
    while True:
        limit = random.choice([1, 5, 20])
        try:
            page = by_link.get_all(link=link, limit=limit, after=after)
        except DOWN:
            counts["failed"] += 1
            connections.close_all()
            break
        counts["reads"] += 1
        counts["wrong"] += sum(e["link"] != link for e in page)
        counts["short"] += len(page) < limit and page.after is not None
        counts["doubled"] += len(page) - len({{e.id for e in page}})
        times = [e["published"] for e in [*found[-1:], *page]]
        counts["wrong"] += times != sorted(times, reverse=True)
        found += page
        after = page.after
        if after is None:
            counts["short"] += sum(e["title"] == "anchor" for e in found) != 10
            break
    counts["entities"] += len(found)
print(json.dumps(counts))
"""
_AFTER = """
import time
while marks() or differences():
    if time.time() - {stopped_at} > {patience}:
        break
    time.sleep(0.05)
print(round(time.time() - {stopped_at}, 2))
print(differences(), marks())
slugs = [s for s in (e.get("slug") for e in every(by_link, link="l0") + every(by_link, link="l1") + every(by_link, link="l2")) if s]
print(len(slugs) - len(set(slugs)))
print([feed.get(uuid.UUID(int=n + 1))["n"] for n in range(8)])
"""
_CLEAN = ["manage.py", "entities", "clean", "--interval", "0.2", "-v", "0", "--whole-every"]


def _storm(
    site: Site,
    node: Node,
    folder: Path,
    *,
    seconds: float,
    writers: int,
    readers: int,
    pause: float = 0,
    whole_every: float = 0,
    kill_after: float = 0.8,
    ablation: str = "",
) -> dict[str, int]:
    """Let writers, readers and two cleaners run, kill one of them now and then, and a node.

    :param pause: the longest pause of a writer between two writes, in seconds.
    :param whole_every: seconds between two passes of a cleaner over all entities.
    :param kill_after: the longest time until a cleaner is killed, in seconds.
    :returns: the counts of the readers.
    """
    clean = [*_CLEAN, str(whole_every)]
    stop, chance = str(folder / "stop"), random.Random(3)
    site.run(_BEFORE)
    with ExitStack() as ending:

        def start(*arguments: str) -> PythonProcess:
            process = site.start(*arguments)
            ending.callback(process.kill)
            return process

        def start_writer(seed: int, edits: float) -> PythonProcess:
            return start(
                "run",
                PREAMBLE
                + _OUTAGES
                + _WRITER.format(seed=seed, stop=stop, edits=edits, pause=pause),
            )

        writing = [start_writer(n, 0.6) for n in range(writers)]
        doomed = start_writer(99, 0)  # Nobody learns what it has written.
        reading = [
            start(
                "run",
                PREAMBLE + _OUTAGES + _READER.format(seed=n, stop=stop, ablation=ablation),
            )
            for n in range(readers)
        ]
        cleaners = [start(*clean) for _ in range(2)]
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            time.sleep(chance.uniform(kill_after / 4, kill_after))
            n = chance.randrange(2)
            cleaners[n].kill()
            cleaners[n].communicate()  # Closes its pipes. A long storm kills very many.
            cleaners[n] = start(*clean)
            if chance.random() < 0.2 or time.monotonic() > began + seconds:
                node.kill()
                time.sleep(chance.uniform(0.1, 1.5))
                node.start()
        doomed.kill()
        Path(stop).touch()
        written = [json.loads(_output(process)) for process in writing]
        after = site.run(_AFTER.format(stopped_at=time.time(), patience=PATIENCE)).splitlines()
        counts: dict[str, int] = {}
        for process in reading:
            for name, number in json.loads(_output(process)).items():
                counts[name] = counts.get(name, 0) + number
        for cleaner in cleaners:
            cleaner.send_signal(signal.SIGTERM)
            cleaner.communicate(timeout=PATIENCE)
    print(counts, sum(failed for *_, failed in written), "writes failed;", after)
    assert after[1:3] == ["[] 0", "0"]
    edits, uncertain = (
        [sum(of_all) for of_all in zip(*(process[which] for process in written), strict=True)]
        for which in (0, 1)
    )
    for counter, certain, perhaps in zip(json.loads(after[3]), edits, uncertain, strict=True):
        assert certain <= counter <= certain + perhaps
    return counts


def _output(process: PythonProcess) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def test_pages_are_right_in_a_storm(tmp_path: Path) -> None:
    with mortal_site("sqlite", tmp_path) as (site, node):
        counts = _storm(site, node, tmp_path, seconds=2, writers=2, readers=1)
    assert counts["reads"] > 10 and counts["wrong"] == counts["short"] == counts["doubled"] == 0


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_are_right_in_a_long_storm(backend: str, tmp_path: Path) -> None:
    seconds = float(os.environ.get("STORM_SECONDS", 60))
    pause = float(os.environ.get("STORM_PAUSE", 0.05))
    with mortal_site(backend, tmp_path) as (site, node):
        counts = _storm(
            site,
            node,
            tmp_path,
            seconds=seconds,
            writers=8,
            readers=3,
            pause=pause,
            whole_every=1,
            kill_after=4,
        )
    assert counts["reads"] > 100 and counts["failed"] > 0
    assert counts["wrong"] == counts["short"] == counts["doubled"] == 0


@pytest.mark.long
def test_the_storm_catches_reads_without_the_second_filter(tmp_path: Path) -> None:
    ablation = "by_link.is_current = lambda entity, values: True"
    with mortal_site("sqlite", tmp_path) as (site, node):
        counts = _storm(site, node, tmp_path, seconds=4, writers=2, readers=1, ablation=ablation)
    assert counts["wrong"] > 0
