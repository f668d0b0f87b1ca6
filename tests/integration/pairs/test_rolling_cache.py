"""The cache is right while a rolling upgrade switches the sides of a pair, and of use afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.pairs.site import RollingSite
from tests.integration.promotion.site import PREAMBLE
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import MasterPair

#: A thread adds entries and removes old ones; the main thread reads the list of them through the cache. A
#: list is stale if it lacks an entry that was stored before the read began, and all later ones. After the
#: end of the upgrade, the main thread goes on until lists come from the cache again.
READING = """
import threading
from django.db import connections
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import statistics_of

stored, ended, stopped = [-1], threading.Event(), threading.Event()

def write():
    number = 0
    while not stopped.is_set():
        Entry.objects.create(entry_id=number, user_id=0)
        stored[0] = number
        Entry.objects.filter(user_id=0, entry_id=number - 20).delete()
        number += 1
        stopped.wait(0.1)  # Between two writes, the list can be found in the cache.
    connections.close_all()

def wait_for_end():
    input()
    ended.set()

def hits():
    return statistics_of(cached_model(Entry))["list_hits"]

writer = threading.Thread(target=write, daemon=True)
writer.start()
threading.Thread(target=wait_for_end, daemon=True).start()
reads = stale = 0
is_warm = False
goal = None
while goal is None or hits() < goal:
    if goal is None and ended.is_set():
        goal = hits() + 200
    least = stored[0]
    numbers = [entry.entry_id for entry in Entry.objects.filter(user_id=0)]
    reads += 1
    stale += max(numbers, default=-1) < least
    if not is_warm and hits():
        is_warm = True
        print("reads", flush=True)
stopped.set()
writer.join()
print(json.dumps([reads, stale, stored[0]]))
"""


@pytest.mark.parametrize(
    "steps",
    [[()], pytest.param([("--until", "switch"), ("--abort",)], marks=pytest.mark.long)],
    ids=["to the end", "aborted"],
)
def test_no_read_is_stale_and_hits_come_back(
    pair: MasterPair, tmp_path: Path, memcached: MemcachedServer, steps: list[tuple[str, ...]]
) -> None:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    site.use_cache(memcached)
    reading = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{READING}")
    assert reading.stdout is not None and reading.stdout.readline() == "reads\n"
    for arguments in steps:
        site.rolling(*arguments)
    out, err = reading.communicate("\n", timeout=PATIENCE)
    assert reading.returncode == 0, err
    reads, stale, last = json.loads(out)
    assert stale == 0
    assert reads > last > 0
