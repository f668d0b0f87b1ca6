"""Shards change their active side while writers go on writing."""

from __future__ import annotations

import pytest

from tests.integration.promotion.site import LOOK_UP_7, PREAMBLE, Writers
from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_kills import ENDED
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import execute
from tests.services.zookeeper import ZooKeeperServer


def test_to_and_fro(site: PairSite) -> None:
    site.write_a_row(1)
    report = site.switch("photos", "0", "--to-side", "db2", "--json").json
    assert report["switched"] == {"0": "db2"}
    assert site.active() == ["db2", "db1", "db2", "db2"]
    assert site.writable() == ["db2"]
    site.write_a_row(2, "second")
    assert site.switch("photos", "0", "--json").json["switched"] == {"0": "db1"}
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert site.writable() == ["db1"]
    assert site.all_rows() == {1, 2}
    # Neighbouring ranges that are alike are one range again.
    assert site.document()["groups"]["photos"] == {**site.groups["photos"]}


def test_all_shards_of_a_side(site: PairSite) -> None:
    report = site.switch("photos", "--all-from", "db1", "--json").json
    assert report["switched"] == {"0": "db2", "1": "db2"}
    assert site.active() == ["db2"] * 4
    again = site.switch("photos", "0-3", "--to-side", "db2", "--json").json
    assert (again["switched"], again["already"]) == ({}, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("rounds", "is_cached"),
    [(2, False), (2, True), pytest.param(25, True, marks=pytest.mark.long)],
)
def test_no_acknowledged_write_is_lost_or_doubled(
    site: PairSite, rounds: int, is_cached: bool, memcached: MemcachedServer
) -> None:
    if is_cached:
        # A write then opens a transaction of its own, which is repeated as a whole.
        site.use_cache(memcached)
    pauses: list[float] = []
    with site.writers(4) as writers, site.watched() as writable:
        for _ in range(rounds):
            pauses += site.switch("photos", "0-3", "--json").json["pauses"]
            for number in writers.numbers:
                writers.wait_for_more(number)
    rows = site.all_rows()
    acknowledged: list[int] = []
    for number in writers.numbers:
        acknowledged += [row for _, row in writers.acknowledged(number)]
        check_errors(writers, number)
    assert len(acknowledged) == len(set(acknowledged))
    assert set(acknowledged) == rows
    assert {"first", "second"} <= set(writable)
    assert "both" not in writable
    print(f"pauses {sorted(pauses)[-3:]}; longest silence {writers.longest_silence():.3f} s")


def check_errors(writers: Writers, number: int) -> None:
    """Check that only transactions of several statements were refused. Other writes wait."""
    for _, _, text in writers.errors(number):
        assert text.startswith("SideFenced ") and text.endswith("(in a transaction)")


@pytest.mark.long
def test_processes_that_are_told_at_once(
    site: PairSite, zookeeper: ZooKeeperServer, memcached: MemcachedServer
) -> None:
    site.use_cache(memcached)
    site.move_to_zookeeper(zookeeper)
    with site.writers(2) as writers, site.watched() as writable:
        for _ in range(3):
            assert site.switch("photos", "0-3", "--json").json["ok"]
            for number in writers.numbers:
                writers.wait_for_more(number)
    rows = site.all_rows()
    for number in writers.numbers:
        check_errors(writers, number)
        assert {row for _, row in writers.acknowledged(number)} <= rows
    assert "both" not in writable


# A process that does not get the new topology, and reads from the old side.
LAGGING = """
runtime.topology()
runtime.source().stop()
print("does not follow", flush=True)
input()
while ": 0 hits" in repr(Entry.cache):
    Entry.objects.get(user_id=0, entry_id=7)
print("has cached it")
"""


def test_what_a_process_that_lags_behind_has_cached_is_void(
    site: PairSite, memcached: MemcachedServer
) -> None:
    site.use_cache(memcached)
    site.run("Entry(entry_id=7, user_id=0).save(); answer = None")
    lagging = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{LAGGING}")
    assert lagging.stdout is not None and lagging.stdout.readline() == "does not follow\n"
    # The shard is switched; only the end of the run is missing.
    site.switch_and_die(ENDED, "photos", "0")
    execute(site.pair.first, "STOP SLAVE SQL_THREAD")
    site.run("Entry.objects.get(user_id=0, entry_id=7).delete(); answer = None")
    out, err = lagging.communicate("\n", timeout=PATIENCE)
    assert out == "has cached it\n", err
    assert site.run(LOOK_UP_7) == 7
    execute(site.pair.first, "START SLAVE SQL_THREAD")
    site.switch("photos", "--repair")
    assert site.run(LOOK_UP_7) == "is not there"


# A process that does not get the new topology, and writes to the old side.
LATE = """
from django.db import connections, transaction
from sharded_orm.exceptions import SideFenced
assert runtime.shard("photos", 0).node == "db1"
runtime.source().stop()
print("does not follow", flush=True)
input()
alias = runtime.shard("photos", 0).alias
"""


_TRANSACTION = """
try:
    with transaction.atomic(using=alias):
        Entry(entry_id=1, user_id=0).save()
except SideFenced as exc:
    print(type(exc).__name__)
"""


@pytest.mark.parametrize(
    ("write", "said", "rows"),
    [
        ("Entry(entry_id=2, user_id=0).save()", "", {2}),
        ("Entry.objects.bulk_create([Entry(entry_id=2, user_id=0)])", "", {2}),
        (
            "connections[alias].cursor().execute('INSERT INTO entries_entry VALUES (2, 0)')",
            "",
            {2},
        ),
        (_TRANSACTION, "SideFenced\n", set()),
    ],
)
def test_a_process_that_lags_behind_writes_to_the_new_side(
    site: PairSite, write: str, said: str, rows: set[int]
) -> None:
    late = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{LATE}\n{write}")
    assert late.stdout is not None and late.stdout.readline() == "does not follow\n"
    site.switch("photos", "0")
    out, err = late.communicate("\n", timeout=PATIENCE)
    assert (late.returncode, out) == (0, said), err
    assert site.rows("second") == rows
