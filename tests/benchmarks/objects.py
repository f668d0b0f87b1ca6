"""Times pages of a mapping: with a warm cache against joins on one database, cold against single reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.report import Line, at_least, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary
from tests.services import mariadb, memcached

#: What the issue asks for: a warm page by joins, and single reads by a cold page.
WARM, COLD = 0.5, 10
PINS, SHARDS, CALLS = 50, 16, 20

_PROGRAM = """
import time
from django.db import models
from sharded_orm import uncached
from sharded_orm.models.cached import queryset
from sharded_orm.cache.reader import Reader
from sharded_orm import runtime

class PlainPicture(models.Model):
    data = models.JSONField()
    ts = models.DateTimeField()
    version = models.IntegerField(default=1)
    active = models.BooleanField(default=True)
    class Meta:
        app_label = "gallery"

class PlainEntry(models.Model):
    album_id = models.BigIntegerField()
    picture = models.ForeignKey(PlainPicture, models.CASCADE)
    sequence = models.BigIntegerField()
    class Meta:
        app_label = "gallery"
        indexes = [models.Index(fields=["album_id", "sequence", "picture"])]

with connections["default"].schema_editor() as editor:
    editor.create_model(PlainPicture)
    editor.create_model(PlainEntry)

seen = {{"by": "somebody whose name takes some room", "tags": ["cats", "boxes", "sleep"]}}
album = Album.objects.create(name="Cats")
for number in range({pins} * 2):
    picture = Picture.objects.using(f"pins_{{number % {shards}:05d}}").create(count=number, seen_by=seen)
    AlbumPictures.objects.add(album, picture)
    plain = PlainPicture.objects.using("default").create(data=picture.data, ts=picture.ts)
    PlainEntry.objects.using("default").create(album_id=1, picture=plain, sequence=number)

ahead = 0
queryset._reader = Reader(runtime.cache(), lambda: time.time() + ahead)
# Makes the guards of the tables; the writes have made the others. Then the quarantine is over.
Picture.objects.get_many(picture.pk + 1000 for picture in Picture.objects.scatter())
AlbumPictures.objects.page(Album.objects.create(near=album))
ahead = 60

def page():
    return [picture.count for picture in AlbumPictures.objects.page(album, size={pins})]

def joined():
    entries = PlainEntry.objects.using("default").filter(album_id=1, picture__active=True)
    entries = entries.select_related("picture").order_by("sequence", "picture_id")[:{pins} + 1]
    return [entry.picture.data["count"] for entry in entries][:{pins}]

ids = [picture.pk for picture in AlbumPictures.objects.page(album, size={pins})]

def batch():
    with uncached():
        return list(Picture.objects.get_many(ids))

def singly():
    with uncached():
        return [Picture.objects.get(pk).pk for pk in ids]

def seconds(work):
    began = time.perf_counter()
    for _ in range({calls}):
        work()
    return (time.perf_counter() - began) / {calls}

def pairs(ours, other):
    assert ours() == other()
    seconds(ours), seconds(other)
    return [(seconds(ours), seconds(other)) for _ in range({rounds})]

print(json.dumps({{"warm": pairs(page, joined), "cold": pairs(batch, singly)}}))
"""


def objects(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Read pages of 50 objects that are on 16 shards of two servers, with memcached."""
    from tests.integration.objects.gallery_site import GallerySite

    with (
        mariadb.servers(2) as servers,
        memcached.servers(1) as (cache,),
        TemporaryDirectory() as folder,
    ):
        nodes = [server.address.django() for server in servers]
        gallery = GallerySite(Path(folder), nodes, f"{new_prefix()}_", "mysql")
        half = SHARDS // 2
        gallery.content["sharded_orm"]["GROUPS"]["pins"]["RANGES"] = [
            {"range": [0, half - 1], "primary": "db1"},
            {"range": [half, SHARDS - 1], "primary": "db2"},
        ]
        gallery.content["caches"] = {"default": cache.django()}
        gallery.save()
        gallery.prepare()
        result = gallery.run(
            _PROGRAM.format(pins=PINS, shards=SHARDS, calls=CALLS, rounds=rounds.count)
        )
    yield at_most(
        WARM,
        "a page of 50 objects of 16 shards, warm cache",
        "the same by a join on one database",
        summary(result["warm"]),
    )
    yield at_least(
        COLD,
        "50 objects of 16 shards on two servers, not cached",
        "50 single reads",
        summary(result["cold"]),
    )
