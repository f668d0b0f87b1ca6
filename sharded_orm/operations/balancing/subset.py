"""Choose items whose sum is as little as possible above a limit. A variant of the subset-sum problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

#: The sizes are rounded down to this part of the limit.
_STEPS = 4096
#: How many steps the rounding may have taken from the sum of a good choice.
_SLACK = 16


def least_cover(sizes: Sequence[float], limit: float) -> list[int]:
    """Return the indexes of items with a sum of at least ``limit``, which is nearly the least possible.

    None of them is superfluous: without any of them, the sum is below ``limit``. Of equally good
    choices, prefer one with few and large items. If the sum of all items is too small, return all.

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
    """Return the choice without superfluous items, the largest of which are left out first."""
    needed = list(choice)
    total = sum(sizes[index] for index in choice)
    for index in choice:
        if total - sizes[index] >= limit:
            needed.remove(index)
            total -= sizes[index]
    return needed


def _rounded_covers(sizes: Sequence[float], limit: float) -> Iterator[list[int]]:
    """Yield choices whose rounded sums are near the limit. The last one reaches it for certain."""
    small = [index for index, size in enumerate(sizes) if size < limit][::-1]
    steps = {index: int(sizes[index] / limit * _STEPS) for index in small}
    # Bit n of a number says whether a sum of n steps is possible. There is one number for each count
    # of items, from the smallest item on.
    mask = (1 << 2 * _STEPS) - 1
    possible = [1]
    for index in small:
        possible.append((possible[-1] | possible[-1] << steps[index]) & mask)
    for total in range(_STEPS - min(len(small), _SLACK), 2 * _STEPS):
        if possible[-1] >> total & 1:
            yield _choice(small, steps, possible, total)
            if total >= _STEPS:
                return
    # Only all items together may reach the limit.
    yield list(range(len(sizes)))


def _choice(
    small: Sequence[int], steps: Mapping[int, int], possible: Sequence[int], total: int
) -> list[int]:
    """Return items whose rounded sum is ``total``, the largest first."""
    choice = []
    for count in range(len(small), 0, -1):
        index = small[count - 1]
        step = steps[index]
        if step and step <= total and possible[count - 1] >> (total - step) & 1:
            choice.append(index)
            total -= step
    return choice
