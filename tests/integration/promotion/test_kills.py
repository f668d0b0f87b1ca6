"""The operator's process killed with SIGKILL in each phase, and a source that loses answers."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest

from tests.integration.promotion.scene import Scene
from tests.patience import PATIENCE
from tests.services.replication import execute, wait_until_equal

PHASES = ("fencing", "waiting", "stopping", "unfencing", "switching")
PLACES = [f"{side}:{phase}" for phase in PHASES for side in ("begin", "end")]
# The map is published there, though the journal does not know.
PUBLISHED = "end:switching"


def _marked(places: list[str]) -> list[Any]:
    """The ends of phases take their time: they are for a long run, but for the last."""
    return [
        pytest.param(
            place, marks=[pytest.mark.long] if "end" in place and place != PUBLISHED else []
        )
        for place in places
    ]


def unmistakable(scene: Scene) -> bool:
    """Nobody may write to a server that the map does not name, or will not be named."""
    first, second = not scene.is_read_only("first"), not scene.is_read_only("second")
    return not (first and second)


@pytest.mark.parametrize("place", _marked(PLACES))
def test_killed_and_run_again(scene: Scene, place: str) -> None:
    scene.write_a_row(1)
    scene.promote_and_die(place)
    assert unmistakable(scene)
    done = scene.promote("--json")
    assert done.json["outcome"] == "promoted"
    assert scene.is_promoted()
    assert scene.rows("second") == {1}
    assert "goes on with run" in done.err


@pytest.mark.parametrize("place", _marked([place for place in PLACES if place != PUBLISHED]))
def test_killed_and_undone(scene: Scene, place: str) -> None:
    scene.write_a_row(1)
    scene.promote_and_die(place)
    assert scene.promote("--abort", "--json").json["outcome"] == "undone"
    assert scene.is_as_before()
    # It works as if nothing had been: rows arrive, and it can be promoted.
    scene.write_a_row(2)
    wait_until_equal(scene.pair)
    assert scene.rows("second") == {1, 2}
    scene.promote()
    assert scene.is_promoted()


def test_writers_go_on_after_a_kill_and_an_abort(scene: Scene) -> None:
    with scene.writers(2) as writers:
        scene.promote_and_die("begin:stopping")
        scene.promote("--abort")
        for number in writers.numbers:
            writers.wait_for_more(number)
        scene.promote()
        for number in writers.numbers:
            writers.wait_for_more(number)
    rows = scene.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        assert {code for _, code, _ in writers.errors(number)} <= {1290}


def test_a_published_map_cannot_be_undone(scene: Scene) -> None:
    scene.promote_and_die(PUBLISHED)
    done = scene.promote("--abort", code=1)
    assert "cannot be undone" in done.err
    scene.promote()
    assert scene.is_promoted()


def test_a_check_tells_of_what_was_broken_off(scene: Scene) -> None:
    scene.promote_and_die("end:fencing")
    told = scene.promote("--check", code=1).err
    assert "replaces 'db1' was broken off in the phase 'fencing'" in told
    assert "'manage.py shards promote db1'" in told
    assert "'manage.py shards promote db1 --abort'" in told
    scene.promote("--abort")
    scene.promote("--check")


def test_a_topology_that_was_changed_after_the_fence(scene: Scene) -> None:
    scene.promote_and_die("begin:waiting")
    groups = copy.deepcopy(scene.groups)
    groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
    scene.publish(groups)
    done = scene.promote("--json", code=1)
    assert done.json["outcome"] == "failed"
    assert done.json["settled"]
    assert "the topology was changed meanwhile" in done.err
    assert "Everything is as before" in done.err
    assert scene.are_as_before()


def test_killed_when_only_the_end_is_left(scene: Scene) -> None:
    scene.promote_and_die("begin:switched")
    assert scene.is_promoted()
    assert scene.promote("--json").json["outcome"] == "promoted"
    assert "No promotion that replaces 'db1' was broken off" in scene.promote("--abort", code=1).err


@pytest.mark.parametrize("then", ["again", "abort"])
def test_killed_while_it_is_undone(scene: Scene, then: str) -> None:
    scene.promote_and_die("begin:unfencing")
    scene.promote_and_die("begin:undoing", "--abort")
    scene.promote(*(["--abort"] if then == "abort" else []))
    assert scene.is_as_before() if then == "abort" else scene.is_promoted()


def test_a_publication_in_flight_cannot_follow_an_undo(scene: Scene) -> None:
    scene.promote_and_die("begin:switching")
    late = scene.document()["version"] + 1  # What the killed process may have sent.
    scene.promote("--abort")
    assert scene.document()["version"] >= late
    assert scene.is_as_before()


def test_a_process_that_was_silent_for_too_long_publishes_nothing(scene: Scene) -> None:
    first = scene.start("shards", "promote", "db1", STOP_AT="begin:switching")
    scene.wait_for_run("switching")
    scene.let_lease_expire()
    scene.promote("--abort")
    assert scene.is_as_before()
    os.kill(first.pid, signal.SIGCONT)
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 1
    assert "taken over by another process" in err
    assert scene.is_as_before()


def test_a_published_map_whose_answer_was_lost(scene: Scene) -> None:
    scene.trouble("lost")
    assert scene.promote("--json").json["outcome"] == "promoted"
    assert scene.is_promoted()


def test_a_source_that_publishes_nothing(scene: Scene) -> None:
    scene.trouble("refused")
    assert "--abort" in scene.promote(code=1).err
    # Whether something is on its way is not known: nobody may write.
    assert scene.is_read_only("first")
    scene.trouble("")
    scene.promote("--abort")
    assert scene.is_as_before()


def test_a_source_that_does_not_answer_any_more(scene: Scene) -> None:
    scene.promote_and_die("begin:switching")
    scene.trouble("down")
    done = scene.promote(code=1, LOOK_UP="0.5")
    assert "is not known" in done.err
    assert scene.is_read_only("first")
    scene.trouble("")
    scene.promote()
    assert scene.is_promoted()


def test_an_old_primary_that_dies_meanwhile(scene: Scene) -> None:
    scene.write_a_row(1)
    scene.promote_and_die("begin:waiting")
    scene.pair.first.kill()
    told = scene.promote(code=1).err
    assert "could not be undone" in told
    assert "are refused until it is" in told
    assert "'manage.py shards promote db1 --abort'" in told
    assert "'manage.py shards promote db1 --force'" in told
    done = scene.promote("--abort", "--json")
    assert any("could not be made writable" in each for each in done.json["warnings"])
    assert scene.promote("--force", "--no-input", "--json").json["forced"]
    assert scene.primaries() == {"db2"}
    assert scene.rows("second") == {1}


def test_a_journal_that_cannot_be_told_that_all_is_undone(scene: Scene) -> None:
    scene.promote_and_die("begin:waiting")
    groups = copy.deepcopy(scene.groups)
    groups["photos"]["RANGES"][1].update(primary="db2", replica="db1")
    scene.publish(groups)
    scene.journal(
        "CREATE TRIGGER trouble BEFORE UPDATE ON sharded_orm_run"
        " WHEN NEW.state = 'undone' BEGIN SELECT RAISE(ABORT, 'the journal is full'); END"
    )
    done = scene.promote("--json", code=1)
    assert not done.json["settled"]
    assert "the topology was changed meanwhile" in done.err
    assert "the journal is full" in done.err
    # Nobody is sent to mend servers that are as before.
    assert "Everything is as before" in done.err
    assert "are refused" not in done.err
    assert scene.are_as_before()
    scene.journal("DROP TRIGGER trouble")
    scene.promote("--abort")
    assert scene.are_as_before()


def test_a_replica_that_dies_meanwhile_keeps_nobody_from_writing(scene: Scene) -> None:
    scene.promote_and_die("begin:waiting")
    scene.pair.second.kill()
    try:
        done = scene.promote("--abort")
    finally:
        scene.pair.second.start()
    assert "'db2' could not be put back" in done.err
    assert not scene.is_read_only("first")
    assert scene.primaries() == {"db1"}


def test_a_replica_that_stays_behind_is_undone_in_time(scene: Scene) -> None:
    # Its replication waits for a lock; it is up to date when the promotion begins.
    scene.write_a_row(1)
    wait_until_equal(scene.pair)
    scene.promote_and_die("begin:fencing")
    with scene.locked("second"):
        execute(scene.pair.first, "SET GLOBAL read_only = OFF")
        scene.write_a_row(2)
        done = scene.promote("--timeout", "1", code=1)
    assert "did not get to" in done.err
    assert "Everything is as before" in done.err
    assert scene.is_as_before()


def test_two_operators(scene: Scene) -> None:
    with scene.locked("second"):
        scene.write_a_row(1)
        first = scene.start("shards", "promote", "db1", "--timeout", "300")
        scene.wait_for_run()
        second = scene.promote(code=1)
    assert "held by" in second.err
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, err
    assert scene.is_promoted()


def test_another_promotion_has_to_be_finished_first(scene: Scene) -> None:
    scene.promote_and_die("begin:waiting")
    done = scene.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "shards promote db1" in done.err
