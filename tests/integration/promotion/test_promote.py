"""A promotion without faults, while writers go on writing."""

from __future__ import annotations

import copy

from tests.integration.promotion.site import ALL_MOVES, LOOK_UP_7, PREAMBLE, Site
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import execute

# A process that does not get the new map, and reads from the old primary.
LAGGING = """
runtime.topology()
runtime.source().stop()
print("does not follow", flush=True)
input()
while ": 0 hits" in repr(Entry.cache):
    Entry.objects.get(user_id=0, entry_id=7)
print("has cached it")
"""


def test_no_acknowledged_write_is_lost(site: Site) -> None:
    with site.writers(3) as writers:
        report = site.promote("--json").json
        after = site.logged("first")
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert report["outcome"] == "promoted"
    assert site.is_promoted()
    assert site.replicas() == {"db1"}
    rows = site.rows("second")
    for number in writers.numbers:
        acknowledged = {row for _, row in writers.acknowledged(number)}
        assert acknowledged <= rows
        # Refused by the fence, before or at COMMIT; there are no other errors.
        assert all(site.is_refusal(code, text) for _, code, text in writers.errors(number))
    assert site.has_logged_nothing_since(after, report["position"])
    assert site.rows("first") < rows
    print(f"writes were refused for {report['refused_for']:.3f} s;"
          f" longest silence {writers.longest_silence():.3f} s")  # fmt: skip


def test_the_report_names_what_has_moved(site: Site) -> None:
    done = site.promote()
    assert f"db2 is the primary of {', '.join(ALL_MOVES)}" in done.out
    assert site.advice in done.out


def test_statements_that_keep_the_fence_off(mariadb_site: Site) -> None:
    site = mariadb_site
    with site.locked("first"):
        done = site.promote(code=1)
    assert "could not be made read only within 5 s" in done.err
    assert "Everything is as before" in done.err
    assert site.is_as_before()
    site.promote()


def test_there_and_back(site: Site) -> None:
    site.write_a_row(1)
    site.promote()
    site.write_a_row(2, "second")
    site.follow_back()
    site.write_a_row(3, "second")
    done = site.manage("shards", "promote", "db2", "--to", "db1", "--json")
    assert done.code == 0, done.err
    assert site.primaries() == {"db1"}
    assert site.replicas() == {"db2"}
    assert site.rows("first") == {1, 2, 3}
    assert not site.is_read_only("first")
    assert site.is_read_only("second")


def test_a_pair_in_a_ring(mariadb_site: Site) -> None:
    """Each replicates from the other, as if each were the primary of some ranges."""
    site = mariadb_site
    for which, domain in (("first", 1), ("second", 2)):
        execute(getattr(site.pair, which), f"SET GLOBAL gtid_domain_id = {domain}")
    try:
        site.pair.follow(site.pair.first, site.pair.second)
        for which in ("first", "second"):
            execute(getattr(site.pair, which), "SET GLOBAL read_only = OFF")
        groups = copy.deepcopy(site.groups)
        groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
        site.publish(groups)
        for number in range(1, 6):
            site.write_a_row(number)
            site.write_a_row(-number, "second")
        report = site.promote("--json").json
        assert [move["range"] for move in report["moves"]] == [[0, 1], [0, 0]]
        assert site.primaries() == {"db2"}
        assert site.rows("second") == {n for n in range(-5, 6) if n}
        assert site.is_read_only("first")
        assert not site.is_read_only("second")
    finally:
        for which in ("first", "second"):
            execute(getattr(site.pair, which), "SET GLOBAL gtid_domain_id = 0")


def test_what_a_process_that_lags_behind_has_cached_is_void(
    mariadb_site: Site, memcached: MemcachedServer
) -> None:
    site = mariadb_site
    site.use_cache(memcached)
    site.run("Entry(entry_id=7, user_id=0).save(); answer = None")
    lagging = site.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{LAGGING}")
    assert lagging.stdout is not None and lagging.stdout.readline() == "does not follow\n"
    # The map is published; only the end of the promotion is missing.
    site.promote_and_die("begin:switched")
    site.run("Entry.objects.get(user_id=0, entry_id=7).delete(); answer = None")
    out, err = lagging.communicate("\n", timeout=PATIENCE)
    assert out == "has cached it\n", err
    assert site.run(LOOK_UP_7) == 7
    site.promote()
    assert site.run(LOOK_UP_7) == "is not there"
