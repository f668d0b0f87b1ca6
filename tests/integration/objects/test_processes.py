"""Processes that change the same objects at the same time, mirrors of mappings, and large bodies."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from tests.integration.imports.site import BACKENDS, site_fixture
from tests.integration.objects.gallery_site import GallerySite
from tests.patience import PATIENCE
from tests.services import memcached as memcached_service

gallery = site_fixture(GallerySite)


@pytest.mark.parametrize("gallery", BACKENDS, indirect=True)
def test_edits_of_two_processes_lose_nothing(gallery: GallerySite) -> None:
    pk = gallery.run("print(Picture.objects.create().pk)")
    edits = f"""
for n in range(40):
    picture = Picture.objects.get({pk})
    with picture.edit():
        picture.count += 1
        picture.seen_by[sys.argv[0] + "%s"] = n
"""
    gallery.run_together(edits % "a", edits % "b")
    count, seen, version = gallery.run(
        f"p = Picture.objects.get({pk}); print(json.dumps([p.count, len(p.seen_by), p.version]))"
    )
    assert (count, seen, version) == (80, 2, 81)


def test_saves_of_eight_processes_lose_nothing_or_say_so(gallery: GallerySite) -> None:
    pk = gallery.run("print(Picture.objects.create().pk)")
    saves = f"""
saved = refused = 0
while saved < 5:
    picture = Picture.objects.get({pk})
    picture.count += 1
    try:
        picture.save()
    except ConcurrentEdit:
        refused += 1
    except OperationalError as exc:
        assert "lock" in str(exc), exc  # SQLite
    else:
        saved += 1
print(json.dumps([saved, refused]))
"""
    answers = gallery.run_together(*[saves] * 8)
    count = gallery.run(f"print(Picture.objects.get({pk}).count)")
    assert count == sum(saved for saved, _ in answers) == 40


def test_one_of_many_creators_wins_a_value(gallery: GallerySite) -> None:
    create = """
answers = []
for n in range(10):
    picture, created = PicturesByName.objects.find_or_create(f"name {n}", count=n)
    answers.append([picture.pk, created, picture.count])
print(json.dumps(answers))
"""
    answers = gallery.run_together(*[create] * 4)
    for number, of_value in enumerate(zip(*answers, strict=True)):
        assert len({pk for pk, _, _ in of_value}) == 1
        assert sum(created for _, created, _ in of_value) == 1
        assert {count for _, _, count in of_value} == {number}
    assert gallery.run("print(Picture.objects.scatter().count())") == 10


def test_a_mirror_mapping_is_the_other_direction(gallery: GallerySite) -> None:
    answer = gallery.run("""
albums = [Album.objects.using(f"pins_{n:05d}").create(name=str(n)) for n in range(4)]
picture = Picture.objects.using("pins_00003").create()
other = Picture.objects.using("pins_00001").create()
for n, album in enumerate(albums):
    AlbumPictures.objects.add(album, picture, sequence=n)
    AlbumPictures.objects.add(album, other, sequence=n)
page = PictureAlbums.objects.page(picture, size=3)
names = [[album.name for album in page]]
AlbumPictures.objects.move(albums[1], picture, sequence=7)
AlbumPictures.objects.remove(albums[0], picture)
albums[2].delete()
names.append([album.name for album in PictureAlbums.objects.page(picture, size=3)])
names.append(PictureAlbums.objects.count(picture))
names.append(PictureAlbums.objects.contains(picture, albums[3]))
names.append(sorted({row._state.db for row in PictureAlbums.objects.filter(target_id=picture.pk)}))
names.append([album.name for album in PictureAlbums.objects.page(picture, after=page.next)])
try:
    PictureAlbums.objects.add(picture, albums[0])
except Exception as exc:
    names.append(type(exc).__name__)
print(json.dumps(names))
""")
    assert answer == [
        ["0", "1", "2"], ["3", "1"], 3, True, ["pins_00003"], ["3", "1"], "MirrorReadOnly",
    ]  # fmt: skip


@pytest.mark.parametrize("gallery", ["mariadb", "postgresql"], indirect=True)
def test_what_is_brought_back_is_never_removed_if_deletions_have_receivers(
    gallery: GallerySite,
) -> None:
    # A receiver makes Django read the rows first and delete them by their ids then. The receiver
    # of this test writes between the two, as another process would.
    answer = gallery.run("""
import threading
from django.db import transaction
from django.db.models.signals import pre_delete

def write(row):
    # Another process would wait for a lock. Here, the error NOWAIT tells that it would.
    alias = row._state.db
    with transaction.atomic(using=alias):
        if isinstance(row, PicturesByName):
            rows = PicturesByName.objects.using(alias).filter(pk=row.pk)
            rows.select_for_update(nowait=True).get()
            rows.update(target_id=pictures[0].pk)
        else:
            rows = Picture.objects.with_deleted().using(alias).filter(pk=row.pk)
            locked = rows.select_for_update(nowait=True).get()
            locked.active = True
            locked.save()

def receive(instance, **kwargs):
    def run():
        try:
            write(instance)
            written.append(type(instance).__name__)
        except DatabaseError:
            pass
        finally:
            connections.close_all()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

written = []
pictures = [Picture.objects.using(f"pins_{n:05d}").create() for n in (0, 0, 1)]
for picture in pictures[1:]:
    picture.delete()
PicturesByName.objects.claim("a", pictures[1])
pre_delete.connect(receive)
counts = [Picture.objects.purge(), int(PicturesByName.objects.release("a", pictures[1]))]
left = [picture.pk for picture in Picture.objects.with_deleted().scatter()]
assert left[:1] == [pictures[0].pk]
print(json.dumps([written, counts, len(left), PicturesByName.objects.scatter().count()]))
""")
    assert answer == [[], [2, 1], 1, 0]


@pytest.mark.parametrize("gallery", ["mariadb"], indirect=True)
def test_a_forked_process_asks_several_nodes_as_its_parent_does(gallery: GallerySite) -> None:
    status, counts = gallery.run("""
import os, signal
from sharded_orm import uncached
pks = [Picture.objects.using(f"pins_{n:05d}").create(count=n).pk for n in range(4)]

def read():
    with uncached():
        return sorted(picture.count for picture in Picture.objects.get_many(pks).values())

read()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(read() != [0, 1, 2, 3])
print(json.dumps([os.waitpid(child, 0)[1], read()]))
""")
    assert (status, counts) == (0, [0, 1, 2, 3])


@pytest.mark.parametrize("gallery", ["mariadb"], indirect=True)
def test_a_body_above_the_packet_size_is_refused_and_harms_nothing(gallery: GallerySite) -> None:
    stored, count = gallery.run("""
picture = Picture.objects.create()
errors = 0
try:
    with picture.edit():
        picture.seen_by = {"x": "x" * 70_000_000}
except DatabaseError as exc:
    errors += 1
with picture.edit():
    picture.count = errors
stored = Picture.objects.get(picture.pk)
print(json.dumps([len(stored.seen_by), stored.count]))
""")
    assert (stored, count) == (0, 1)


@pytest.mark.parametrize(
    ("objects", "lists"),
    [
        ("memcached", "redis"),
        pytest.param("redis", "memcached", marks=pytest.mark.long),
        pytest.param("memcached", "memcached", marks=pytest.mark.long),
        pytest.param("redis", "redis", marks=pytest.mark.long),
    ],
)
def test_what_a_process_has_written_is_never_read_stale(
    gallery: GallerySite, objects: str, lists: str, memcached: Any, redis_server: Any
) -> None:
    gallery.content["caches"] = {"memcached": memcached.django(), "redis": redis_server.django()}
    gallery.content["sharded_orm"]["CACHE"] |= {
        "OBJECTS": objects,
        "LISTS": lists,
        # The servers are shared by tests, and their sites may have objects with the same ids.
        "PREFIX": secrets.token_hex(4),
        "TIMEOUT": 0.9,
        "COMMIT_WITHIN": 1,
        "QUARANTINE": 2.1,
    }
    gallery.save()
    album, *pks = gallery.run("""
rows = [Album.objects.create(), *(Picture.objects.create() for _ in range(4))]
for picture in rows[1:]:
    AlbumPictures.objects.add(rows[0], picture)
print(json.dumps([row.pk for row in rows]))
""")
    write_and_read = f"""
from sharded_orm.exceptions import CacheUnavailable
pks, hits, least = {pks}, 0, dict.fromkeys({pks}, 0)
number = 0
while hits < 25:
    number += 1
    pk = pks[number % 4]
    if number % 5 == 0:
        try:
            with Picture.objects.get(pk).edit() as picture:
                picture.count += 1
            least[pk] = picture.count
            AlbumPictures.objects.move({album}, pk, number)
        except CacheUnavailable:
            continue  # A loaded machine; nothing was written.
    rows = Picture.objects.get_many(pks)
    page = [row.pk for row in AlbumPictures.objects.page({album})]
    for each in pks:
        assert rows[each].count >= least[each], (each, rows[each].count, least)
        least[each] = rows[each].count
    assert sorted(page) == sorted(pks)
    hits = min(m.cache.statistics().get(n, 0) for m, n in ((Picture, "object_hits"), (AlbumPictures, "list_hits")))
print(json.dumps(number))
"""
    gallery.run_together(*[write_and_read] * 3)
    totals = gallery.run(f"""
page = AlbumPictures.objects.page({album})
print(json.dumps([len(page), sum(p.count for p in page) == sum(p.version - 1 for p in page)]))
""")
    assert totals == [4, True]


def test_a_batch_is_complete_if_one_of_two_cache_servers_is_down(gallery: GallerySite) -> None:
    with memcached_service.servers(2) as (first, second):
        locations = [server.django()["LOCATION"] for server in (first, second)]
        gallery.content["caches"] = {"default": {**first.django(), "LOCATION": locations}}
        gallery.save()
        pks = gallery.run(
            "print(json.dumps([Picture.objects.using(f'pins_{n % 4:05d}').create(count=n).pk"
            " for n in range(12)]))"
        )
        second.kill()
        counts, read_from_cache = gallery.run(f"""
import time
from sharded_orm import cache_scope
counts = []
deadline = time.monotonic() + {PATIENCE}
while time.monotonic() < deadline:
    with cache_scope():
        counts = [[p.count for p in Picture.objects.get_many({pks}).values()] for _ in range(2)]
    hits = Picture.cache.statistics().get("object_hits", 0)
    if hits or counts != [list(range(12))] * 2:
        break
print(json.dumps([counts, hits]))
""")
    assert counts == [list(range(12))] * 2
    assert 0 < read_from_cache < 12
