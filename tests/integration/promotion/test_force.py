"""Promotions while the primary is down."""

from __future__ import annotations

import time

from tests.integration.promotion.site import LOOK_UP_7, Site
from tests.patience import PATIENCE
from tests.services.memcached import MemcachedServer


def test_what_has_arrived_is_kept_and_the_rest_is_told(site: Site) -> None:
    began = time.monotonic()
    site.write_a_row(1)
    site.wait_until_equal()
    received = site.logged("first")
    site.stop_receiving()
    site.write_a_row(2)  # only the old primary has this row
    site.pair.first.kill()
    site.start_receiving()
    report = site.promote("--force", "--no-input", "--json").json
    assert report["outcome"] == "promoted"
    assert report["forced"]
    assert report["loss"]["received"] in (received, "")
    assert report["loss"]["executed"] == received
    assert 0 <= report["loss"]["idle"] < time.monotonic() - began
    assert site.primaries() == {"db2"}
    assert site.replicas() == {None}
    assert not site.is_read_only("second")
    assert site.rows("second") == {1}


def test_what_has_arrived_and_waits_is_executed_first(site: Site) -> None:
    with site.locked("second"):
        for number in range(1, 21):
            site.write_a_row(number)
        site.wait_until_received()
        site.pair.first.kill()
        process = site.start(
            "shards", "promote", "db1", "--force", "--no-input", "--timeout", "300"
        )
        site.wait_for_run("waiting")
    _out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert site.rows("second") == set(range(1, 21))


def test_what_is_lost_is_not_cached_any_more(site: Site, memcached: MemcachedServer) -> None:
    site.use_cache(memcached)
    site.stop_receiving()
    site.run(
        "Entry(entry_id=7, user_id=0).save()\n"
        "while ': 0 hits' in repr(Entry.cache): Entry.objects.get(user_id=0, entry_id=7)\n"
        "answer = None"
    )
    site.pair.first.kill()
    site.start_receiving()
    site.promote("--force", "--no-input")
    assert site.run("answer = Entry.objects.filter(user_id=0, entry_id=7).count()") == 0
    assert site.run(LOOK_UP_7) == "is not there"


def test_it_asks(site: Site) -> None:
    site.pair.first.kill()
    done = site.promote("--force", answer="yes\n", code=1)
    assert "was not confirmed" in done.err
    assert "is lost" in done.err
    assert "make sure that it stays down" in done.err
    assert site.primaries() == {"db1"}
    assert site.is_read_only("second")
    site.promote("--force", answer="db1\n")
    assert site.primaries() == {"db2"}


def test_writers_go_on(site: Site) -> None:
    with site.writers(2) as writers:
        site.pair.first.kill()
        site.promote("--force", "--no-input")
        for number in writers.numbers:
            writers.wait_for_more(number)
    # The rows acknowledged by the new primary are there.
    rows = site.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)[-20:]} <= rows


def test_a_primary_that_comes_back(site: Site) -> None:
    site.pair.first.kill()
    site.promote_and_die("begin:unfencing", "--force", "--no-input")
    site.pair.first.start()
    done = site.promote("--force", "--no-input", code=1)
    assert "has come back" in done.err
    site.wait_until_replicating()
    assert site.is_as_before()
    site.promote()
    assert site.is_promoted()


def test_killed_and_run_again(site: Site) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    site.pair.first.kill()
    for place in ("end:waiting", "end:stopping", "end:unfencing", "end:switching"):
        site.promote_and_die(place, "--force", "--no-input")
    site.promote("--force", "--no-input")
    assert site.primaries() == {"db2"}
    assert site.rows("second") == {1}


def test_an_unforced_run_of_a_dead_primary_says_what_is_wrong(site: Site) -> None:
    site.pair.first.kill()
    for arguments in ((), ("--check",)):
        error = site.promote(*arguments, code=1).err
        assert "node 'db1' does not answer" in error
        assert "If 'db1' is dead, --force does without it" in error
        assert "account" not in error
