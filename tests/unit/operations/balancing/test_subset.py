from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.operations.balancing.subset import least_cover

SIZES = st.lists(st.integers(1, 100), max_size=9).map(lambda sizes: sorted(sizes, reverse=True))


@given(SIZES, st.integers(1, 500))
def test_against_all_subsets(sizes: list[int], limit: int) -> None:
    chosen = [sizes[index] for index in least_cover(sizes, limit)]
    if sum(sizes) < limit:
        assert chosen == sizes
        return
    least = min(
        sum(part)
        for count in range(len(sizes) + 1)
        for part in combinations(sizes, count)
        if sum(part) >= limit
    )
    # The sizes are rounded to 1/4096 of the limit.
    assert least <= sum(chosen) <= least * 1.01
    assert all(sum(chosen) - size < limit for size in chosen)


def test_few_large_items_rather_than_many() -> None:
    assert least_cover([50, 30, 20, 10, 10, 10], 50) == [0]
    assert sorted(least_cover([50, 30, 20, 10, 10, 10], 80)) == [0, 1]


def test_a_sum_that_is_better_than_the_largest_item_first() -> None:
    assert sorted(least_cover([9, 5, 5], 10)) == [1, 2]
