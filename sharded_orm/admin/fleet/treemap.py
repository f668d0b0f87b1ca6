"""The geometry of the map: rectangles whose areas are the sizes of shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Units of the picture; it is scaled to the width of the page.
WIDTH = 1000.0
#: Height of the largest range, and of the smallest; and of a row of equal boxes.
_TALLEST, _SMALLEST, _ROW = 190.0, 34.0, 28.0
#: A rectangle is never smaller than this part of the average: it has to be seen and hit.
_LEAST = 1 / 6


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float


def grid(count: int) -> tuple[list[Box], float]:
    """``count`` equal boxes in rows of a power of two; and the height of all."""
    columns = 16 if count <= 16 else 32
    width = WIDTH / columns
    height = min(width, _ROW)
    boxes = [
        Box(number % columns * width, number // columns * height, width, height)
        for number in range(count)
    ]
    return boxes, -(-count // columns) * height


def strips(weights: Sequence[float], part: float) -> tuple[list[Box], float]:
    """Rectangles in the given order whose areas are as their weights; and the height of all.

    A strip treemap (Bederson, Shneiderman and Wattenberg, 2002): neighbours stay neighbours, and
    nothing jumps when a weight changes a little.

    :param part: of the height of the tallest, 0 to 1: what the whole is beside other wholes.
    """
    height = max(_SMALLEST, _TALLEST * part)
    total = sum(weights)
    if not total:
        return grid(len(weights))
    least = _LEAST * total / len(weights)
    weights = [max(weight, least) for weight in weights]
    scale = WIDTH * height / sum(weights)
    boxes, top = [], 0.0
    for strip in _cut([weight * scale for weight in weights]):
        tall, left = sum(strip) / WIDTH, 0.0
        for area in strip:
            boxes.append(Box(left, top, area / tall, tall))
            left += area / tall
        top += tall
    return boxes, height


def _cut(areas: Sequence[float]) -> list[list[float]]:
    """Cut where one more rectangle would make those of the strip longer and thinner."""
    found: list[list[float]] = [[]]
    for area in areas:
        strip = found[-1]
        if strip and _thinness([*strip, area]) > _thinness(strip):
            found.append([area])
        else:
            strip.append(area)
    if len(found) > 1 and _thinness(found[-2] + found[-1]) < _thinness(found[-1]):
        # What was left over at the end.
        found[-2:] = [found[-2] + found[-1]]
    return found


def _thinness(strip: Sequence[float]) -> float:
    """How long its rectangles are for their width, on average; 1 for squares."""
    tall = sum(strip) / WIDTH
    return sum(max(area / tall**2, tall**2 / area) for area in strip) / len(strip)
