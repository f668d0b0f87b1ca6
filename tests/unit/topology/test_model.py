"""Topologies: look-ups, and the errors for wrong ones."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from sharded_orm.ids.layout import PACKED
from sharded_orm.routing.base import make_strategy
from sharded_orm.topology.model import (
    MAX_SHARDS,
    MAX_WEIGHT,
    Shard,
    ShardGroup,
    ShardRange,
    Topology,
    problems,
)

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


def test_the_servers_of_a_pair() -> None:
    nodes = {**NODES, "same as b": NODES["b"], "c": {**NODES["a"], "HOST": "three"}}
    ranges = ShardRange(0, 5, "a", "b", is_pair=True), ShardRange(6, 9, "c", "a")
    found = Topology(nodes, {"photos": ShardGroup("photos", ranges, "modulo")})
    assert problems(found) == []
    assert [found.pair_of(name) for name in ("a", "same as b", "c")] == [("a", "b"), ("a", "b"), ()]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"HOST": "one"}, "the nodes 'a' and 'b' of its pair are the same server"),
        (
            {"ENGINE": "sharded_orm.backends.postgresql"},
            "node 'b' has the engine 'sharded_orm.backends.postgresql'; only MariaDB has pairs",
        ),
        (
            {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "x"},
            "node 'b' has the engine 'sharded_orm.backends.sqlite3'; only MariaDB has pairs",
        ),
    ],
)
def test_what_is_no_pair(changes: dict[str, Any], problem: str) -> None:
    nodes = {"a": NODES["a"], "b": {**NODES["b"], **changes}}
    group = ShardGroup("photos", (ShardRange(0, 5, "a", "b", is_pair=True),), "modulo")
    assert problems(Topology(nodes, {"photos": group})) == [
        f"group 'photos': range (0, 5): {problem}"
    ]


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
        ("photos_0000١", None),
        ("photos_0001²", None),
        ("photos_100000", None),
        ("photos_" + "9" * 5000, None),
        ("photos_" + "0" * 5000, None),
    ],
)
def test_an_alias_names_a_shard_only_in_its_one_spelling(alias: str, number: int | None) -> None:
    shard = topology(ShardRange(0, 511, "a")).resolve(alias)
    assert (shard.number if shard else None) == number


def test_the_last_shard_of_the_largest_group() -> None:
    largest = topology(ShardRange(0, MAX_SHARDS - 1, "a"))
    assert problems(largest) == []
    found = largest.resolve("photos_65535")
    assert found is not None and found.number == 65_535
    # It is the last number that the sixteen bits of a packed id hold.
    assert PACKED.pack(shard=found.number, type=0, local=0)


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
        ([ShardRange(0, 5, "a", weight=-1)], "weight must be a number from 0 to 1,000,000, not -1"),
        ([ShardRange(0, 5, "a", weight=1e308)], "weight must be a number from 0 to 1,000,000"),
        ([ShardRange(0, 5, "a", weight=10**400)], "weight must be a number from 0 to 1,000,000"),
        ([ShardRange(0, 5, "a", weight=float("nan"))], "not nan"),
        ([ShardRange(0, 65_536, "a")], "range (0, 65536): a group has at most 65,536 shards"),
        ([ShardRange(0, 3, "a"), ShardRange(4, 30_000_000, "a")], "at most 65,536 shards"),
        ([ShardRange(10**4299, 10**4299, "a")], "at most 65,536 shards"),
    ],
)
def test_wrong_ranges(ranges: list[ShardRange], expected: str) -> None:
    assert any(expected in problem for problem in problems(topology(*ranges)))


def test_a_sound_topology_has_no_problems() -> None:
    other = ShardGroup("users", (ShardRange(0, 511, "a"),), "modulo")
    assert problems(topology(ShardRange(0, 511, "a", "b"), users=other)) == []


def test_a_range_costs_the_same_however_many_shards_it_names() -> None:
    def peak(last: int) -> int:
        groups = [
            ShardGroup(
                name, (ShardRange(0, last, "a"),), "modulo", database_name=f"{name}_{{shard}}"
            )
            for name in ("photos", "users")
        ]
        both = Topology(NODES, {group.name: group for group in groups})
        tracemalloc.start()
        problems(both)
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(3)  # warms up everything that is created on first use
    few = peak(3)
    assert peak(MAX_SHARDS - 1) < few + 10_000
    assert peak(30_000_000) < few + 10_000


def test_no_weights_add_up_to_more_than_a_number_can_be() -> None:
    heaviest = [ShardRange(n, n, "a", weight=MAX_WEIGHT) for n in range(MAX_SHARDS)]
    group = ShardGroup("photos", tuple(heaviest), "directory")
    assert problems(Topology(NODES, {"photos": group})) == []
    strategy = make_strategy(group)
    assert {strategy.draw() in group for _ in range(3)} == {True}


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


@pytest.mark.parametrize("template", ["same", "db_{number}", "db_{", 7, "{shard:030000000d}"])
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


def test_databases_of_one_postgresql_server_are_places_of_their_own() -> None:
    def sharing(one: str, other: str, **more: Any) -> bool:
        engine = {"ENGINE": "sharded_orm.backends.postgresql", "HOST": "db"}
        nodes = {"a": {**engine, "NAME": one}, "b": {**engine, "NAME": other, **more}}
        groups = {
            name: ShardGroup(
                name, (ShardRange(0, 1, node),), "modulo", database_name="same_{shard}"
            )
            for name, node in (("photos", "a"), ("users", "b"))
        }
        return any("both use schema" in problem for problem in problems(Topology(nodes, groups)))

    assert sharing("site", "site")
    assert sharing("site", "site", PORT="5432")
    assert not sharing("site", "other")
    assert not sharing("site", "site", PORT=5433)


@pytest.mark.parametrize(("engine", "is_cut"), [("postgresql", True), ("mysql", False)])
def test_names_that_postgresql_would_cut_off(engine: str, is_cut: bool) -> None:
    nodes = {"a": {"ENGINE": f"sharded_orm.backends.{engine}", "HOST": "db", "NAME": "site"}}

    def complaints(template: str, last: int) -> list[str]:
        group = ShardGroup("photos", (ShardRange(0, last, "a"),), "modulo", database_name=template)
        return problems(Topology(nodes, {"photos": group}))

    long = "ä" * 30  # of two bytes each
    assert complaints(f"{long}{{shard:03d}}", 999) == []
    found = complaints(f"{long}{{shard:03d}}", 1000)
    assert any("cuts names off after 63" in problem for problem in found) is is_cut


@pytest.mark.parametrize(
    ("template", "problem"),
    [('"photos_{shard}"', "has a quote in its name"), ("pg_photos_{shard}", "begins with 'pg_'")],
)
def test_names_that_postgresql_refuses(template: str, problem: str) -> None:
    nodes = {"a": {"ENGINE": "sharded_orm.backends.postgresql", "HOST": "db", "NAME": "site"}}
    group = ShardGroup("photos", (ShardRange(0, 3, "a"),), "modulo", database_name=template)
    assert any(problem in found for found in problems(Topology(nodes, {"photos": group})))


def test_a_topology_shows_no_password() -> None:
    assert "s3cret" not in repr(Topology({"a": {"PASSWORD": "s3cret"}}, {}))
