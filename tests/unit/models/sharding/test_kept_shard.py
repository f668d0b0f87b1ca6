"""The answer of a strategy that is kept while a row is saved."""

from __future__ import annotations

import copy
import pickle
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from sharded_orm.backends.group import relocation
from sharded_orm.models.sharding.kept_shard import KeptShard, find_shard, keep_shard
from sharded_orm.topology.model import Shard


class Strategy:
    """Counts the keys that it is asked for; text has no shard."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def __call__(self, group: str, key: Any) -> Shard | None:
        self.keys.append(key)
        return None if isinstance(key, str) else Shard(group, 3, "node_1", None, "photos_00003")


@pytest.fixture
def strategy() -> Strategy:
    return Strategy()


def test_it_keeps_the_answer_until_it_is_closed(strategy: Strategy) -> None:
    kept = KeptShard()
    first = kept.find("photos", 1, strategy)
    assert kept.find("photos", 1, strategy) is first
    kept.close()
    kept.find("photos", 1, strategy)
    kept.find("photos", 1, strategy)
    assert strategy.keys == [1, 1, 1]


class Row:
    """A row with nothing but a state."""

    def __init__(self) -> None:
        self._state = SimpleNamespace()


def test_a_row_keeps_its_shard_within_the_block(strategy: Strategy) -> None:
    row = Row()
    with keep_shard(row):
        find_shard(row, "photos", 1, strategy)
        find_shard(row, "photos", 1, strategy)
        shared, copied, pickled = copy.copy(row), copy.deepcopy(row), pickle.dumps(row)
        shared._state = copy.copy(row._state)
    assert strategy.keys == [1]
    assert vars(row._state) == {}
    for other in (row, shared, copied, pickle.loads(pickled)):
        find_shard(other, "photos", 1, strategy)
    assert strategy.keys == [1] * 5
    assert b"kept_shard." not in pickled


def test_a_row_within_a_row_of_the_same_block(strategy: Strategy) -> None:
    row = Row()
    with pytest.raises(ZeroDivisionError), keep_shard(row):
        with keep_shard(row):
            find_shard(row, "photos", 1, strategy)
        find_shard(row, "photos", 1, strategy)
        find_shard(row, "photos", 1, strategy)
        raise ZeroDivisionError
    assert strategy.keys == [1, 1, 1]


@pytest.mark.parametrize("other", [2, True, Decimal(1), "1"])
def test_another_key_is_asked_for(strategy: Strategy, other: Any) -> None:
    kept = KeptShard()
    kept.find("photos", 1, strategy)
    kept.find("photos", other, strategy)
    assert [(type(key), key) for key in strategy.keys] == [(int, 1), (type(other), other)]


def test_another_group_is_asked(strategy: Strategy) -> None:
    kept = KeptShard()
    for group in ("photos", "pins"):
        shard = kept.find(group, 1, strategy)
        assert shard is not None
        assert shard.group == group


def test_another_topology_is_asked(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptShard()
    kept.find("photos", 1, strategy)
    monkeypatch.setattr(relocation, "generation", relocation.generation + 1)
    kept.find("photos", 1, strategy)
    assert strategy.keys == [1, 1]


def test_a_key_without_a_shard_is_asked_for_again(strategy: Strategy) -> None:
    kept = KeptShard()
    assert kept.find("photos", "ada", strategy) is None
    assert kept.find("photos", "ada", strategy) is None
    assert strategy.keys == ["ada", "ada"]


def test_a_key_that_can_change_in_place_is_asked_for_again(strategy: Strategy) -> None:
    key = bytearray(b"ada")
    kept = KeptShard()
    kept.find("photos", key, strategy)
    key[0] = 0
    assert kept.find("photos", key, lambda group, key: None) is None
