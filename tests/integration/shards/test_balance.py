"""``shards balance`` on SQLite and on two servers: what it reads, plans and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shards.conftest import GROUPS, WIDTH, Fleet, MariaDBFleet

#: Six of the eight shards of ``photos`` on the node "one", where half of the others are.
RANGES = [
    {"range": [0, 5], "primary": "one"},
    {"range": [6, 7], "primary": "two"},
]


@pytest.fixture
def load(tmp_path: Path) -> str:
    """Six shards of ``photos`` have a load of 10, the two on the other node of 1."""
    return written(tmp_path, {f"photos_{n:05d}": 10 if n < 6 else 1 for n in range(8)})


def written(folder: Path, content: Any) -> str:
    file = folder / "load.json"
    file.write_text(json.dumps(content))
    return str(file)


def changes(ranges: list[dict[str, Any]]) -> str:
    return json.dumps({"RANGES": ranges})


def balance(fleet: Fleet, *options: str, code: int = 0, **environment: str) -> Any:
    environment = {"FLEET_CHANGES": changes(RANGES), "FLEET_ALONE": "1", **environment}
    return fleet.json("balance", "--cool-down", "0", *options, code=code, **environment)


def test_each_node_is_asked_once(mysql_fleet: MariaDBFleet) -> None:
    with mysql_fleet.packets("one") as to_one, mysql_fleet.packets("two") as to_two:
        mysql_fleet.shards("balance", "--cool-down", "0")
    assert [len(to_one), len(to_two)] == [1, 1]
    assert all("information_schema.tables" in packet for packet in (*to_one, *to_two))


def test_the_sizes_are_those_of_the_status(fleet: Fleet) -> None:
    nodes = fleet.json("status")["nodes"]
    expected = {node["name"]: sum(group["bytes"] for group in node["groups"]) for node in nodes}
    plan = fleet.json("balance", "--cool-down", "0")
    assert plan["before"] == expected
    assert not plan["steps"]  # The node "two" replicates "one".
    assert "cannot exchange" in fleet.shards("balance", "--cool-down", "0").out


def test_the_plan_names_a_command_for_each_step(fleet: Fleet, load: str) -> None:
    options = ("--by", "load", "--load", load)
    plan = balance(fleet, *options)
    assert plan["before"] == {"one": 60, "two": 2}
    assert plan["shares"] == {"one": 31, "two": 31}
    (step,) = plan["steps"]
    moved = [move["item"] for move in step["moves"]]
    assert len(moved) == 3
    numbers = ",".join(sorted(alias[-1] for alias in moved))
    assert step["command"] in (
        f"shards move photos {numbers} --to two",
        f"shards move photos {numbers[0]}-{numbers[-1]} --to two",
    )
    assert plan["after"] == {"one": 30, "two": 32}
    assert plan["moved"] == 30
    assert plan["bytes"] > 0
    shown = fleet.shards(
        "balance", "--cool-down", "0", *options, FLEET_CHANGES=changes(RANGES), FLEET_ALONE="1"
    ).out
    assert f"manage.py {step['command']}" in shown
    assert "one has 194% of the mean, then 97%; two has 6%, then 103%" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_after_these_moves_there_is_nothing_to_move(fleet: Fleet, load: str) -> None:
    (step,) = balance(fleet, "--by", "load", "--load", load)["steps"]
    moved = {int(move["item"][-5:]) for move in step["moves"]}
    nodes = ["two" if n in moved or n > 5 else "one" for n in range(8)]
    ranges = [{"range": [n, n], "primary": node} for n, node in enumerate(nodes)]
    again = balance(fleet, "--by", "load", "--load", load, FLEET_CHANGES=changes(ranges))
    assert again["steps"] == []


def test_pinned_shards_stay(fleet: Fleet, load: str) -> None:
    ranges = [{"range": [0, 4], "primary": "one", "pinned": True},
              {"range": [5, 5], "primary": "one"}, RANGES[1]]  # fmt: skip
    plan = balance(fleet, "--by", "load", "--load", load, FLEET_CHANGES=changes(ranges))
    assert [move["item"] for step in plan["steps"] for move in step["moves"]] == ["photos_00005"]
    (obstacle,) = plan["obstacles"]
    assert obstacle["bin"] == "one"
    assert "must stay there" in obstacle["text"]


def test_capacities(fleet: Fleet, load: str) -> None:
    options = ("--by", "load", "--load", load)
    plan = balance(fleet, *options, FLEET_CAPACITIES='{"one": 3, "two": 1}')
    assert plan["shares"] == {"one": 46.5, "two": 15.5}
    plan = balance(fleet, *options, FLEET_CAPACITIES='{"two": 0}')
    assert plan["after"] == {"one": 62, "two": 0}
    assert {move["target"] for step in plan["steps"] for move in step["moves"]} == {"one"}


def test_only_shards_of_a_group_move_but_all_count(fleet: Fleet, tmp_path: Path) -> None:
    loads = {f"photos_{n:05d}": 1 for n in range(8)} | {"events_00001": 40}
    options = ("--by", "load", "--load", written(tmp_path, loads))
    plan = balance(fleet, "--group", "photos", *options)
    assert plan["before"] == {"one": 6, "two": 42}
    moves = [move for step in plan["steps"] for move in step["moves"]]
    assert {move["item"] for move in moves} == {"photos_00006", "photos_00007"}
    assert "no shard group 'none'" in refused(fleet, "--group", "none")


def test_rows(fleet: Fleet) -> None:
    if fleet.vendor == "sqlite":
        assert "no estimates of rows" in refused(fleet, "--by", "rows")
        return
    assert min(balance(fleet, "--by", "rows")["before"].values()) > 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"photos_00000": "much"}, "must be a number from 0 to 1e+18, not 'much'"),
        ({"photos_00000": -1}, "must be a number from 0 to 1e+18, not '-1'"),
        ({"photos_00000": 10**400}, "must be a number from 0 to 1e+18, not '1000"),
        ({"photos_00000": float("nan")}, "must be a number from 0 to 1e+18, not 'nan'"),
        (
            {"photos_99999": 1},
            "names 'photos_99999', but shards are meant: 'photos_00000' to 'photos_",
        ),
        ([1], "must have a JSON object"),
    ],
)
def test_a_wrong_file_of_loads(sqlite_fleet: Fleet, tmp_path: Path, content: Any, why: str) -> None:
    assert why in refused(sqlite_fleet, "--by", "load", "--load", written(tmp_path, content))


def test_what_cannot_be_planned(sqlite_fleet: Fleet) -> None:
    assert "keeps no history of the topology" in sqlite_fleet.shards("balance", code=1).err
    assert "name a JSON file by --load" in refused(sqlite_fleet, "--by", "load")
    assert "only --by load uses" in refused(sqlite_fleet, "--load", "some.json")
    assert "must be from 0% to the threshold 10%" in refused(sqlite_fleet, "--goal", "20")
    assert "'events' has no directory" in refused(sqlite_fleet, "--by", "keys")
    same = json.dumps(
        {
            n: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": f"{sqlite_fleet.folder}/one"}
            for n in ("one", "two")
        }
    )
    assert "are one server" in refused(sqlite_fleet, FLEET_NODES=same)


def test_a_node_that_does_not_answer(mysql_fleet: MariaDBFleet) -> None:
    nodes = json.loads(mysql_fleet.environment["FLEET_NODES"])
    nodes["two"] |= {"HOST": "127.0.0.1", "PORT": 1}
    why = refused(mysql_fleet, FLEET_NODES=json.dumps(nodes))
    assert "node 'two' does not answer" in why
    assert f"sizes of its {sum(GROUPS.values()) // 2 - 2} shards are not known" in why


def refused(fleet: Fleet, *options: str, **environment: str) -> str:
    environment = {"FLEET_CHANGES": changes(RANGES), "FLEET_ALONE": "1", **environment}
    return fleet.shards("balance", "--cool-down", "0", *options, code=1, **environment).err
