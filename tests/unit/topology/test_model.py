"""Topologies: look-ups, and everything that a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.topology.model import Shard, ShardGroup, ShardRange, Topology, problems

NODES: dict[str, dict[str, Any]] = {
    "a": {"ENGINE": "sharded_orm.backends.mysql", "HOST": "one"},
    "b": {"ENGINE": "sharded_orm.backends.mysql", "HOST": "two"},
}


def topology(*ranges: ShardRange, **more: ShardGroup) -> Topology:
    group = ShardGroup("photos", ranges, "modulo")
    return Topology(NODES, {"photos": group, **more})


def test_ranges_tell_node_and_replica() -> None:
    group = topology(ShardRange(0, 511, "a", "b"), ShardRange(512, 1023, "b")).groups["photos"]
    assert group.count == 1024
    assert group.shard(511) == Shard("photos", 511, "a", "b", "photos_00511")
    assert group.shard(512).node == "b"
    assert group.shard(512).alias == "photos_00512"
    with pytest.raises(LookupError, match="0 to 1023"):
        group.shard(1024)


@pytest.mark.parametrize(
    ("alias", "number"),
    [
        ("photos_00042", 42),
        ("photos_42", None),
        ("photos_00512", None),
        ("photos_-0001", None),
        ("photos_000042", None),
        ("photos_٠٠٠٠١", None),
        ("photos", None),
        ("other_00001", None),
        ("photos_0001x", None),
    ],
)
def test_an_alias_names_a_shard_only_in_its_one_spelling(alias: str, number: int | None) -> None:
    shard = topology(ShardRange(0, 511, "a")).resolve(alias)
    assert (shard.number if shard else None) == number


def test_aliases_beyond_five_digits() -> None:
    found = topology(ShardRange(0, 199_999, "a")).resolve("photos_100000")
    assert found is not None and found.alias == "photos_100000"


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], "RANGES is empty"),
        ([ShardRange(1, 5, "a")], "no range covers shards 0 to 0"),
        ([ShardRange(0, 3, "a"), ShardRange(6, 9, "a")], "no range covers shards 4 to 5"),
        ([ShardRange(0, 5, "a"), ShardRange(4, 9, "a")], "shards 4 to 5 are in two ranges"),
        ([ShardRange(0, 9, "a"), ShardRange(2, 3, "a")], "shards 2 to 3 are in two ranges"),
        ([ShardRange(5, 0, "a")], "ends before it begins"),
        ([ShardRange(0, 5, "z")], "unknown primary 'z'"),
        ([ShardRange(0, 5, "a", "z")], "unknown replica 'z'"),
        ([ShardRange(0, 5, "a", "a")], "as its replica"),
        ([ShardRange(0, 5, "a", weight=-1)], "negative weight"),
    ],
)
def test_wrong_ranges(ranges: list[ShardRange], expected: str) -> None:
    assert any(expected in problem for problem in problems(topology(*ranges)))


def test_a_sound_topology_has_no_problems() -> None:
    other = ShardGroup("users", (ShardRange(0, 511, "a"),), "modulo")
    assert problems(topology(ShardRange(0, 511, "a", "b"), users=other)) == []


def test_two_groups_on_one_schema() -> None:
    other = ShardGroup(
        "users", (ShardRange(0, 3, "a"),), "modulo", database_name="photos_{shard:05d}"
    )
    assert any(
        "both use schema" in p for p in problems(topology(ShardRange(0, 3, "a"), users=other))
    )
    # Two names of one server are one place.
    twins = Topology({**NODES, "c": dict(NODES["a"])}, {})
    moved = ShardGroup(
        "users", (ShardRange(0, 3, "c"),), "modulo", database_name="photos_{shard:05d}"
    )
    both = {"photos": ShardGroup("photos", (ShardRange(0, 3, "a"),), "modulo"), "users": moved}
    assert any("both use schema" in p for p in problems(Topology(twins.nodes, both)))


@pytest.mark.parametrize("template", ["same", "db_{number}", "db_{", 7])
def test_templates_without_the_shard(template: Any) -> None:
    group = ShardGroup("photos", (ShardRange(0, 1, "a"),), "modulo", database_name=template)
    assert any("DATABASE_NAME" in p for p in problems(Topology(NODES, {"photos": group})))


def test_a_group_needs_one_engine() -> None:
    nodes = {**NODES, "c": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/x"}}
    group = ShardGroup("photos", (ShardRange(0, 1, "a"), ShardRange(2, 3, "c")), "modulo")
    assert any("different engines" in p for p in problems(Topology(nodes, {"photos": group})))


def test_one_place_under_two_spellings() -> None:
    def sharing(one: dict[str, Any], other: dict[str, Any]) -> bool:
        nodes = {"a": one, "b": other}
        template = "same_{shard}"
        groups = {
            name: ShardGroup(name, (ShardRange(0, 1, node),), "modulo", database_name=template)
            for name, node in (("photos", "a"), ("users", "b"))
        }
        return any("both use schema" in problem for problem in problems(Topology(nodes, groups)))

    files = "sharded_orm.backends.sqlite3"
    assert sharing({"ENGINE": files, "NAME": "/x"}, {"ENGINE": files, "NAME": "/x/"})
    assert not sharing({"ENGINE": files, "NAME": "/x"}, {"ENGINE": files, "NAME": "/y"})
    assert sharing({**NODES["a"], "PORT": ""}, {**NODES["a"], "PORT": 3306})
    assert not sharing({**NODES["a"], "PORT": 3307}, {**NODES["a"], "PORT": 3306})


def test_a_topology_shows_no_password() -> None:
    assert "s3cret" not in repr(Topology({"a": {"PASSWORD": "s3cret"}}, {}))
