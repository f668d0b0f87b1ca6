"""Half of the shards of each pair become active on each side, by as few switches as possible."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sharded_orm import runtime
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs import side_balance
from sharded_orm.operations.pairs.side_balance import SideBalance, plan_sides
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    runtime.swap(None)


def plan(groups: dict[str, str], group: str | None = None, pinned: str = "") -> list[SideBalance]:
    """Return the plan for groups whose active sides are given as letters, such as ``aab``.

    :param pinned: the group whose shards are pinned.
    """
    runtime.swap(
        Topology(
            nodes={name: {"ENGINE": "sharded_orm.backends.mysql"} for name in "abcd"},
            groups={
                name: ShardGroup(
                    name=name,
                    strategy="modulo",
                    ranges=tuple(
                        ShardRange(
                            number,
                            number,
                            side,
                            {"a": "b", "b": "a", "c": "d", "d": "c"}[side],
                            is_pair=True,
                            pinned=name == pinned,
                        )
                        for number, side in enumerate(sides)
                    ),
                )
                for name, sides in groups.items()
            },
        )
    )
    return plan_sides(group)


def switches(balances: list[SideBalance]) -> list[str]:
    return [
        f"{step.group} {','.join(map(str, step.numbers))} {step.source}{step.target}"
        for balance in balances
        for step in balance.steps
    ]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"x": "aaaa"}, ["x 2,3 ab"]),
        ({"x": "bbbb"}, ["x 0,1 ba"]),
        ({"x": "aaabbb"}, []),
        ({"x": "aab"}, []),
        ({"x": "aaaaab"}, ["x 3,4 ab"]),
        # One group has all its shards on one side, and another group has them on the other.
        ({"x": "aaaa", "y": "bbbb"}, ["x 2,3 ab", "y 0,1 ba"]),
        # The odd shards of several groups are not all on one side.
        ({"x": "a", "y": "a", "z": "a"}, ["x 0 ab"]),
        ({"x": "a", "y": "a", "z": "a", "w": "a"}, ["x 0 ab", "y 0 ab"]),
        ({"x": "ccaa"}, ["x 3 ab", "x 1 cd"]),
    ],
)
def test_half_of_each_group_and_of_all(groups: dict[str, str], expected: list[str]) -> None:
    balances = plan(groups)
    assert switches(balances) == expected
    for balance in balances:
        assert abs(balance.after[0] - balance.after[1]) <= 1
        assert sum(balance.before) == sum(balance.after)


def test_pinned_shards_stay() -> None:
    (balance,) = plan({"x": "aaaa", "y": "aaaa"}, pinned="x")
    assert switches([balance]) == ["y 2,3 ab"]
    assert (balance.before, balance.after, balance.pinned) == ((8, 0), (6, 2), 4)


def test_one_group() -> None:
    assert switches(plan({"x": "aaaa", "y": "aaaa"}, "y")) == ["y 2,3 ab"]


def test_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_balance, "BATCH", 2)
    assert switches(plan({"x": "aaaaaa"})) == ["x 3,4 ab", "x 5 ab"]


def test_without_pairs() -> None:
    with pytest.raises(SwitchRefused, match="no range of the topology is on a pair"):
        plan({})
