"""A group gets more shards while the site runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.growing.scene import Scene
from tests.patience import PATIENCE

NEW = {"range": [2, 3], "primary": "two"}
MIGRATED = ["0001_initial"]
PLACES = (
    "before:migrate:1",
    "after:migrate:1",
    "after:migrate:2",
    "before:change:1",
    "after:change:1",
    "before:change:2",
    "after:change:2",
)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_directory_group(scene: Scene) -> None:
    scene.run("answer = [Entry(entry_id=n, user_id=n).save() for n in range(20)]")
    done = scene.grow("--weight", "3")
    assert "Range photos 2-3 on two is open." in done.out
    assert scene.ranges()[1] == {**NEW, "weight": 3, "open": True}
    assert [scene.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]
    found = scene.run(
        "answer = [[Entry.objects.get(user_id=n).entry_id for n in range(20)],"
        " sorted({runtime.place('photos', n).number for n in range(100, 200)})]"
    )
    assert found == [list(range(20)), [0, 1, 2, 3]]


def test_an_embedded_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "embedded", SHIFT=10, BITS=3)
    scene.grow("--replica", "one", "--json")
    assert scene.ranges()[1] == {**NEW, "replica": "one", "open": True}
    assert scene.run("answer = runtime.locate('photos', 3 << 10).node") == "two"


def test_it_can_stay_closed(scene: Scene) -> None:
    report = scene.grow("--closed", "--json").json
    assert (report["named"], report["open"]) == (True, False)
    assert scene.ranges()[1] == {**NEW, "open": False}
    placed = scene.run("answer = sorted({runtime.place('photos', n).number for n in range(100)})")
    assert placed == [0, 1]
    scene.manage("shards", "open", "photos", "2-3")
    assert scene.ranges()[1] == {**NEW, "open": True}


def test_nobody_asks_a_shard_that_is_not_there_yet(scene: Scene) -> None:
    process = scene.start("scatter", str(scene.folder))
    scene.wait_for_scatter(2)
    scene.grow()
    scene.wait_for_scatter(4)
    (scene.folder / "stop").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_run_again(scene: Scene, place: str) -> None:
    scene.grow_and_die(place)
    scene.grow()
    assert scene.ranges() == [{"range": [0, 1], "primary": "one"}, {**NEW, "open": True}]
    assert scene.files() == ["photos_00002", "photos_00003"]
    assert [scene.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]


def test_a_shard_that_cannot_be_migrated_is_not_named(scene: Scene) -> None:
    done = scene.grow(code=1, FAIL_ON="photos_00003")
    assert "the disk is full" in done.err
    assert "was not named" in done.err
    assert len(scene.ranges()) == 1
    scene.grow()
    assert len(scene.ranges()) == 2
    assert [scene.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]


def test_other_arguments_have_to_wait(scene: Scene) -> None:
    scene.grow_and_die("before:change:1")
    told = scene.manage("shards", "grow", "photos", "--count", "3", "--primary", "two", code=1).err
    assert "count differ" in told
    assert "shards grow photos --count 2 --primary two" in told
    assert "is given up" in scene.manage("shards", "grow", "photos", "--abort").out
    scene.manage("shards", "grow", "photos", "--count", "3", "--primary", "two")
    assert scene.ranges()[1]["range"] == [2, 4]


def test_a_range_that_is_named_is_not_given_up(scene: Scene) -> None:
    scene.grow_and_die("after:change:1")
    told = scene.manage("shards", "grow", "photos", "--abort", code=1).err
    assert "in the topology already" in told
    scene.grow()
    assert "Nothing was broken off" in scene.manage("shards", "grow", "photos", "--abort").out


def test_twice(scene: Scene) -> None:
    scene.grow()
    scene.grow()
    assert [each["range"] for each in scene.ranges()] == [[0, 1], [2, 3], [4, 5]]


# ##### Refused #####


def test_a_modulo_group(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "modulo")
    assert "cannot grow" in scene.grow(code=1).err
    assert len(scene.ranges()) == 1
    assert scene.files() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--primary", "three"], "names the unknown primary 'three'; NODES has ['one', 'two']"),
        (["--replica", "two"], "has the primary 'two' as its replica"),
        (["--count", "0"], "grows by one shard or more"),
        (["--bounds", "5", "6"], "has no BOUNDS"),
    ],
)
def test_what_makes_no_sense(scene: Scene, arguments: list[str], message: str) -> None:
    assert message in scene.grow(*arguments, code=1).err
    assert len(scene.ranges()) == 1
    assert scene.files() == []
    scene.grow()  # Nothing is in the way.


@pytest.mark.parametrize("source", ["static", "file"])
def test_a_source_that_commands_do_not_write(scene: Scene, source: str) -> None:
    ranges = scene.ranges()
    if source == "static":
        del scene.setting["TOPOLOGY"]
        scene.setting["GROUPS"]["photos"]["RANGES"] = ranges
    else:
        scene.setting["TOPOLOGY"]["SOURCE"] = "file"
    scene.save()
    for arguments, change in {
        ("grow", "photos", "--count", "2", "--primary", "two"): "range [2, 3] is new",
        ("weight", "photos", "0-1", "2"): "range [0, 1]: weight 1 (the default) becomes 2",
    }.items():
        done = scene.manage("shards", *arguments, code=1)
        assert change in done.err
    assert scene.ranges() == ranges
    assert scene.files() == []


# ##### Ranges of keys #####


@pytest.fixture
def bounded(tmp_path: Path) -> Scene:
    scene = Scene(tmp_path, "range", BOUNDS=[0, 1000])
    scene.run("answer = [Entry(entry_id=n, user_id=n).save() for n in (1, 1500, 1999)]")
    return scene


def test_bounds_above_every_key(bounded: Scene) -> None:
    done = bounded.grow("--bounds", "2000", "3000")
    assert "is in use" in done.out
    assert bounded.bounds() == [0, 1000, 2000, 3000]
    assert bounded.run(
        "Entry(entry_id=2500, user_id=2500).save()\n"
        "answer = [Entry.objects.get(user_id=n)._state.db for n in (1, 1500, 1999, 2500)]"
    ) == ["photos_00000", "photos_00001", "photos_00001", "photos_00002"]


@pytest.mark.parametrize("bound", ["1500", "1999"])
def test_a_bound_below_a_key(bounded: Scene, bound: str) -> None:
    done = bounded.grow("--bounds", bound, "3000", code=1)
    assert "must lie above every key in use" in done.err
    assert "photos_00001" in done.err
    assert "entries.Entry" in done.err
    assert len(bounded.ranges()) == 1
    assert bounded.files() == []


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "needs a lower bound for each new shard"),
        (["2000"], "needs a lower bound for each new shard"),
        (["3000", "2000"], "ascending"),
        (["500", "3000"], "ascending"),
        (["2000", "m"], "whole numbers"),
    ],
)
def test_bounds_that_are_none(bounded: Scene, bounds: list[str], message: str) -> None:
    arguments: list[Any] = ["--bounds", *bounds] if bounds else []
    assert message in bounded.grow(*arguments, code=1).err
    assert len(bounded.ranges()) == 1


@pytest.mark.parametrize("place", ["after:migrate:1", "before:change:1", "after:change:1"])
def test_bounds_after_a_kill(bounded: Scene, place: str) -> None:
    bounded.grow_and_die(place, "--bounds", "2000", "3000")
    bounded.grow("--bounds", "2000", "3000")
    assert bounded.bounds() == [0, 1000, 2000, 3000]
    assert [each["range"] for each in bounded.ranges()] == [[0, 1], [2, 3]]


def test_ranges_of_one_size(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "range", SIZE=1000)
    scene.grow()
    assert scene.run("answer = runtime.locate('photos', 3500).number") == 3
