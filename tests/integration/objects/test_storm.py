"""Pages of mappings are read from a shared cache while entries and objects change, and a node goes down.

``STORM_SECONDS`` in the environment changes the length of the storms, ``STORM_READERS`` the number of
readers, and ``STORM_PAUSE`` the longest pause of a writer between two writes in seconds: with 0.2,
most of the processor time is for readers. A read is one page. Each of its objects is checked, and
all pages of a walk together.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.entities.outages import Node, mortal_site_of
from tests.integration.imports.site import BACKENDS
from tests.integration.objects.gallery_site import PREAMBLE, GallerySite
from tests.patience import PATIENCE
from tests.python_process import PythonProcess
from tests.services import memcached

#: An album on each shard, with 30 pictures on all shards that nobody changes.
_BEFORE = """
albums = [Album.objects.using(f"pins_{n:05d}").create() for n in range(4)]
for n, album in enumerate(albums):
    for number in range(30):
        picture = Picture.objects.using(f"pins_{number % 4:05d}").create(count=number, seen_by={"album": n})
        AlbumPictures.objects.add(album, picture, sequence=10 * number)
print(json.dumps([album.pk for album in albums]))
"""
#: A node is down now and then, and a loaded machine may make the cache too slow for writers.
_COMMON = """
import os, random, time
from django.db import InterfaceError
from sharded_orm.exceptions import CacheUnavailable, ScatterError
DOWN = (OperationalError, InterfaceError, ScatterError, CacheUnavailable)
{ablation}
random.seed({seed})
albums = {albums}
counts = dict(reads=0, objects=0, wrong=0, short=0, doubled=0, stale=0, writes=0, failed=0)

def walk(n):
    # All pages of an album, one after the other.
    newest_first, size, after, pictures = random.random() < 0.3, random.choice([1, 7, 20, 50]), None, []
    while True:
        page = AlbumPictures.objects.page(albums[n], after=after, size=size, newest_first=newest_first)
        counts["reads"] += 1
        counts["objects"] += len(page)
        counts["wrong"] += sum(p.seen_by["album"] != n for p in page)
        counts["doubled"] += len(page) - len({{p.pk for p in page}})
        counts["short"] += len(page) < size and page.next is not None
        pictures += page
        after = page.next
        if after is None:
            break
    anchors = [p.count for p in pictures if p.count >= 0]
    counts["short"] += anchors != sorted(range(30), reverse=newest_first)
    return pictures
"""
#: Each picture is changed by one writer, which knows what every later page must have.
_WRITER = """
own = {{}}
while not os.path.exists({stop!r}):
    time.sleep(random.uniform(0, {pause}))
    pk = random.choice(list(own)) if own else None
    what, least = random.random(), 0
    try:
        if what < 0.3 or pk is None:
            n, pk = random.randrange(4), None
            picture = Picture.objects.using(f"pins_{{random.randrange(4):05d}}").create(count=-1, seen_by={{"album": n}})
            AlbumPictures.objects.add(albums[n], picture, sequence=random.randrange(300))
            pk = picture.pk
            own[pk] = n, -1
            wanted = [-1]
        elif what < 0.5:
            n, count = own[pk]
            AlbumPictures.objects.move(albums[n], pk, random.randrange(300))
            wanted = [count]
        elif what < 0.7:
            n, count = own[pk]
            with Picture.objects.get(pk).edit() as picture:
                picture.count = count - 1
            own[pk] = n, count - 1
            wanted = [count - 1]
        else:
            n, _ = own.pop(pk)
            if what < 0.85:
                AlbumPictures.objects.remove(albums[n], pk)
            else:
                Picture.objects.get(pk).delete()
            wanted = []
        counts["writes"] += 1
        counts["stale"] += [p.count for p in walk(n) if p.pk == pk] != wanted
        if counts["stale"] and {ends_early}:
            open({stop!r}, "w").close()
    except DOWN:
        # Nobody knows whether the change is committed.
        counts["failed"] += 1
        own.pop(pk, None)
        connections.close_all()
print(json.dumps(counts))
"""
_READER = """
while not os.path.exists({stop!r}):
    try:
        walk(random.randrange(4))
    except DOWN:
        counts["failed"] += 1
        connections.close_all()
counts["hits"] = AlbumPictures.cache.statistics().get("list_hits", 0) + Picture.cache.statistics().get("object_hits", 0)
print(json.dumps(counts))
"""
#: The process takes each list that it remembers for valid, whatever the guards say.
_OLD_LISTS = """
from sharded_orm.cache import process_cache
class Anything(str):
    def __ne__(self, other):
        return False
note = process_cache.ProcessCache.note
def note_for_ever(self, guard, query, listed):
    listed.revision = Anything(listed.revision)
    note(self, guard, query, listed)
process_cache.ProcessCache.note = note_for_ever
"""
#: The process takes each row that was valid twice for valid, whatever the guards say.
_OLD_ROWS = """
from sharded_orm.cache.batch_reader import BatchReader
BatchReader._have_same_guards = staticmethod(lambda kept, guard_of: True)
"""


def _storm(
    site: GallerySite,
    node: Node,
    *,
    seconds: float,
    writers: int,
    readers: int,
    pause: float = 0,
    ablation: str = "",
    outages: bool = True,
) -> dict[str, int]:
    """Let writers and readers run, and kill the node now and then. Return the sums of their counts.

    :param pause: the longest pause of a writer between two writes, in seconds.
    :param ablation: a program that spoils each process. The storm ends when it finds a stale object.
    :param outages: whether the node is killed (default: yes). A writer forgets the picture whose change
        has failed, so that few pictures live for long.
    """
    stop, chance = str(site.folder / "stop"), random.Random(3)
    with memcached.servers(1) as (server,), ExitStack() as ending:
        site.content["caches"] = {"default": server.django()}
        site.content["sharded_orm"]["CACHE"] |= {
            "TIMEOUT": 0.9,
            "COMMIT_WITHIN": 1,
            "QUARANTINE": 2.1,
        }
        site.save()
        albums = site.run(_BEFORE)

        def start(seed: int, program: str) -> PythonProcess:
            common = _COMMON.format(ablation=ablation, seed=seed, albums=albums)
            own = program.format(stop=stop, pause=pause, ends_early=bool(ablation))
            process = site.start("run", PREAMBLE + common + own)
            ending.callback(process.kill)
            return process

        programs = [_WRITER] * writers + [_READER] * readers
        processes = [start(seed, program) for seed, program in enumerate(programs)]
        began = time.monotonic()
        while time.monotonic() < began + seconds and not Path(stop).exists():
            time.sleep(chance.uniform(1, 4))
            if outages:
                node.kill()
                time.sleep(chance.uniform(0.1, 1.5))
                node.start()
        Path(stop).touch()
        counts: dict[str, int] = {}
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            for name, number in json.loads(out).items():
                counts[name] = counts.get(name, 0) + number
    print(counts)
    return counts


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_mappings_are_right_in_a_storm(backend: str, tmp_path: Path) -> None:
    seconds = float(os.environ.get("STORM_SECONDS", 60))
    pause = float(os.environ.get("STORM_PAUSE", 0))
    readers = int(os.environ.get("STORM_READERS", 3))
    with mortal_site_of(GallerySite, "gallery_", backend, tmp_path) as (site, node):
        counts = _storm(site, node, seconds=seconds, writers=8, readers=readers, pause=pause)
    assert min(counts["reads"], counts["writes"], counts["hits"]) > 100 and counts["failed"] > 0
    assert not {
        name: counts[name] for name in ("wrong", "short", "doubled", "stale") if counts[name]
    }


@pytest.mark.long
@pytest.mark.parametrize("ablation", [_OLD_LISTS, _OLD_ROWS], ids=["lists", "rows"])
def test_the_storm_catches_what_is_out_of_date(ablation: str, tmp_path: Path) -> None:
    with mortal_site_of(GallerySite, "gallery_", "sqlite", tmp_path) as (site, node):
        counts = _storm(
            site, node, seconds=60, writers=2, readers=1, ablation=ablation, outages=False
        )
    assert counts["stale"] > 0
