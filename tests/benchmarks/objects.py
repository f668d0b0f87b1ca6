"""Times pages of a mapping: with a warm cache against joins on one database, cold against single reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.report import Line, at_least, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary_of_both
from tests.services import mariadb, memcached

#: What the issue asks for: a warm page by joins, and single reads by a cold page.
WARM, COLD = 0.5, 10
PINS, SHARDS, CALLS = 50, 16, 20
#: How many pages of a round are of rows that nobody has read, and are therefore made for it.
UNREAD_CALLS = 4
OBJECTS = 1_000_000

_PROGRAM = """
import datetime, socket, time
from collections import defaultdict
import MySQLdb
from MySQLdb.constants import FIELD_TYPE
from django.db import models
from django.db.models.base import ModelState
from sharded_orm.backends.mysql.session import datetime_or_none
from sharded_orm.cache.stores.memcached.protocol import read_packet
from sharded_orm import uncached
from sharded_orm.models.cached import queryset
from sharded_orm.models.querysets.plans import without_plans
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

def singly_without_plans():
    with without_plans():
        return singly()

def seconds(work, calls={calls}):
    # Seconds per call, and those that the processor worked for this process.
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        work()
    processor = time.process_time() - processor
    return (time.perf_counter() - began) / calls, processor / calls

def pairs(ours, other):
    assert ours() == other()
    seconds(ours), seconds(other)
    return [(seconds(ours), seconds(other)) for _ in range({rounds})]

def cold_page():
    with uncached():
        return [picture.pk for picture in AlbumPictures.objects.page(album, size={pins})]

# Rows that no process has read: neither the cache nor the memory of this process has them.
def unread_album():
    album = Album.objects.create(name="Unread")
    for number in range({pins} + 1):
        picture = Picture.objects.using(f"pins_{{number % {shards}:05d}}").create(count=number, seen_by=seen)
        AlbumPictures.objects.add(album, picture)
    return album

def unread_ids():
    return [
        Picture.objects.using(f"pins_{{number % {shards}:05d}}").create(count=number, seen_by=seen).pk
        for number in range({pins})
    ]

ahead = 0
unread_albums = [unread_album() for _ in range(({rounds} + 1) * {unread_calls})]
unread_pictures = [unread_ids() for _ in range(({rounds} + 1) * {unread_calls})]
ahead = 120

def read_unread_page():
    pictures = AlbumPictures.objects.page(unread_albums.pop(), size={pins})
    return [picture.pk for picture in pictures]

def read_unread_singly():
    return [Picture.objects.get(pk).pk for pk in unread_pictures.pop()]

def pairs_of_unread():
    return [
        (seconds(read_unread_page, {unread_calls}), seconds(read_unread_singly, {unread_calls}))
        for _ in range({rounds} + 1)
    ][1:]

# The statements of a cold page, by the driver alone: the limit of what a page can reach.
def session(alias):
    values = {{key.lower(): connections[alias].settings_dict[key] for key in ("HOST", "USER", "PASSWORD", "PORT")}}
    return MySQLdb.connect(**{{**values, "port": int(values["port"])}}, charset="utf8mb4", autocommit=True)

def select(shard, columns, model, condition):
    return f"SELECT {{columns}} FROM `{{shard.schema}}`.`{{model._meta.db_table}}` WHERE {{condition}}"

ids_by_node = defaultdict(lambda: defaultdict(list))
for picture in AlbumPictures.objects.page(album, size={pins} + 1):
    shard = runtime.locate("pins", picture.pk)
    ids_by_node[shard.node][shard].append(str(picture.pk))
home = runtime.locate("pins", album.pk)
order = "source_id = {{}} ORDER BY sequence, target_id LIMIT {{}}".format(album.pk, {pins} + 1)
entries = session(home.alias), select(home, "sequence, target_id", AlbumPictures, order)
unions = []
for of_node in ids_by_node.values():
    branches = [
        select(shard, f"id, data, ts, version, active, {{number}}", Picture, f"id IN ({{', '.join(pks)}})")
        for number, (shard, pks) in enumerate(of_node.items())
    ]
    unions.append((session(next(iter(of_node)).alias), " UNION ALL ".join(f"({{each}})" for each in branches)))

def rows_of(*sent):
    # All nodes work at the same time, and one thread waits for them.
    for raw, sql in sent:
        raw.send_query(sql.encode())
    for raw, _ in sent:
        raw.read_query_result()
        yield from raw.store_result().fetch_row(0)

def driver():
    targets = [target for _, target in rows_of(entries)]
    there = {{row[0] for row in rows_of(*unions)}}
    return [pk for pk in targets if pk in there][:{pins}]

# The least code that gives the same instances: no routing, no signals, no errors, no transactions, no
# fetch modes. The caller knows the shards' texts and the session of each node.
read_json = json.JSONDecoder().scan_once
sessions = dict(zip(ids_by_node, [raw for raw, _ in unions]))
home_session, home_sql = entries
for raw in (home_session, *sessions.values()):
    raw.converter[FIELD_TYPE.DATETIME] = datetime_or_none
heads = {{}}
for node, of_node in ids_by_node.items():
    for shard in of_node:
        head = select(shard, f"id, data, ts, version, active, {{shard.number}}", Picture, "id IN (")
        heads[shard.number] = node, "(" + head

def instances_of(rows):
    pictures = {{}}
    new, utc, combine = object.__new__, datetime.UTC, datetime.datetime.combine
    for pk, data, ts, version, active, number in rows:
        picture = new(Picture)
        picture._state = state = ModelState()
        state.adding, state.db = False, f"pins_{{number:05d}}"
        picture.id, picture.data = pk, read_json(data, 0)[0]
        picture.ts, picture.version = combine(ts, ts.time(), utc), version
        picture.active = bool(active)
        pictures[pk] = picture
    return pictures

def floor():
    targets = [target for _, target in rows_of((home_session, home_sql))]
    by_shard = defaultdict(list)
    for pk in targets:
        by_shard[pk >> 46].append(pk)
    parts = defaultdict(list)
    for number, pks in by_shard.items():
        node, head = heads[number]
        parts[node].append(f"{{head}}{{', '.join(map(str, pks))}}))")
    sent = [(sessions[node], " UNION ALL ".join(of_node)) for node, of_node in parts.items()]
    pictures = instances_of(rows_of(*sent))
    shown = [pictures[pk] for pk in targets if pk in pictures and pictures[pk].active]
    return [picture.pk for picture in shown[:{pins}]]

# The same of a warm page: the packets of the list and of the rows, to a socket. The rows are those that
# were decoded before, if all bytes are still the same.
server = queryset.current_reader().cache.objects("pins_00000")
ask, requests = server.read, []

def record(names, objects=(), again=()):
    requests.append(read_packet(names, objects, again) + b"mn\\r\\n")
    return ask(names, objects, again)

page()
server.read = record
page()
del server.read
line = socket.create_connection(server._address)
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

def answer_to(request):
    line.send(request)
    answer = line.recv(1 << 18)
    while not answer.endswith(b"MN\\r\\n"):
        answer += line.recv(1 << 18)
    return answer

expected = [answer_to(request) for request in requests]
decoded = [
    (picture.pk, json.dumps(picture.data), picture.ts, picture.version, picture.active)
    for picture in AlbumPictures.objects.page(album, size={pins} + 1)
]

def warm_floor():
    answers = [answer_to(request) for request in requests]
    assert answers == expected
    pictures = []
    new = object.__new__
    for pk, data, ts, version, active in decoded:
        picture = new(Picture)
        picture._state = state = ModelState()
        state.adding, state.db = False, "pins_00000"
        picture.id, picture.data = pk, read_json(data, 0)[0]
        picture.ts, picture.version, picture.active = ts, version, active
        pictures.append(picture)
    return [picture.count for picture in pictures[:{pins}]]

print(json.dumps({{
    "driver": pairs(driver, singly),
    "floor": pairs(floor, singly),
    "warm floor": pairs(warm_floor, joined),
    "warm": pairs(page, joined),
    "cold": pairs(batch, singly),
    "cold page": pairs(cold_page, singly),
    "unread page": pairs_of_unread(),
    "cold page, without plans": pairs(cold_page, singly_without_plans),
}}))
"""

#: Fills the objects' tables, then declares a field that they do not have. A table is filled and changed, too.
_NEW_FIELD = """
import time
from django.db import models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.graph import MigrationGraph
from django.db.migrations.state import ModelState, ProjectState
from django.test.utils import CaptureQueriesContext
from sharded_orm.contrib.objects import ShardedObject, fields

BODY = '{{"count": 1, "seen_by": {{}}}}'
FILL = "INSERT INTO {{}} (id, data, ts, version, active) SELECT seq + %s, %s, NOW(6), 1, 1 FROM seq_1_to_{{}}"
first = 0
for number in range({shards}):
    first = Picture.objects.using(f"pins_{{number:05d}}").create().pk
    with connections[f"pins_{{number:05d}}"].cursor() as cursor:
        cursor.execute(FILL.format(Picture._meta.db_table, {of_shard}), [first, BODY])
with connections["default"].cursor() as cursor:
    table = "gallery_plainpicture"
    cursor.execute(FILL.format(table, {shards} * {of_shard}), [10**6, BODY])

def state(cls):
    project = ProjectState()
    project.add_model(ModelState.from_model(cls))
    return project

stored = state(Picture)
meta = {{"__module__": Picture.__module__, "Meta": type("Meta", (), {{"app_label": "gallery", "apps": Picture._meta.apps.__class__()}})}}
Newer = type(ShardedObject)("Picture", (ShardedObject,), {{
    **meta,
    "ObjectMeta": type("ObjectMeta", (), {{"group": "pins", "type_id": 2}}),
    "count": fields.Integer(default=0), "colour": fields.Text(default="red"),
}})
assert Newer.objects.get(first + {of_shard}).colour == "red"
operations = MigrationAutodetector(stored, state(Newer)).changes(MigrationGraph())

class PlainPicture(models.Model):
    class Meta:
        app_label = "gallery"
        db_table = table

colour = models.CharField(max_length=20, default="red")
colour.set_attributes_from_name("colour")
with CaptureQueriesContext(connections["default"]) as captured:
    began = time.perf_counter()
    with connections["default"].schema_editor() as editor:
        editor.add_field(PlainPicture, colour)
    seconds = time.perf_counter() - began
print(json.dumps([[str(each) for each in operations], len(captured), seconds]))
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
            _PROGRAM.format(
                pins=PINS,
                shards=SHARDS,
                calls=CALLS,
                unread_calls=UNREAD_CALLS,
                rounds=rounds.count,
            )
        )
        many = rounds.of(OBJECTS)
        new_field = gallery.run(_NEW_FIELD.format(shards=SHARDS, of_shard=many // SHARDS))
    yield at_most(
        WARM,
        "a page of 50 objects of 16 shards, warm cache",
        "the same by a join on one database",
        summary_of_both(result["warm"]),
    )
    yield at_most(
        WARM,
        "the least code for that page: the same packets, bodies and instances",
        "the same by a join on one database",
        summary_of_both(result["warm floor"]),
        goal=False,
    )
    yield at_least(
        COLD,
        "50 objects of 16 shards on two servers, not cached",
        "50 single reads",
        summary_of_both(result["cold"]),
    )
    yield at_least(
        COLD,
        "a page of these objects, not cached",
        "50 single reads",
        summary_of_both(result["cold page"]),
    )
    # The goal is older than lookup plans, which have halved the time of single reads.
    yield at_least(
        COLD,
        "the same",
        "50 single reads that Django compiles",
        summary_of_both(result["cold page, without plans"]),
        goal=False,
    )
    yield at_least(
        COLD,
        "a page of such objects, empty cache, which the page fills",
        "50 single reads, which fill the cache as well",
        summary_of_both(result["unread page"]),
        goal=False,
    )
    yield at_least(
        COLD,
        "the least code for that page: the same statements, bodies and instances",
        "50 single reads",
        summary_of_both(result["floor"]),
        goal=False,
    )
    yield at_least(
        COLD,
        "the statements of that page by the driver alone",
        "50 single reads",
        summary_of_both(result["driver"]),
        goal=False,
    )
    operations, statements, seconds = new_field
    yield Line(
        f"a new field on {many:,} objects",
        "AddField with a default on a table",
        f"{len(operations)} operations of migrations",
        "no statement at all",
        not operations,
        f"AddField: {statements} statements, {seconds:.2f} s",
    )
