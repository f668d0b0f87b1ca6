"""Which topology may follow another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sharded_orm.routing.base import BUILT_IN, Strategy, key_routing_of
from sharded_orm.routing.modulo import ModuloStrategy
from sharded_orm.routing.range import RangeStrategy
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology
from sharded_orm.topology.transitions import KeyRouting, problems

NODES = {
    "a": {"ENGINE": "sharded_orm.backends.mysql", "HOST": "one"},
    "b": {"ENGINE": "sharded_orm.backends.mysql", "HOST": "two"},
    "c": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/x"},
}
OPTIONS: dict[str, dict[str, Any]] = {"range": {"BOUNDS": [0, 10, 20, 30]}}


def group(strategy: str, count: int = 4, node: str = "a", **options: Any) -> ShardGroup:
    return ShardGroup("photos", (ShardRange(0, count - 1, node),), strategy, options)


def topology(version: int, *groups: ShardGroup) -> Topology:
    return Topology(NODES, {one.name: one for one in groups}, version)


def found(before: ShardGroup, after: ShardGroup) -> list[str]:
    return problems(topology(1, before), topology(2, after), key_routing_of)


@pytest.mark.parametrize("strategy", BUILT_IN)
def test_shards_may_move_and_open_and_close(strategy: str) -> None:
    before = group(strategy, **OPTIONS.get(strategy, {}))
    moved = replace(
        before, ranges=(ShardRange(0, 1, "b", "a", False, 2), ShardRange(2, 3, "a", "b"))
    )
    assert found(before, moved) == []
    assert found(moved, before) == []


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("directory", ({}, {})),
        ("embedded", ({}, {})),
        ("range", ({"SIZE": 10}, {"SIZE": 10})),
        ("range", ({"BOUNDS": [0, 10, 20, 30]}, {"BOUNDS": [0, 10, 20, 30, 40, 50]})),
    ],
)
def test_these_grow(strategy: str, options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    old, new = options
    assert found(group(strategy, **old), group(strategy, 6, **new)) == []


def test_modulo_does_not_grow() -> None:
    (problem,) = found(group("modulo"), group("modulo", 8))
    assert "group 'photos': the number of shards cannot change from 4 to 8" in problem


@pytest.mark.parametrize("strategy", BUILT_IN)
def test_no_shard_is_taken_away(strategy: str) -> None:
    bounds = {"BOUNDS": [0, 10, 20]} if strategy == "range" else {}
    problems = found(group(strategy, **OPTIONS.get(strategy, {})), group(strategy, 3, **bounds))
    assert any("group 'photos': shards 3 to 3 are gone" in one for one in problems)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (group("directory"), group("modulo"), "STRATEGY 'directory' becomes 'modulo'"),
        (group("directory"), group("directory", node="c"), "ENGINE ['sharded_orm.backends.mysql']"),
        (
            group("directory"),
            replace(group("directory"), database_name="x_{shard}"),
            "DATABASE_NAME '{group}_{shard:05d}' becomes 'x_{shard}'",
        ),
        (group("embedded"), group("embedded", SHIFT=10), "SHIFT 46 becomes 10"),
        (group("embedded", BITS=13), group("embedded"), "BITS 13 becomes 16"),
        (group("range", SIZE=10), group("range", SIZE=20), "SIZE 10 becomes 20"),
        (
            group("range", BOUNDS=[0, 10, 20, 30]),
            group("range", BOUNDS=[0, 10, 25, 30]),
            "BOUNDS change from shard 2 on",
        ),
        (
            group("range", BOUNDS=[0, 10, 20, 30]),
            group("range", SIZE=10),
            "SIZE None becomes 10",
        ),
    ],
)
def test_keys_stay_where_they_are(before: ShardGroup, after: ShardGroup, problem: str) -> None:
    assert any(problem in one for one in found(before, after))


def test_defaults_that_are_written_out_change_nothing() -> None:
    assert found(group("embedded"), group("embedded", SHIFT=46, BITS=16)) == []


def test_what_a_directory_remembers_may_change() -> None:
    assert found(group("directory"), group("directory", CACHE_SIZE=5)) == []


def test_a_group_does_not_go_and_may_come() -> None:
    one, other = group("modulo"), replace(group("modulo"), name="visits")
    assert problems(topology(1, one), topology(2, one, other), key_routing_of) == []
    (problem,) = problems(topology(1, one, other), topology(2, one), key_routing_of)
    assert problem == "group 'visits' is gone; its shards have rows"


@pytest.mark.parametrize("version", [6, 7])
def test_versions_count_up(version: int) -> None:
    one = group("modulo")
    assert problems(topology(7, one), topology(version, one), key_routing_of) == [
        f"version {version} does not come after 7, which is in use"
    ]


class Letters(Strategy):
    """A custom strategy: computed from the number of shards, as far as anybody can tell."""

    option_names = frozenset({"SALT"})

    def locate(self, key: Any) -> int:
        return hash(key) % self.group.count


class Placed(Letters):
    places = True


class Embedded(Letters):
    embedded = (1, 2)


class Unusable(Placed):
    """Cannot be made."""

    def __init__(self, *args: Any) -> None:
        raise AssertionError("A strategy is not made to be asked.")


class Wider(RangeStrategy):
    pass


class Other(ModuloStrategy):
    pass


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (Letters, KeyRouting.COMPUTED),
        (Placed, KeyRouting.PLACED),
        (Embedded, KeyRouting.EMBEDDED),
        (Unusable, KeyRouting.PLACED),
        (Wider, KeyRouting.RANGES),
        (Other, KeyRouting.COMPUTED),
    ],
)
def test_a_strategy_of_ones_own(cls: type[Strategy], keys: KeyRouting) -> None:
    options = {"SIZE": 10} if cls is Wider else {}
    own = group(f"{__name__}.{cls.__name__}", **options)
    assert key_routing_of(own) is keys
    grown = replace(own, ranges=(ShardRange(0, 7, "a"),))
    assert bool(found(own, grown)) is (keys is KeyRouting.COMPUTED)
    if cls is Letters:
        salted = replace(own, strategy_options={"SALT": 1})
        assert any("STRATEGY_OPTIONS change" in one for one in found(own, salted))


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("directory", KeyRouting.PLACED),
        ("embedded", KeyRouting.EMBEDDED),
        ("range", KeyRouting.RANGES),
        ("modulo", KeyRouting.COMPUTED),
    ],
)
def test_the_built_in_strategies(strategy: str, keys: KeyRouting) -> None:
    assert key_routing_of(group(strategy, **OPTIONS.get(strategy, {}))) is keys
