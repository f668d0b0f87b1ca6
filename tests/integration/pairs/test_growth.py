"""``manage.py shards grow --pair``: new shards, half of which are active on each side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pairs.site import PairSite, directory_groups
from tests.services.replication import MasterPair, execute

FENCING = "before:sharded_orm.operations.pairs.switch_runner.fence_passive_sides:1"
GROW = ("shards", "grow", "photos", "--count", "3", "--pair", "db1", "db2")


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> PairSite:
    site = PairSite(pair, tmp_path, groups=directory_groups())
    site.create_databases()
    return site


def test_half_of_the_new_shards_are_active_on_each_side(site: PairSite) -> None:
    assert site.manage(*GROW, KILL_AT=FENCING).code == -9
    done = site.manage(*GROW)
    assert done.code == 0, done.err
    assert "Range photos 4-6 on db1 and db2 is open." in done.out
    pair = {"pair": ["db1", "db2"], "open": True}
    assert site.document()["groups"]["photos"]["RANGES"][2:] == [
        {"range": [4, 5], "active": "db1", **pair},
        {"range": [6, 6], "active": "db2", **pair},
    ]
    (state,) = site.manage("shards", "status", "--json", "--shards", "4-6").json["pairs"]
    assert (state["active"], state["writable"], state["closed"]) == ({"db1": 2, "db2": 1}, [], [])
    assert site.pairs("check").code == 0


def test_a_pair_that_is_not_in_order_is_refused(site: PairSite) -> None:
    execute(site.pair.second, "STOP SLAVE")
    done = site.manage(*GROW)
    assert done.code == 1
    assert "'db2'" in done.err
    execute(site.pair.second, "START SLAVE")
    both = site.manage(*GROW, "--replica", "db2")
    assert "--pair is instead of --primary and --replica" in both.err
    assert len(site.document()["groups"]["photos"]["RANGES"]) == 2
    # The refused growth was not left unfinished.
    assert "Nothing was broken off" in site.manage("shards", "grow", "photos", "--abort").out
