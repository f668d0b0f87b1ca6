"""The operator's process killed with SIGKILL in each phase, and a source that loses answers."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest

from tests.integration.promotion.site import Site
from tests.patience import PATIENCE

PHASES = ("fencing", "waiting", "stopping", "unfencing", "switching")
PLACES = [f"{side}:{phase}" for phase in PHASES for side in ("begin", "end")]
# The map is published there, though the journal does not know.
PUBLISHED = "end:switching"


def _marked(places: list[str]) -> list[Any]:
    """Mark ends of phases as long-run tests except the last, as they take their time."""
    return [
        pytest.param(
            place, marks=[pytest.mark.long] if "end" in place and place != PUBLISHED else []
        )
        for place in places
    ]


def unmistakable(site: Site) -> bool:
    """Check that nobody can write to a server that the map does not name, or will not name."""
    first, second = not site.is_read_only("first"), not site.is_read_only("second")
    return not (first and second)


@pytest.mark.parametrize("place", _marked(PLACES))
def test_killed_and_run_again(site: Site, place: str) -> None:
    site.write_a_row(1)
    site.promote_and_die(place)
    assert unmistakable(site)
    done = site.promote("--json")
    assert done.json["outcome"] == "promoted"
    assert site.is_promoted()
    assert site.rows("second") == {1}
    assert "goes on with run" in done.err


@pytest.mark.parametrize("place", _marked([place for place in PLACES if place != PUBLISHED]))
def test_killed_and_undone(site: Site, place: str) -> None:
    site.write_a_row(1)
    site.promote_and_die(place)
    assert site.promote("--abort", "--json").json["outcome"] == "undone"
    assert site.is_as_before()
    # The pair works as before: rows arrive, and it can be promoted.
    site.write_a_row(2)
    site.wait_until_equal()
    assert site.rows("second") == {1, 2}
    site.promote()
    assert site.is_promoted()


def test_writers_go_on_after_a_kill_and_an_abort(site: Site) -> None:
    with site.writers(2) as writers:
        site.promote_and_die("begin:stopping")
        site.promote("--abort")
        for number in writers.numbers:
            writers.wait_for_more(number)
        site.promote()
        for number in writers.numbers:
            writers.wait_for_more(number)
    rows = site.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        assert all(site.is_refusal(code, text) for _, code, text in writers.errors(number))


def test_a_published_map_cannot_be_undone(site: Site) -> None:
    site.promote_and_die(PUBLISHED)
    done = site.promote("--abort", code=1)
    assert "cannot be undone" in done.err
    site.promote()
    assert site.is_promoted()


def test_a_check_tells_of_what_was_broken_off(site: Site) -> None:
    site.promote_and_die("end:fencing")
    error = site.promote("--check", code=1).err
    assert "replaces 'db1' was broken off in the phase 'fencing'" in error
    assert "'manage.py shards promote db1'" in error
    assert "'manage.py shards promote db1 --abort'" in error
    site.promote("--abort")
    site.promote("--check")


def test_a_topology_that_was_changed_after_the_fence(site: Site) -> None:
    site.promote_and_die("begin:waiting")
    groups = copy.deepcopy(site.groups)
    groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
    site.publish(groups)
    done = site.promote("--json", code=1)
    assert done.json["outcome"] == "failed"
    assert done.json["settled"]
    assert "the topology was changed meanwhile" in done.err
    assert "Everything is as before" in done.err
    assert site.are_as_before()


def test_killed_when_only_the_end_is_left(site: Site) -> None:
    site.promote_and_die("begin:switched")
    assert site.is_promoted()
    assert site.promote("--json").json["outcome"] == "promoted"
    assert "No promotion that replaces 'db1' was broken off" in site.promote("--abort", code=1).err


@pytest.mark.parametrize("then", ["again", "abort"])
def test_killed_while_it_is_undone(site: Site, then: str) -> None:
    site.promote_and_die("begin:unfencing")
    site.promote_and_die("begin:undoing", "--abort")
    site.promote(*(["--abort"] if then == "abort" else []))
    assert site.is_as_before() if then == "abort" else site.is_promoted()


def test_a_publication_in_flight_cannot_follow_an_undo(site: Site) -> None:
    site.promote_and_die("begin:switching")
    late = site.document()["version"] + 1  # the killed process may have sent it
    site.promote("--abort")
    assert site.document()["version"] >= late
    assert site.is_as_before()


def test_a_process_that_was_silent_for_too_long_publishes_nothing(site: Site) -> None:
    first = site.start("shards", "promote", "db1", STOP_AT="begin:switching")
    site.wait_for_run("switching")
    site.let_lease_expire()
    site.promote("--abort")
    assert site.is_as_before()
    os.kill(first.pid, signal.SIGCONT)
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1
    assert "taken over by another process" in err
    assert site.is_as_before()


def test_a_published_map_whose_answer_was_lost(site: Site) -> None:
    site.trouble("lost")
    assert site.promote("--json").json["outcome"] == "promoted"
    assert site.is_promoted()


def test_a_source_that_publishes_nothing(site: Site) -> None:
    site.trouble("refused")
    assert "--abort" in site.promote(code=1).err
    # It is not known whether a document is on its way, so nobody may write.
    assert site.is_read_only("first")
    site.trouble("")
    site.promote("--abort")
    assert site.is_as_before()


def test_a_source_that_does_not_answer_any_more(site: Site) -> None:
    site.promote_and_die("begin:switching")
    site.trouble("down")
    done = site.promote(code=1, LOOK_UP="0.5")
    assert "is not known" in done.err
    assert site.is_read_only("first")
    site.trouble("")
    site.promote()
    assert site.is_promoted()


def test_an_old_primary_that_dies_meanwhile(site: Site) -> None:
    site.write_a_row(1)
    site.promote_and_die("begin:waiting")
    site.pair.first.kill()
    error = site.promote(code=1).err
    assert "could not be undone" in error
    assert "are refused until it is" in error
    assert "'manage.py shards promote db1 --abort'" in error
    assert "'manage.py shards promote db1 --force'" in error
    done = site.promote("--abort", "--json")
    assert any("could not be made writable" in each for each in done.json["warnings"])
    assert site.promote("--force", "--no-input", "--json").json["forced"]
    assert site.primaries() == {"db2"}
    assert site.rows("second") == {1}


def test_a_journal_that_cannot_be_told_that_all_is_undone(site: Site) -> None:
    site.promote_and_die("begin:waiting")
    groups = copy.deepcopy(site.groups)
    groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
    site.publish(groups)
    site.journal(
        "CREATE TRIGGER trouble BEFORE UPDATE ON sharded_orm_run"
        " WHEN NEW.state = 'undone' BEGIN SELECT RAISE(ABORT, 'the journal is full'); END"
    )
    done = site.promote("--json", code=1)
    assert not done.json["settled"]
    assert "the topology was changed meanwhile" in done.err
    assert "the journal is full" in done.err
    # The message does not ask to repair servers that are as before.
    assert "Everything is as before" in done.err
    assert "are refused" not in done.err
    assert site.are_as_before()
    site.journal("DROP TRIGGER trouble")
    site.promote("--abort")
    assert site.are_as_before()


def test_a_replica_that_dies_meanwhile_keeps_nobody_from_writing(mariadb_site: Site) -> None:
    site = mariadb_site
    site.promote_and_die("begin:waiting")
    site.pair.second.kill()
    try:
        done = site.promote("--abort")
    finally:
        site.pair.second.start()
    assert "'db2' could not be put back" in done.err
    assert not site.is_read_only("first")
    assert site.primaries() == {"db1"}


def test_a_replica_that_stays_behind_is_undone_in_time(site: Site) -> None:
    # Its replication waits for a lock; it was up to date when the promotion began.
    site.write_a_row(1)
    site.wait_until_equal()
    site.promote_and_die("begin:fencing")
    with site.locked("second"):
        site.open_first()
        site.write_a_row(2)
        done = site.promote("--timeout", "1", code=1)
    assert "did not get to" in done.err
    assert "Everything is as before" in done.err
    assert site.is_as_before()


def test_two_operators(site: Site) -> None:
    with site.locked("second"):
        site.write_a_row(1)
        first = site.start("shards", "promote", "db1", "--timeout", "300")
        site.wait_for_run()
        second = site.promote(code=1)
    assert "held by" in second.err
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, err
    assert site.is_promoted()


def test_another_promotion_has_to_be_finished_first(site: Site) -> None:
    site.promote_and_die("begin:waiting")
    done = site.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "shards promote db1" in done.err
