"""Opening, closing and weighting ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.growth.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.grow()
    return site


def placed(site: Site, first: int = 0) -> set[int]:
    numbers = site.run(
        f"answer = [runtime.place('photos', n).number for n in range({first}, {first + 100})]"
    )
    return set(numbers)


def test_a_closed_range_keeps_its_keys(site: Site) -> None:
    done = site.manage("shards", "close", "photos", "0-1")
    assert "Range photos 0-1 is closed" in done.out
    assert placed(site) == {2, 3}
    site.manage("shards", "open", "photos", "0-1")
    assert placed(site, 100) == {0, 1, 2, 3}


def test_a_weight(site: Site) -> None:
    site.manage("shards", "weight", "photos", "2-3", "0.5")
    assert site.ranges()[1]["weight"] == 0.5
    site.manage("shards", "weight", "photos", "2-3", "0")
    assert placed(site) == {0, 1}


def test_the_last_open_range_stays_open(site: Site) -> None:
    site.manage("shards", "close", "photos", "0-1")
    error = site.manage("shards", "close", "photos", "2-3", code=1).err
    assert "no range is open for new keys" in error
    assert placed(site) == {2, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["close", "photos", "0-3"], "has no range 0-3; its ranges are 0-1, 2-3"),
        (["close", "albums", "0-1"], "There is no shard group 'albums'"),
    ],
)
def test_what_does_not_exist(site: Site, arguments: list[str], message: str) -> None:
    assert message in site.manage("shards", *arguments, code=1).err


@pytest.mark.parametrize(
    "arguments",
    [
        ["close", "photos", "0"],
        ["close", "photos", "\u0660-\u0661"],
        ["close", "photos", f"0-{'9' * 5000}"],
        *(["weight", "photos", "0-1", weight] for weight in ("-1", "nan", "1e308", "1000001")),
    ],
)
def test_what_is_no_range_or_weight(site: Site, arguments: list[str]) -> None:
    site.manage("shards", *arguments, code=2)


def test_a_group_that_chooses_no_shards(tmp_path: Path) -> None:
    site = Site(tmp_path, "modulo")
    error = site.manage("shards", "close", "photos", "0-1", code=1).err
    assert "never chooses a shard" in error
