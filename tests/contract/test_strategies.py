"""The contract of routing strategies, tested on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.exceptions import InvalidConfiguration, InvalidShardKey
from sharded_orm.routing.base import BUILT_IN, Strategy, make_strategy
from sharded_orm.routing.directory import DirectoryStrategy, StoredPlacement
from sharded_orm.routing.placement_lease import MoveList, PlacementLease
from sharded_orm.topology.model import ShardGroup, ShardRange

SHARDS = 64
RANGES = (ShardRange(0, 31, "a"), ShardRange(32, 63, "b"))
KEYS: dict[str, Any] = {
    "directory": st.integers() | st.text() | st.uuids(),
    "modulo": st.integers() | st.text() | st.binary() | st.uuids(),
    "range": st.integers(0, SHARDS * 1000 - 1),
    "embedded": st.integers(0, SHARDS - 1).map(lambda shard: shard << 46 | 1 << 36 | 7),
}
OPTIONS: dict[str, dict[str, Any]] = {"range": {"SIZE": 1000}}

every = pytest.mark.parametrize("name", sorted(BUILT_IN))


class Store:
    """A directory whose placements are committed at once."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        return {key: StoredPlacement(self.rows[key], True) for key in keys if key in self.rows}

    def moves(self, since: int | None = None) -> MoveList:
        return MoveList((), 0)

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        self.rows = dict(placements) | self.rows
        return self.find(group, placements)


def make(name: str, store: Store | None = None) -> Strategy:
    made = make_strategy(ShardGroup("g", RANGES, name, OPTIONS.get(name, {})))
    if isinstance(made, DirectoryStrategy):
        made.store = store or Store()
        made.lease = PlacementLease(made.store, 5.0)
    return made


def test_every_built_in_strategy_is_asked() -> None:
    assert set(KEYS) == set(BUILT_IN)


@every
@given(data=st.data())
def test_a_placed_key_is_found_where_it_was_placed(name: str, data: st.DataObject) -> None:
    store = Store()
    strategy, key = make(name, store), data.draw(KEYS[name])
    number = strategy.place(key)
    assert 0 <= number < SHARDS
    # By this instance and by another one, alone and among other keys.
    for other in (strategy, make(name, store)):
        assert other.locate(key) == number
        assert other.locate_many([key]) == {key: number}
        assert other.place(key) == number
    assert str(strategy.explain(key))


@every
@given(data=st.data())
def test_many_keys_are_placed_as_one_by_one(name: str, data: st.DataObject) -> None:
    keys = data.draw(st.lists(KEYS[name], max_size=20, unique_by=repr))
    strategy = make(name)
    placed = strategy.place_many(keys)
    assert {key: strategy.locate(key) for key in keys} == placed


@pytest.mark.parametrize("name", ["directory", "modulo"])
def test_two_forms_of_a_key_are_located_together(name: str) -> None:
    """The directory stores both under the same text."""
    strategy, keys = make(name), [7, "7", 8]
    placed = strategy.place_many(keys)
    assert list(placed) == keys
    assert strategy.locate_many(keys) == placed == {key: strategy.locate(key) for key in keys}
    assert {key: strategy.place(key) for key in keys} == placed


@every
@given(data=st.data())
def test_reading_places_nothing(name: str, data: st.DataObject) -> None:
    strategy, key = make(name), data.draw(KEYS[name])
    assert strategy.locate(key) == strategy.locate(key)
    if strategy.places:
        assert strategy.locate(key) is None


@every
@pytest.mark.parametrize("key", [object(), (1,), None])
def test_keys_that_no_strategy_takes_are_named_in_the_error(name: str, key: Any) -> None:
    with pytest.raises(InvalidShardKey):
        make(name).locate(key)


@every
@pytest.mark.parametrize("key", [-1, -(1 << 80), (1 << 63) - 1, 1 << 63, 1 << 80, 10**400])
def test_any_number_may_be_asked_for(name: str, key: int) -> None:
    strategy = make(name)
    assert strategy.locate_many([key]) == {key: strategy.locate(key)}
    assert strategy.explain(key)
    if strategy.locate(key) is None and not strategy.places:
        for write in (strategy.place, lambda key: strategy.place_many([key])):
            with pytest.raises(InvalidShardKey):
                write(key)


@every
def test_unknown_options_are_refused(name: str) -> None:
    group = ShardGroup("g", RANGES, name, {**OPTIONS.get(name, {}), "NONSENSE": 1})
    with pytest.raises(InvalidConfiguration, match="NONSENSE"):
        make_strategy(group)
