"""Shards with cached rows move to another server: no read lacks what was acknowledged before it began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.promotion.site import PREAMBLE, Site
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import Pair, execute

RANGES = [{"range": [0, 1], "primary": "db1"}, {"range": [2, 3], "primary": "db2"}]
#: A row that is changed again and again, of the same key as the entries.
NOTE = """
import time
from django.db import models
from sharded_orm.models import ShardedModel

class Note(ShardedModel):
    note_id = models.BigIntegerField(primary_key=True)
    user_id = models.BigIntegerField()
    number = models.BigIntegerField()

    class Meta:
        app_label = "entries"

    class ShardMeta:
        group = "photos"
        shard_key = "user_id"
        cache = True
"""
#: Each thread writes the numbers 1, 2, … and tells in a file, which all processes share, the last one that was
#: acknowledged. It adds an entry for each number, or stores the number in its note. The main thread reads
#: all rows of the key through the cache, and compares them with the numbers that were acknowledged before. In
#: the end, the process prints how many reads and acknowledged writes there were, which reads were wrong, and
#: which of its rows the database lacks.
WORK = """
import contextlib, mmap, struct, threading
from django.db import connections, transaction
from sharded_orm import uncached
from sharded_orm.exceptions import ShardMoved
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import statistics_of

KIND, FILE, FIRST, OWN, ALL = {kind!r}, {file!r}, {first}, {own}, {all}
MANY, KEPT = 10**6, 5
with open(FILE, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 8 * ALL)
ended, stopped = threading.Event(), threading.Event()
model = Note if KIND in ("save", "update") else Entry

def acknowledged():
    return [struct.unpack_from("q", memory, 8 * writer)[0] for writer in range(ALL)]

def write_one(writer, number, note):
    entry = Entry(entry_id=writer * MANY + number, user_id=0)
    if KIND == "create":
        Entry.objects.create(entry_id=entry.pk, user_id=0)
    elif KIND == "bulk_create":
        Entry.objects.bulk_create([entry])
    elif KIND == "transaction":
        with transaction.atomic(using="photos"):
            entry.save(force_insert=True)
    elif KIND == "delete":
        if not Entry.objects.using("photos_00000").filter(pk=entry.pk).exists():
            entry.save(force_insert=True)
        Entry.objects.filter(user_id=0, entry_id=entry.pk - KEPT).delete()
    elif KIND == "save":
        note.number = number
        note.save()
    elif KIND == "update":
        assert Note.objects.filter(user_id=0, note_id=writer).update(number=number) == 1

def write(writer):
    number = 1
    note = Note.objects.get(user_id=0, note_id=writer) if model is Note else None
    while not stopped.is_set():
        try:
            write_one(writer, number, note)
        except ShardMoved:
            continue  # Nothing was written.
        struct.pack_into("q", memory, 8 * writer, number)
        number += 1
        stopped.wait(0.1)  # Between two writes, the rows can be found in the cache.
    connections.close_all()

def numbers():
    rows = list(model.objects.filter(user_id=0))
    pairs = [(r.note_id, r.number) if model is Note else divmod(r.entry_id, MANY) for r in rows]
    return [sorted(number for other, number in pairs if other == writer) for writer in range(ALL)]

def is_right(found, least, exactly=False):
    if exactly and found[-1:] != [least] * bool(least) and found != [0]:
        return False
    last = found[-1] if found else 0
    if model is Note:
        return last >= least
    gone = least - KEPT if KIND == "delete" else 0
    # The next entry may be there already, and the oldest one may be gone.
    return last >= least and found == list(range(found[0] if found else 1, last + 1)) and (
        not found or (found[0] > gone if KIND == "delete" else found[0] == 1))

def hits():
    return statistics_of(cached_model(model))["list_hits"]

def wait_for_end():
    input()
    ended.set()

threading.Thread(target=wait_for_end, daemon=True).start()
writers = [threading.Thread(target=write, args=(FIRST + n,), daemon=True) for n in range(OWN)]
for writer in writers:
    writer.start()
reads, wrong, goal, is_warm = 0, [], None, False
while goal is None or reads < goal:
    if goal is None and ended.is_set():
        goal = reads + 50
    before = acknowledged()
    found = numbers()
    reads += 1
    wrong += [
        [runtime.shard("photos", 0).node, least, seen[-10:]]
        for least, seen in zip(before, found) if not is_right(seen, least)
    ]
    if not is_warm and hits():
        is_warm = True
        print("reads", flush=True)
stopped.set()
for writer in writers:
    writer.join()
with uncached():
    found = numbers()
lost = [
    [least, seen[-10:]]
    for least, seen in list(zip(acknowledged(), found))[FIRST : FIRST + OWN]
    if not is_right(seen, least, exactly=True)
]
print(json.dumps([reads, sum(acknowledged()[FIRST : FIRST + OWN]), wrong[:10], lost]))
"""


@pytest.fixture
def site(pair: Pair, tmp_path: Path, memcached: MemcachedServer) -> Site:
    """Shards 0 and 1 are on ``db1``, and 2 and 3 on ``db2``. No server replicates."""
    groups = {"photos": {"STRATEGY": "modulo", "RANGES": RANGES}}
    site = Site(pair, tmp_path, groups=groups)
    for name, server in (("db1", pair.first), ("db2", pair.second)):
        address = server.address.django()
        site.setting["NODES"][name]["OPERATOR"] = {k: address[k] for k in ("USER", "PASSWORD")}
    site.use_cache(memcached)
    site.create_databases()
    for statement in ("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF"):
        execute(pair.second, statement)
    for server, numbers in ((pair.second, (0, 1)), (pair.first, (2, 3))):
        for number in numbers:
            execute(server, f"DROP DATABASE photos_{number:05d}")
    execute(
        pair.first,
        "CREATE TABLE photos_00000.entries_note"
        " (note_id BIGINT PRIMARY KEY, user_id BIGINT NOT NULL, number BIGINT NOT NULL)",
    )
    execute(
        pair.first, "INSERT INTO photos_00000.entries_note VALUES (0, 0, 0), (1, 0, 0), (2, 0, 0)"
    )
    return site


def move(site: Site, node: str) -> None:
    done = site.manage("shards", "move", "photos", "0", "--to", node)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("kind", "uses_plans"),
    [
        ("create", True),
        *[
            pytest.param(kind, uses_plans, marks=pytest.mark.long)
            for kind in ("create", "bulk_create", "transaction", "delete", "save", "update")
            for uses_plans in (True, False)
            if (kind, uses_plans) != ("create", True)
        ],
    ],
)
def test_no_read_lacks_an_acknowledged_write(
    site: Site, tmp_path: Path, kind: str, uses_plans: bool, request: pytest.FixtureRequest
) -> None:
    """Two processes write and read; a third one only reads."""
    site.setting["READ_PLANS"] = uses_plans
    site.save()
    own = [2, 1, 0]
    file = tmp_path / "acknowledged"
    file.write_bytes(bytes(8 * sum(own)))
    processes = []
    for number, count in enumerate(own):
        code = WORK.format(
            kind=kind, file=str(file), first=sum(own[:number]), own=count, all=sum(own)
        )
        processes.append(site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{NOTE}\n{code}"))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "reads\n", process.communicate()
    for node in ("db2", "db1", "db2") if request.config.getoption("--long") else ("db2", "db1"):
        move(site, node)
    for process in processes:  # Nobody writes on while another process ends.
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        answers.append(json.loads(out))
    assert [answer[2:] for answer in answers] == [[[], []]] * len(processes)
    assert all(reads > 50 for reads, *_ in answers)
    assert all(writes > 20 for (_, writes, *_), count in zip(answers, own, strict=True) if count)
