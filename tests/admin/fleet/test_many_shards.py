"""The map of thousands of shards."""

from __future__ import annotations

import json

from tests.admin.fleet.site import MAP, serving
from tests.integration.shards.conftest import Fleet

SHARDS = 4096


def test_a_map_of_4096_shards_is_bounded(fleet: Fleet) -> None:
    half = SHARDS // 2
    ranges = [
        {"range": (0, half - 1), "primary": "one"},
        {"range": (half, SHARDS - 1), "primary": "two"},
    ]
    with serving(fleet, FLEET_CHANGES=json.dumps({"RANGES": ranges})) as site:
        site.get(MAP)
        page = site.get(MAP)
        # The shards do not exist: the test measures the cost of thousands of states.
        assert page.busy < 1
        assert "Each cell stands for up to 8 shards" in page.text
        cells = page.cells("missing") + page.cells("current")
        assert len(cells) <= 600 + 10
        assert len(page.body) < 400_000
        assert "/admin/sharded_orm/shardmap/range/photos/8-15/" in page.links
        assert "0 of" not in page.text
        few = site.get(f"{MAP}range/photos/8-15/")
        assert few.text.count("missing") >= 8
        assert "Range 0-2047" in few.text
        # The page of a range is paginated.
        long = site.get(f"{MAP}range/photos/0-{SHARDS - 1}/?page=41")
        assert "photos_04095" in long.text
        assert "photos_00000" not in long.text
        assert long.busy < 1


def test_many_ranges_have_pages(fleet: Fleet) -> None:
    ranges = [
        {"range": (number, number), "primary": "one" if number % 2 else "two"}
        for number in range(200)
    ]
    with serving(fleet, FLEET_CHANGES=json.dumps({"RANGES": ranges})) as site:
        page = site.get(MAP)
        assert "1 of 4" in page.text
        shards = [
            label
            for number in range(1, 5)
            for label in site.get(f"{MAP}?page={number}").cells("missing")
        ]
        # Some of the files exist for these ranges.
        assert len(shards) == len(set(shards)) == 200 - 4
