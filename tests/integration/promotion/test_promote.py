"""A promotion in order, with writers that go on writing."""

from __future__ import annotations

import copy

from tests.integration.promotion.scene import ALL_MOVES, LOOK_UP_7, PREAMBLE, Scene
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import execute

# A process that does not get the new map, and reads what is on the old primary.
LAGGING = """
runtime.topology()
runtime.source().stop()
print("does not follow", flush=True)
input()
while ": 0 hits" in repr(Entry.cache):
    Entry.objects.get(user_id=0, entry_id=7)
print("has cached it")
"""


def test_no_acknowledged_write_is_lost(scene: Scene) -> None:
    with scene.writers(3) as writers:
        report = scene.promote("--json").json
        after = scene.logged("first")
        for number in writers.numbers:
            writers.wait_for_more(number)
    assert report["outcome"] == "promoted"
    assert scene.is_promoted()
    assert scene.replicas() == {"db1"}
    rows = scene.rows("second")
    for number in writers.numbers:
        acknowledged = {row for _, row in writers.acknowledged(number)}
        assert acknowledged <= rows
        # Refused by the fence, before or at COMMIT; nothing else happens to anybody.
        assert {code for _, code, _ in writers.errors(number)} <= {1290}
    # Nothing has reached the old primary since its last position was read.
    assert scene.logged("first") == after == report["position"]
    assert scene.rows("first") < rows
    print(f"writes were refused for {report['refused_for']:.3f} s;"
          f" longest silence {writers.longest_silence():.3f} s")  # fmt: skip


def test_the_report_names_what_has_moved(scene: Scene) -> None:
    done = scene.promote()
    assert f"db2 is the primary of {', '.join(ALL_MOVES)}" in done.out
    assert "read_only" in done.out


def test_statements_that_keep_the_fence_off(scene: Scene) -> None:
    with scene.locked("first"):
        done = scene.promote(code=1)
    assert "could not be made read only within 5 s" in done.err
    assert "Everything is as before" in done.err
    assert scene.is_as_before()
    scene.promote()


def test_there_and_back(scene: Scene) -> None:
    scene.write_a_row(1)
    scene.promote()
    scene.write_a_row(2, "second")
    execute(scene.pair.second, "RESET SLAVE ALL")
    scene.pair.follow(scene.pair.first, scene.pair.second)
    scene.write_a_row(3, "second")
    done = scene.manage("shards", "promote", "db2", "--to", "db1", "--json")
    assert done.code == 0, done.err
    assert scene.primaries() == {"db1"}
    assert scene.replicas() == {"db2"}
    assert scene.rows("first") == {1, 2, 3}
    assert not scene.is_read_only("first")
    assert scene.is_read_only("second")


def test_a_pair_in_a_ring(scene: Scene) -> None:
    """Each replicates from the other, as where each is the primary of some ranges."""
    for which, domain in (("first", 1), ("second", 2)):
        execute(getattr(scene.pair, which), f"SET GLOBAL gtid_domain_id = {domain}")
    try:
        scene.pair.follow(scene.pair.first, scene.pair.second)
        for which in ("first", "second"):
            execute(getattr(scene.pair, which), "SET GLOBAL read_only = OFF")
        groups = copy.deepcopy(scene.groups)
        groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
        scene.publish(groups)
        for number in range(1, 6):
            scene.write_a_row(number)
            scene.write_a_row(-number, "second")
        report = scene.promote("--json").json
        assert [move["range"] for move in report["moves"]] == [[0, 1], [0, 0]]
        assert scene.primaries() == {"db2"}
        assert scene.rows("second") == {n for n in range(-5, 6) if n}
        assert scene.is_read_only("first")
        assert not scene.is_read_only("second")
    finally:
        for which in ("first", "second"):
            execute(getattr(scene.pair, which), "SET GLOBAL gtid_domain_id = 0")


def test_what_a_process_that_lags_behind_has_cached_is_void(
    scene: Scene, memcached: MemcachedServer
) -> None:
    scene.use_cache(memcached)
    scene.run("Entry(entry_id=7, user_id=0).save(); answer = None")
    lagging = scene.start("shell", "-v", "0", "-c", f"{PREAMBLE}\n{LAGGING}")
    assert lagging.stdout is not None and lagging.stdout.readline() == "does not follow\n"
    # The map is published; the end of the promotion is left.
    scene.promote_and_die("begin:switched")
    scene.run("Entry.objects.get(user_id=0, entry_id=7).delete(); answer = None")
    out, err = lagging.communicate("\n", timeout=PATIENCE)
    assert out == "has cached it\n", err
    assert scene.run(LOOK_UP_7) == 7
    scene.promote()
    assert scene.run(LOOK_UP_7) == "is not there"
