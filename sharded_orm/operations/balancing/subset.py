"""Choose items whose sum is as little as possible above a limit. A variant of the subset-sum problem."""

from __future__ import annotations

from collections.abc import Sequence

#: The sizes are rounded down to this part of the limit.
_STEPS = 4096


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
    chosen = _rounded_cover(sizes, limit)
    # The rounding may have made an item superfluous.
    total = sum(sizes[index] for index in chosen)
    for index in list(chosen):
        if total - sizes[index] >= limit:
            chosen.remove(index)
            total -= sizes[index]
    single = max((index for index, size in enumerate(sizes) if size >= limit), default=None)
    if single is not None and sizes[single] <= total:
        return [single]
    return chosen


def _rounded_cover(sizes: Sequence[float], limit: float) -> list[int]:
    small = [index for index, size in enumerate(sizes) if size < limit]
    steps = {index: int(sizes[index] / limit * _STEPS) for index in small}
    # Bit n of a number says whether a sum of n steps is possible. There is one number for each count
    # of items, from the smallest item on.
    mask = (1 << 2 * _STEPS) - 1
    possible = [1]
    ascending = small[::-1]
    for index in ascending:
        possible.append((possible[-1] | possible[-1] << steps[index]) & mask)
    above = possible[-1] >> _STEPS
    if not above:
        # The small items are not enough, or only without rounding.
        return list(range(len(sizes)))
    total = _STEPS + (above & -above).bit_length() - 1
    chosen = []
    for count in range(len(ascending), 0, -1):
        index = ascending[count - 1]
        step = steps[index]
        if step and step <= total and possible[count - 1] >> (total - step) & 1:
            chosen.append(index)
            total -= step
    return chosen
