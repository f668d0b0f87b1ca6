"""A group gets more shards while the site runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.growth.site import Site
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
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_directory_group(site: Site) -> None:
    site.run("answer = [Entry(entry_id=n, user_id=n).save() for n in range(20)]")
    done = site.grow("--weight", "3")
    assert "Range photos 2-3 on two is open." in done.out
    assert site.ranges()[1] == {**NEW, "weight": 3, "open": True}
    assert [site.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]
    found = site.run(
        "answer = [[Entry.objects.get(user_id=n).entry_id for n in range(20)],"
        " sorted({runtime.place('photos', n).number for n in range(100, 200)})]"
    )
    assert found == [list(range(20)), [0, 1, 2, 3]]


def test_an_embedded_group(tmp_path: Path) -> None:
    site = Site(tmp_path, "embedded", SHIFT=10, BITS=3)
    site.grow("--replica", "one", "--json")
    assert site.ranges()[1] == {**NEW, "replica": "one", "open": True}
    assert site.run("answer = runtime.locate('photos', 3 << 10).node") == "two"


def test_it_can_stay_closed(site: Site) -> None:
    report = site.grow("--closed", "--json").json
    assert (report["named"], report["open"]) == (True, False)
    assert site.ranges()[1] == {**NEW, "open": False}
    placed = site.run("answer = sorted({runtime.place('photos', n).number for n in range(100)})")
    assert placed == [0, 1]
    site.manage("shards", "open", "photos", "2-3")
    assert site.ranges()[1] == {**NEW, "open": True}


def test_nobody_asks_a_shard_that_is_not_there_yet(site: Site) -> None:
    process = site.start("scatter", str(site.folder))
    site.wait_for_scatter(2)
    site.grow()
    site.wait_for_scatter(4)
    (site.folder / "stop").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_run_again(site: Site, place: str) -> None:
    site.grow_and_die(place)
    site.grow()
    assert site.ranges() == [{"range": [0, 1], "primary": "one"}, {**NEW, "open": True}]
    assert site.files() == ["photos_00002", "photos_00003"]
    assert [site.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]


def test_a_shard_that_cannot_be_migrated_is_not_named(site: Site) -> None:
    done = site.grow(code=1, FAIL_ON="photos_00003")
    assert "the disk is full" in done.err
    assert "was not named" in done.err
    assert len(site.ranges()) == 1
    site.grow()
    assert len(site.ranges()) == 2
    assert [site.migrations(number) for number in (2, 3)] == [MIGRATED, MIGRATED]


def test_other_arguments_have_to_wait(site: Site) -> None:
    site.grow_and_die("before:change:1")
    error = site.manage("shards", "grow", "photos", "--count", "3", "--primary", "two", code=1).err
    assert "count differ" in error
    assert "shards grow photos --count 2 --primary two" in error
    assert "is given up" in site.manage("shards", "grow", "photos", "--abort").out
    site.manage("shards", "grow", "photos", "--count", "3", "--primary", "two")
    assert site.ranges()[1]["range"] == [2, 4]


def test_a_range_that_is_named_is_not_given_up(site: Site) -> None:
    site.grow_and_die("after:change:1")
    error = site.manage("shards", "grow", "photos", "--abort", code=1).err
    assert "in the topology already" in error
    site.grow()
    assert "Nothing was broken off" in site.manage("shards", "grow", "photos", "--abort").out


def test_twice(site: Site) -> None:
    site.grow()
    site.grow()
    assert [each["range"] for each in site.ranges()] == [[0, 1], [2, 3], [4, 5]]


# ##### Refused #####


def test_a_modulo_group(tmp_path: Path) -> None:
    site = Site(tmp_path, "modulo")
    assert "cannot grow" in site.grow(code=1).err
    assert len(site.ranges()) == 1
    assert site.files() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--primary", "three"], "names the unknown primary 'three'; NODES has ['one', 'two']"),
        (["--replica", "two"], "has the primary 'two' as its replica"),
        (["--count", "0"], "grows by one shard or more"),
        (["--bounds", "5", "6"], "has no BOUNDS"),
    ],
)
def test_what_makes_no_sense(site: Site, arguments: list[str], message: str) -> None:
    assert message in site.grow(*arguments, code=1).err
    assert len(site.ranges()) == 1
    assert site.files() == []
    site.grow()  # it is allowed again


@pytest.mark.parametrize("source", ["static", "file"])
def test_a_source_that_commands_do_not_write(site: Site, source: str) -> None:
    ranges = site.ranges()
    if source == "static":
        del site.setting["TOPOLOGY"]
        site.setting["GROUPS"]["photos"]["RANGES"] = ranges
    else:
        site.setting["TOPOLOGY"]["SOURCE"] = "file"
    site.save()
    for arguments, change in {
        ("grow", "photos", "--count", "2", "--primary", "two"): "range [2, 3] is new",
        ("weight", "photos", "0-1", "2"): "range [0, 1]: weight 1 (the default) becomes 2",
    }.items():
        done = site.manage("shards", *arguments, code=1)
        assert change in done.err
    assert site.ranges() == ranges
    assert site.files() == []


# ##### Ranges of keys #####


@pytest.fixture
def bounded(tmp_path: Path) -> Site:
    site = Site(tmp_path, "range", BOUNDS=[0, 1000])
    site.run("answer = [Entry(entry_id=n, user_id=n).save() for n in (1, 1500, 1999)]")
    return site


def test_bounds_above_every_key(bounded: Site) -> None:
    done = bounded.grow("--bounds", "2000", "3000")
    assert "is in use" in done.out
    assert bounded.bounds() == [0, 1000, 2000, 3000]
    assert bounded.run(
        "Entry(entry_id=2500, user_id=2500).save()\n"
        "answer = [Entry.objects.get(user_id=n)._state.db for n in (1, 1500, 1999, 2500)]"
    ) == ["photos_00000", "photos_00001", "photos_00001", "photos_00002"]


@pytest.mark.parametrize("bound", ["1500", "1999"])
def test_a_bound_below_a_key(bounded: Site, bound: str) -> None:
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
def test_bounds_that_are_none(bounded: Site, bounds: list[str], message: str) -> None:
    arguments: list[Any] = ["--bounds", *bounds] if bounds else []
    assert message in bounded.grow(*arguments, code=1).err
    assert len(bounded.ranges()) == 1


@pytest.mark.parametrize("place", ["after:migrate:1", "before:change:1", "after:change:1"])
def test_bounds_after_a_kill(bounded: Site, place: str) -> None:
    bounded.grow_and_die(place, "--bounds", "2000", "3000")
    bounded.grow("--bounds", "2000", "3000")
    assert bounded.bounds() == [0, 1000, 2000, 3000]
    assert [each["range"] for each in bounded.ranges()] == [[0, 1], [2, 3]]


def test_ranges_of_one_size(tmp_path: Path) -> None:
    site = Site(tmp_path, "range", SIZE=1000)
    site.grow()
    assert site.run("answer = runtime.locate('photos', 3500).number") == 3
