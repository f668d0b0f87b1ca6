"""The geometry of the shard map: rectangles whose areas are the sizes of shards.

SVG, and not boxes of HTML: their sizes would need ``style`` attributes, which a content security
policy without ``'unsafe-inline'`` blocks. Coordinates of SVG are attributes that it allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Width of the picture in units; the page scales it.
WIDTH = 1000.0
#: Heights of the largest range, of the smallest, and of a row of equal boxes.
_TALLEST, _SMALLEST, _ROW = 190.0, 34.0, 28.0
#: The least part of the average area: each rectangle must be seen and hit.
_LEAST = 1 / 6


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float


def grid(count: int) -> tuple[list[Box], float]:
    """``count`` equal boxes in rows of 16 or 32, and the height of all rows."""
    columns = 16 if count <= 16 else 32
    width = WIDTH / columns
    height = min(width, _ROW)
    boxes = [
        Box(number % columns * width, number // columns * height, width, height)
        for number in range(count)
    ]
    return boxes, -(-count // columns) * height


def strips(weights: Sequence[float], part: float) -> tuple[list[Box], float]:
    """Rectangles in the order of ``weights``, with areas in proportion, and their total height.

    A strip treemap (Bederson, Shneiderman and Wattenberg, 2002): neighbours stay neighbours, and
    nothing jumps when a weight changes a little.

    :param part: the size of this range as a part of the largest one, 0 to 1.
    """
    height = max(_SMALLEST, _TALLEST * part)
    total = sum(weights)
    if not total:
        return grid(len(weights))
    least = _LEAST * total / len(weights)
    weights = [max(weight, least) for weight in weights]
    scale = WIDTH * height / sum(weights)
    boxes, top = [], 0.0
    for areas in _rows([weight * scale for weight in weights]):
        row_height, left = sum(areas) / WIDTH, 0.0
        for area in areas:
            boxes.append(Box(left, top, area / row_height, row_height))
            left += area / row_height
        top += row_height
    return boxes, height


def _rows(areas: Sequence[float]) -> list[list[float]]:
    """A row ends where one more rectangle would make its rectangles longer and thinner."""
    rows: list[list[float]] = [[]]
    for area in areas:
        row = rows[-1]
        if row and _aspect_ratio([*row, area]) > _aspect_ratio(row):
            rows.append([area])
        else:
            row.append(area)
    if len(rows) > 1 and _aspect_ratio(rows[-2] + rows[-1]) < _aspect_ratio(rows[-1]):
        # Too few rectangles are left for the last row.
        rows[-2:] = [rows[-2] + rows[-1]]
    return rows


def _aspect_ratio(row: Sequence[float]) -> float:
    """The average ratio of length to width of the rectangles of a row; 1 for squares."""
    height = sum(row) / WIDTH
    return sum(max(area / height**2, height**2 / area) for area in row) / len(row)
