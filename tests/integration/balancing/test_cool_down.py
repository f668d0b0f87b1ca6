"""``shards balance`` and the history of the topology: what has just moved stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.imports.site import Site

LOADS = {"books_00000": 4, "books_00002": 1, "books_00003": 1, "accounts_00002": 4}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """The topology is in the global database. Nothing else is there: a load needs no shards."""
    site = Site(tmp_path)
    setting = site.content["sharded_orm"]
    for group in setting["GROUPS"].values():
        del group["RANGES"]
    # The first process starts with this copy, because nothing was pushed yet.
    last_good = tmp_path / "last_good.json"
    last_good.write_text(document(0, [on("db1", 0, 3)]))
    setting["TOPOLOGY"] = {"SOURCE": "database", "OPTIONS": {"LAST_GOOD": str(last_good)}}
    site.save()
    return site


def document(
    version: int, books: list[dict[str, Any]], capacities: dict[str, float] | None = None
) -> str:
    others = [on("db1", 0, 1), on("db2", 2, 3)]
    groups = {"books": books, "accounts": others, "pins": others}
    ranges = {name: {"RANGES": of_group} for name, of_group in groups.items()}
    nodes = {name: {"CAPACITY": capacity} for name, capacity in (capacities or {}).items()}
    return json.dumps({"format": 1, "version": version, "nodes": nodes, "groups": ranges})


def push(site: Site, *books: dict[str, Any], version: int = 0, **capacities: float) -> None:
    """Publish the ranges of ``books``. ``version`` is the one that they replace."""
    file = site.folder / "topology.json"
    file.write_text(document(version, list(books), capacities))
    site.manage("topology", "push", str(file))


def on(node: str, first: int, last: int, **values: Any) -> dict[str, Any]:
    return {"range": [first, last], "primary": node, **values}


def balance(site: Site, *options: str) -> Any:
    file = site.folder / "load.json"
    file.write_text(json.dumps(LOADS))
    arguments = ("shards", "balance", "--by", "load", "--load", str(file), *options)
    return site.manage(*arguments, "--json").json


def moved(plan: Any) -> list[str]:
    return [move["item"] for step in plan["steps"] for move in step["moves"]]


def test_a_shard_that_has_just_moved_stays(site: Site) -> None:
    push(site, on("db1", 0, 1), on("db2", 2, 3))
    assert balance(site)["recent"] == []
    push(site, on("db1", 1, 1), on("db2", 0, 0), on("db2", 2, 3), version=1)
    plan = balance(site)
    assert plan["recent"] == ["books_00000"]
    assert "books_00000" not in moved(plan)
    assert moved(plan)
    assert "books_00000" in moved(balance(site, "--cool-down", "0", "--group", "books"))
    shown = site.manage("shards", "balance")
    assert "1 shard stays, because it has moved a short time ago." in shown.out


def test_a_promotion_is_no_move(site: Site) -> None:
    push(site, on("db1", 0, 3, replica="db2"))
    push(site, on("db2", 0, 3, replica="db1"), version=1)
    assert balance(site)["recent"] == []


def test_a_shard_that_came_back_has_moved(site: Site) -> None:
    for version, node in enumerate(("db1", "db2", "db1")):
        push(site, on("db1", 1, 3), on(node, 0, 0), version=version)
    assert balance(site)["recent"] == ["books_00000"]


def test_a_history_that_does_not_reach_back(site: Site) -> None:
    push(site, on("db1", 0, 1), on("db2", 2, 3), version=7)
    refused = site.manage("shards", "balance", code=1)
    assert "does not reach back to" in refused.err
    assert "--cool-down" in refused.err
    site.manage("shards", "balance", "--cool-down", "0")


def test_capacities_and_pins_are_published(site: Site) -> None:
    push(site, on("db1", 0, 0, pinned=True), on("db1", 1, 3), db1=1, db2=4)
    plan = balance(site, "--group", "books")
    assert plan["before"] == {"db1": 6, "db2": 4}
    # The node "db1" must keep the pinned shard, and the others share the rest.
    assert plan["shares"] == {"db1": 4, "db2": 6}
    assert sorted(moved(plan)) == ["books_00002", "books_00003"]
