"""A primary that is dead."""

from __future__ import annotations

import time

from tests.integration.promotion.scene import LOOK_UP_7, Scene
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer
from tests.services.replication import execute, wait_until_equal


def test_what_has_arrived_is_kept_and_the_rest_is_told(scene: Scene) -> None:
    began = time.monotonic()
    scene.write_a_row(1)
    wait_until_equal(scene.pair)
    received = scene.logged("first")
    execute(scene.pair.second, "STOP SLAVE IO_THREAD")
    scene.write_a_row(2)  # Nobody but the old primary will ever know.
    scene.pair.first.kill()
    execute(scene.pair.second, "START SLAVE IO_THREAD")
    report = scene.promote("--force", "--no-input", "--json").json
    assert report["outcome"] == "promoted"
    assert report["forced"]
    assert report["loss"]["received"] in (received, "")
    assert report["loss"]["executed"] == received
    assert 0 <= report["loss"]["idle"] < time.monotonic() - began
    assert scene.primaries() == {"db2"}
    assert scene.replicas() == {None}
    assert not scene.is_read_only("second")
    assert scene.rows("second") == {1}


def test_what_has_arrived_and_waits_is_executed_first(scene: Scene) -> None:
    with scene.locked("second"):
        for number in range(1, 21):
            scene.write_a_row(number)
        scene.wait_until_received()
        scene.pair.first.kill()
        process = scene.start(
            "shards", "promote", "db1", "--force", "--no-input", "--timeout", "300"
        )
        scene.wait_for_run("waiting")
    _out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert scene.rows("second") == set(range(1, 21))


def test_what_is_lost_is_not_cached_any_more(scene: Scene, memcached: MemcachedServer) -> None:
    scene.use_cache(memcached)
    execute(scene.pair.second, "STOP SLAVE IO_THREAD")
    scene.run(
        "Entry(entry_id=7, user_id=0).save()\n"
        "while ': 0 hits' in repr(Entry.cache): Entry.objects.get(user_id=0, entry_id=7)\n"
        "answer = None"
    )
    scene.pair.first.kill()
    execute(scene.pair.second, "START SLAVE IO_THREAD")
    scene.promote("--force", "--no-input")
    assert scene.run("answer = Entry.objects.filter(user_id=0, entry_id=7).count()") == 0
    assert scene.run(LOOK_UP_7) == "is not there"


def test_it_asks(scene: Scene) -> None:
    scene.pair.first.kill()
    done = scene.promote("--force", answer="yes\n", code=1)
    assert "was not confirmed" in done.err
    assert "is lost" in done.err
    assert "make sure that it stays down" in done.err
    assert scene.primaries() == {"db1"}
    assert scene.is_read_only("second")
    scene.promote("--force", answer="db1\n")
    assert scene.primaries() == {"db2"}


def test_writers_go_on(scene: Scene) -> None:
    with scene.writers(2) as writers:
        scene.pair.first.kill()
        scene.promote("--force", "--no-input")
        for number in writers.numbers:
            writers.wait_for_more(number)
    # Those that were acknowledged by the new primary are there.
    rows = scene.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)[-20:]} <= rows


def test_a_primary_that_comes_back(scene: Scene) -> None:
    scene.pair.first.kill()
    scene.promote_and_die("begin:unfencing", "--force", "--no-input")
    scene.pair.first.start()
    done = scene.promote("--force", "--no-input", code=1)
    assert "has come back" in done.err
    scene.wait_until_replicating()
    assert scene.is_as_before()
    scene.promote()
    assert scene.is_promoted()


def test_killed_and_run_again(scene: Scene) -> None:
    scene.write_a_row(1)
    wait_until_equal(scene.pair)
    scene.pair.first.kill()
    for place in ("end:waiting", "end:stopping", "end:unfencing", "end:switching"):
        scene.promote_and_die(place, "--force", "--no-input")
    scene.promote("--force", "--no-input")
    assert scene.primaries() == {"db2"}
    assert scene.rows("second") == {1}


def test_an_unforced_run_of_a_dead_primary_says_what_is_wrong(scene: Scene) -> None:
    scene.pair.first.kill()
    for arguments in ((), ("--check",)):
        told = scene.promote(*arguments, code=1).err
        assert "node 'db1' does not answer" in told
        assert "If 'db1' is dead, --force does without it" in told
        assert "account" not in told
