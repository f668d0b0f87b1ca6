"""Numbers of shards that are none are refused by an error of the operation, not by a TypeError."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs.plan import find_plan
from sharded_orm.operations.shard_moves.plan import plan_shard_moves

CASES: list[tuple[list[Any], str]] = [
    (["2", "1"], "'1','2'"),
    ([None, 901, "x", 900, 5000], "900-901,5000,'x',None"),
    ([-1, -2], "-2--1"),
    ([0, 1.5], "1.5"),
]


@pytest.mark.parametrize(("numbers", "text"), CASES)
def test_each_unknown_number_is_named(numbers: list[Any], text: str) -> None:
    with pytest.raises(MoveRefused) as moved:
        plan_shard_moves("photos", numbers, "local_1")
    with pytest.raises(SwitchRefused) as switched:
        find_plan("photos", numbers)
    for error in (moved, switched):
        assert f"group 'photos' has no shard {text}: its shards are" in str(error.value)
