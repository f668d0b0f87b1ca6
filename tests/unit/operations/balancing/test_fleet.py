"""Which shards may move to which node, by the topology."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.operations.balancing.fleet import FleetSnapshot, balance_problem
from sharded_orm.operations.balancing.problem import BalanceProblem
from sharded_orm.operations.exceptions import BalanceRefused
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology

MYSQL = "sharded_orm.backends.mysql"


def node(name: str, **settings: Any) -> dict[str, Any]:
    return {"ENGINE": MYSQL, "HOST": name, **settings}


def problem(
    nodes: dict[str, dict[str, Any]],
    *groups: tuple[str, list[ShardRange]],
    only: str | None = None,
    recent: frozenset[str] = frozenset(),
    template: str = "{group}_{shard:05d}",
) -> BalanceProblem:
    topology = Topology(
        nodes,
        {
            name: ShardGroup(name, tuple(ranges), "modulo", database_name=template)
            for name, ranges in groups
        },
    )
    sizes = {shard.alias: 1.0 for group in topology.groups.values() for shard in group.shards()}
    names = [name for name, _ in groups if only in (None, name)]
    snapshot = FleetSnapshot(topology, sizes, recent)
    return balance_problem(snapshot, names, threshold=0.1, goal=0.1)


def targets(problem: BalanceProblem) -> dict[str, str]:
    """The targets of each shard beside its own node, as text: ``{"photos_00000": "b c"}``."""
    return {item.name: " ".join(sorted(item.targets - {item.bin})) for item in problem.items}


def test_shards_move_between_the_primaries_of_their_group() -> None:
    nodes = {name: node(name) for name in "abcd"}
    found = problem(
        nodes,
        ("photos", [ShardRange(0, 0, "a"), ShardRange(1, 1, "b")]),
        ("events", [ShardRange(0, 0, "c")]),
    )
    assert targets(found) == {"photos_00000": "b", "photos_00001": "a", "events_00000": ""}
    # The node "d" is nobody's primary: it may be a replica, or not ready.
    assert [one.name for one in found.bins] == ["a", "b", "c"]


def test_a_capacity_makes_a_node_a_target_of_all_groups() -> None:
    nodes = {"a": node("a"), "b": node("b", CAPACITY=2), "old": node("old", CAPACITY=0)}
    nodes["file"] = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/file", "CAPACITY": 1}
    found = problem(
        nodes,
        ("photos", [ShardRange(0, 0, "a")]),
        ("events", [ShardRange(0, 0, "a"), ShardRange(1, 1, "old")]),
    )
    assert targets(found) == {"photos_00000": "b", "events_00000": "b", "events_00001": "a b"}
    assert {one.name: one.capacity for one in found.bins} == {"a": 1, "b": 2, "old": 0, "file": 1}


def test_nothing_moves_between_a_server_and_its_replica() -> None:
    nodes = {name: node(name) for name in "abc"}
    found = problem(
        nodes,
        ("photos", [ShardRange(0, 0, "a", "b"), ShardRange(1, 1, "c")]),
        # Nobody replicates this range, but the server "b" replicates all of "a".
        ("events", [ShardRange(0, 0, "a"), ShardRange(1, 1, "b"), ShardRange(2, 2, "c")]),
    )
    assert targets(found) == {
        "photos_00000": "c",
        "photos_00001": "a",
        "events_00000": "c",
        "events_00001": "c",
        "events_00002": "a b",
    }


def test_pinned_and_recent_shards_and_those_of_other_groups_stay() -> None:
    nodes = {name: node(name) for name in "ab"}
    ranges = [ShardRange(0, 1, "a"), ShardRange(2, 2, "a", pinned=True), ShardRange(3, 3, "b")]
    found = problem(
        nodes,
        ("photos", ranges),
        ("events", ranges),
        only="photos",
        recent=frozenset({"photos_00001"}),
    )
    assert [name for name, names in targets(found).items() if names] == [
        "photos_00000",
        "photos_00003",
    ]
    assert sum(item.size for item in found.items) == 8


def test_two_names_of_one_server() -> None:
    nodes = {"a": node("host"), "b": node("host"), "c": node("other")}
    ranges = [ShardRange(0, 0, "a"), ShardRange(1, 1, "b"), ShardRange(2, 2, "c")]
    with pytest.raises(BalanceRefused, match=r"\['a', 'b'\] are one server"):
        problem(nodes, ("photos", ranges))


def test_groups_whose_schemas_have_the_same_names() -> None:
    nodes = {name: node(name) for name in "abcd"}
    groups = [
        ("photos", [ShardRange(0, 0, "a"), ShardRange(1, 1, "b")]),
        ("events", [ShardRange(0, 0, "c"), ShardRange(1, 1, "d")]),
    ]
    with pytest.raises(BalanceRefused, match="must not meet on a server"):
        problem(nodes, *groups, template="db{shard:05d}")


def test_shards_stay_on_pairs_and_none_moves_there() -> None:
    nodes = {name: node(name) for name in "abcd"}
    ranges = [
        ShardRange(0, 0, "a", "b", is_pair=True),
        ShardRange(1, 1, "b", "a", is_pair=True),
        ShardRange(2, 2, "c"),
        ShardRange(3, 3, "d"),
    ]
    assert targets(problem(nodes, ("photos", ranges))) == {
        "photos_00000": "",
        "photos_00001": "",
        "photos_00002": "d",
        "photos_00003": "c",
    }
