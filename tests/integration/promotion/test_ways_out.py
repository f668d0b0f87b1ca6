"""What ``--check`` suggests after a promotion was broken off: it is done here, and works."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.integration.promotion.scene import Scene
from tests.patience import PATIENCE
from tests.services.replication import wait_until_equal

FINISH, UNDO = "shards promote db1", "shards promote db1 --abort"
BOTH = [FINISH, UNDO]
#: Where it is killed, and what is possible then.
POSSIBLE = {
    "begin:fencing": BOTH,
    "begin:waiting": BOTH,
    "begin:stopping": BOTH,
    "begin:unfencing": BOTH,
    "begin:switching": BOTH,
    "end:switching": [FINISH],
    "begin:switched": [FINISH],
    "begin:undoing": BOTH,
}


def suggested(scene: Scene, code: int = 1) -> list[str]:
    """The commands that a check names."""
    told = scene.promote("--check", code=code).err
    assert "was broken off" in told
    return re.findall(r"'manage\.py (shards promote [^']+)'", told)


def follow(scene: Scene, suggestion: str) -> None:
    done = scene.manage(*shlex.split(suggestion))
    assert done.code == 0, f"{suggestion}: {done.err}"


def break_off(scene: Scene, place: str) -> None:
    if place == "begin:undoing":
        scene.promote_and_die("begin:unfencing")
        scene.promote_and_die(place, "--abort")
    else:
        scene.promote_and_die(place)


# From each phase both commands are run by the tests of kills, but not from "undoing".
FOLLOWED = [
    *((place, possible[-1]) for place, possible in POSSIBLE.items()),
    ("begin:undoing", FINISH),
]


@pytest.mark.parametrize(("place", "suggestion"), FOLLOWED)
def test_a_suggestion_works(scene: Scene, place: str, suggestion: str) -> None:
    scene.write_a_row(1)
    break_off(scene, place)
    assert suggested(scene) == POSSIBLE[place]
    follow(scene, suggestion)
    assert scene.is_promoted() if suggestion == FINISH else scene.is_as_before()
    assert scene.rows("second") == {1}


@pytest.mark.parametrize("suggestion", [f"{FINISH} --force", UNDO])
def test_without_the_old_primary(scene: Scene, suggestion: str) -> None:
    scene.pair.first.kill()
    scene.promote_and_die("begin:stopping", "--force", "--no-input")
    assert suggested(scene) == [f"{FINISH} --force", UNDO]
    follow(scene, suggestion)
    assert scene.primaries() == ({"db1"} if suggestion == UNDO else {"db2"})
    assert scene.is_read_only("second") == (suggestion == UNDO)


def test_an_old_primary_that_has_died_since(scene: Scene) -> None:
    scene.write_a_row(1)
    wait_until_equal(scene.pair)
    scene.promote_and_die("begin:stopping")
    scene.pair.first.kill()
    assert suggested(scene) == [UNDO, f"{FINISH} --force"]
    follow(scene, UNDO)
    follow(scene, f"{FINISH} --force --no-input")
    assert scene.primaries() == {"db2"}
    assert scene.rows("second") == {1}


def test_a_given_up_primary_that_has_come_back(scene: Scene) -> None:
    scene.pair.first.kill()
    scene.promote_and_die("begin:stopping", "--force", "--no-input")
    scene.pair.first.start()
    assert suggested(scene) == [UNDO, FINISH]
    follow(scene, UNDO)
    scene.wait_until_replicating()
    follow(scene, FINISH)
    assert scene.is_promoted()


def test_a_replica_that_has_died_since(scene: Scene) -> None:
    scene.promote_and_die("begin:stopping")
    scene.pair.second.kill()
    try:
        assert suggested(scene) == [UNDO]
        follow(scene, UNDO)
    finally:
        scene.pair.second.start()
    assert not scene.is_read_only("first")


@pytest.mark.parametrize("place", ["begin:unfencing", "begin:switching"])
def test_a_source_that_does_not_answer(scene: Scene, place: str) -> None:
    scene.promote_and_die(place)
    scene.trouble("down")
    told = scene.promote("--check", code=1).err
    assert "are refused until" in told
    if place == "begin:unfencing":
        # The map was not published, whatever the source would say.
        assert suggested(scene) == [UNDO]
        follow(scene, UNDO)
        assert scene.are_as_before()
        scene.trouble("")
    else:
        assert "when it answers" in told
        assert suggested(scene) == BOTH
        scene.trouble("")
        follow(scene, FINISH)
        assert scene.is_promoted()


def test_another_command_is_told_the_same(scene: Scene) -> None:
    scene.promote_and_die("begin:switched")
    done = scene.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'manage.py shards promote db1'" in done.err
    assert "--abort" not in done.err


def test_one_that_is_under_way_is_not_begun_again(scene: Scene) -> None:
    with scene.locked("second"):
        scene.write_a_row(1)
        first = scene.start("shards", "promote", "db1", "--timeout", "300")
        scene.wait_for_run()
        assert "is under way" in scene.promote("--check", code=1).err
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, err
