"""What the topology says after shards have moved."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations.shard_moves.plan import ShardToMove
from sharded_orm.topology.document import Document

NODES = ("db1", "db2", "db3")


def document(*ranges: dict[str, Any]) -> Document:
    groups = {"photos": {"RANGES": list(ranges)}, "pins": {"RANGES": [_range(0, 9, "db1")]}}
    return Document.from_content({"format": 1, "version": 1, "nodes": {}, "groups": groups})


def _range(first: int, last: int, primary: str, **more: Any) -> dict[str, Any]:
    return {"range": [first, last], "primary": primary, **more}


def ranges(document: Document) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document.content()["groups"]["photos"]["RANGES"]
    return found


def move(number: int, source: str, target: str, replica: str | None = None) -> ShardToMove:
    return ShardToMove("photos", number, source, target, replica)


def test_a_range_is_divided_and_keeps_what_else_it_says() -> None:
    before = document(_range(0, 9, "db1", replica="db3", weight=2, open=False))
    after = move(4, "db1", "db2").publish_in(before)
    assert ranges(after) == [
        _range(0, 3, "db1", replica="db3", weight=2, open=False),
        _range(4, 4, "db2", weight=2, open=False),
        _range(5, 9, "db1", replica="db3", weight=2, open=False),
    ]
    assert after.content()["groups"]["pins"] == before.content()["groups"]["pins"]


def test_neighbours_that_are_equal_are_joined() -> None:
    before = document(_range(0, 3, "db1"), _range(4, 4, "db2"), _range(5, 9, "db1", weight=1))
    assert ranges(move(4, "db2", "db1").publish_in(before)) == [_range(0, 9, "db1")]


@pytest.mark.parametrize("other", [{"weight": 2}, {"open": False}, {"replica": "db3"}])
def test_neighbours_that_differ_are_not_joined(other: dict[str, Any]) -> None:
    before = document(_range(0, 3, "db1", **other), _range(4, 4, "db2"))
    assert len(ranges(move(4, "db2", "db1").publish_in(before))) == 2


def test_it_can_be_published_twice() -> None:
    once = move(4, "db1", "db2").publish_in(document(_range(0, 9, "db1")))
    assert move(4, "db1", "db2").publish_in(once) is once


def test_a_shard_that_somebody_else_has_moved_is_refused() -> None:
    with pytest.raises(MoveRefused, match="no longer has shard 4 of group 'photos' on 'db1'"):
        move(4, "db1", "db2").publish_in(document(_range(0, 9, "db3")))


@pytest.mark.parametrize("seed", range(20))
def test_many_moves_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    node_of = dict.fromkeys(range(count), "db1")
    published = document(_range(0, count - 1, "db1"))
    for _ in range(60):
        number, target = draw.randrange(count), draw.choice(NODES)
        published = move(number, node_of[number], target).publish_in(published)
        node_of[number] = target
        found = ranges(published)
        shards = [
            (n, each["primary"])
            for each in found
            for n in range(each["range"][0], each["range"][1] + 1)
        ]
        assert shards == sorted(node_of.items())
        neighbours = itertools.pairwise(found)
        assert all(one["primary"] != other["primary"] for one, other in neighbours)
