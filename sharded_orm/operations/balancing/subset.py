"""Choose items (shards or keys) whose sizes have a sum just above a limit.

The planner uses this to move as little as possible out of a node or shard that is too full. It is a
variant of the subset-sum problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

#: The search computes with whole numbers of steps, not with exact sizes. The limit is divided into
#: this many steps, and each size is rounded down to whole steps.
_STEPS = 4096
#: Sizes are rounded down to whole steps. So the rounded sum of some items may be a little below the
#: limit although the exact sum reaches it. For this reason, the search begins below the limit, by
#: at most this many steps.
_SLACK = 16


def least_cover(sizes: Sequence[float], limit: float) -> list[int]:
    """Return the indexes of items whose sizes have a sum of at least ``limit``, but hardly more.

    No item of the result can be left out, because the sum would then be below ``limit``. Of choices
    with the same sum, the one with the fewest items is returned. If even the sum of all items is
    too small, the indexes of all items are returned.

    :param sizes: sizes above 0, in descending order.
    :param limit: a number above 0.

    Time and memory grow with the number of items.
    """
    if sum(sizes) <= limit:
        return list(range(len(sizes)))
    choices = [
        _needed(sizes, choice, limit)
        for choice in _rounded_covers(sizes, limit)
        if sum(sizes[index] for index in choice) >= limit
    ]
    single = max((index for index, size in enumerate(sizes) if size >= limit), default=None)
    if single is not None:
        choices.append([single])
    return min(choices, key=lambda choice: (sum(sizes[i] for i in choice), len(choice)))


def _needed(sizes: Sequence[float], choice: Sequence[int], limit: float) -> list[int]:
    """Return the indexes in ``choice`` without those of items that are not needed.

    An item is not needed if the sum of the other sizes reaches ``limit``. Items are tried in the
    order of ``choice``, so the largest ones are left out first.
    """
    needed = list(choice)
    total = sum(sizes[index] for index in choice)
    for index in choice:
        if total - sizes[index] >= limit:
            needed.remove(index)
            total -= sizes[index]
    return needed


def _rounded_covers(sizes: Sequence[float], limit: float) -> Iterator[list[int]]:
    """Yield lists of the indexes of items whose rounded sizes have a sum near ``limit``.

    The sizes are rounded down to whole steps. In the last list, the sum of the exact sizes is at
    least ``limit``. In the other lists, it may be a little below.
    """
    small = [index for index, size in enumerate(sizes) if size < limit][::-1]
    steps = {index: int(sizes[index] / limit * _STEPS) for index in small}
    # ``possible[i]`` is a set of bits. Its bit n is set if some of the i smallest items have sizes
    # whose sum is n steps.
    mask = (1 << 2 * _STEPS) - 1
    possible = [1]
    for index in small:
        possible.append((possible[-1] | possible[-1] << steps[index]) & mask)
    for total in range(_STEPS - min(len(small), _SLACK), 2 * _STEPS):
        if possible[-1] >> total & 1:
            yield _choice(small, steps, possible, total)
            if total >= _STEPS:
                return
    # None of the lists above may reach the limit with its exact sizes. All items together do, so
    # yield them last.
    yield list(range(len(sizes)))


def _choice(
    small: Sequence[int], steps: Mapping[int, int], possible: Sequence[int], total: int
) -> list[int]:
    """Return the indexes of items whose rounded sizes have the sum ``total``, largest first."""
    choice = []
    for count in range(len(small), 0, -1):
        index = small[count - 1]
        step = steps[index]
        if step and step <= total and possible[count - 1] >> (total - step) & 1:
            choice.append(index)
            total -= step
    return choice
