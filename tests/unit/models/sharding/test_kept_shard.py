"""The answer of a strategy that is kept while a row is saved."""

from __future__ import annotations

import copy
import pickle
from decimal import Decimal
from typing import Any

import pytest

from sharded_orm.backends.group import relocation
from sharded_orm.models.sharding.kept_shard import KeptShard
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


def test_it_keeps_the_answer_within_the_block_only(strategy: Strategy) -> None:
    kept = KeptShard()
    kept.find("photos", 1, strategy)
    with kept:
        first = kept.find("photos", 1, strategy)
        assert kept.find("photos", 1, strategy) is first
    kept.find("photos", 1, strategy)
    with kept:
        kept.find("photos", 1, strategy)
    assert strategy.keys == [1, 1, 1, 1]


@pytest.mark.parametrize("other", [2, True, Decimal(1), "1"])
def test_another_key_is_asked_for(strategy: Strategy, other: Any) -> None:
    with KeptShard() as kept:
        kept.find("photos", 1, strategy)
        kept.find("photos", other, strategy)
    assert [(type(key), key) for key in strategy.keys] == [(int, 1), (type(other), other)]


def test_another_group_is_asked(strategy: Strategy) -> None:
    with KeptShard() as kept:
        for group in ("photos", "pins"):
            shard = kept.find(group, 1, strategy)
            assert shard is not None
            assert shard.group == group


def test_another_topology_is_asked(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with KeptShard() as kept:
        kept.find("photos", 1, strategy)
        monkeypatch.setattr(relocation, "generation", relocation.generation + 1)
        kept.find("photos", 1, strategy)
    assert strategy.keys == [1, 1]


def test_a_key_without_a_shard_is_asked_for_again(strategy: Strategy) -> None:
    with KeptShard() as kept:
        assert kept.find("photos", "ada", strategy) is None
        assert kept.find("photos", "ada", strategy) is None
    assert strategy.keys == ["ada", "ada"]


def test_a_key_that_can_change_in_place_is_asked_for_again(strategy: Strategy) -> None:
    key = bytearray(b"ada")
    with KeptShard() as kept:
        kept.find("photos", key, Strategy())
        key[0] = 0
        assert kept.find("photos", key, lambda group, key: None) is None


def test_copies_keep_nothing(strategy: Strategy) -> None:
    with KeptShard() as kept:
        kept.find("photos", 1, strategy)
        for other in (copy.copy(kept), copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
            other.find("photos", 1, strategy)
            other.find("photos", 1, strategy)
    assert len(strategy.keys) == 1 + 3 * 2
