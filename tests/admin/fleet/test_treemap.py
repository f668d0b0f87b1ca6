"""The geometry of the shard map."""

from __future__ import annotations

import itertools
import random

import pytest

from sharded_orm.admin.fleet.treemap import WIDTH, Box, grid, strips


def overlap(box: Box, other: Box) -> bool:
    return (
        box.x + box.width > other.x + 1e-6
        and other.x + other.width > box.x + 1e-6
        and box.y + box.height > other.y + 1e-6
        and other.y + other.height > box.y + 1e-6
    )


@pytest.mark.parametrize("seed", range(5))
def test_areas_are_as_the_weights_and_nothing_overlaps(seed: int) -> None:
    chance = random.Random(seed)
    weights = [chance.uniform(50, 200) for _ in range(chance.randint(1, 80))]
    boxes, height = strips(weights, 1)
    assert sum(box.width * box.height for box in boxes) == pytest.approx(WIDTH * height)
    areas = [box.width * box.height / weight for box, weight in zip(boxes, weights, strict=True)]
    assert areas == pytest.approx([areas[0]] * len(areas))
    assert all(box.x + box.width <= WIDTH + 1e-6 for box in boxes)
    assert all(box.y + box.height <= height + 1e-6 for box in boxes)
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if overlap(box, other)]
    # In order: the next box is to the right, or below.
    assert all(
        after.y > before.y or after.x > before.x for before, after in itertools.pairwise(boxes)
    )


def test_what_is_empty_can_still_be_hit() -> None:
    boxes, _ = strips([1_000_000.0, *[0.0] * 9], 1)
    assert min(box.width for box in boxes) > 5
    assert min(box.height for box in boxes) > 5


def test_a_smaller_range_is_smaller() -> None:
    _, tall = strips([10.0, 10.0], 1)
    _, half = strips([5.0, 5.0], 0.5)
    assert half == pytest.approx(tall / 2)


@pytest.mark.parametrize("count", [1, 25, 26, 100, 101, 512, 600])
def test_a_grid_of_any_number(count: int) -> None:
    boxes, height = grid(count)
    assert len(boxes) == count
    assert max(box.x + box.width for box in boxes) <= WIDTH
    assert max(box.y + box.height for box in boxes) == height
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if overlap(box, other)]
