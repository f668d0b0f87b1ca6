"""The geometry of the shard map: rectangles with areas in proportion to the sizes of shards.

The map is an SVG picture. HTML boxes would need ``style`` attributes for their sizes, which a
content security policy without ``'unsafe-inline'`` blocks. Such a policy allows the coordinates in
SVG, which have separate attributes such as ``width``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The width of the picture in SVG units. The browser scales the picture to the page.
WIDTH = 1000.0
#: Three heights in SVG units. The first is the height of the largest range of shards. The second is
#: the least height of a range, so that small ranges are not too flat. The third is the greatest
#: height of a row of boxes, if a range is drawn as equal boxes.
_TALLEST, _SMALLEST, _ROW = 190.0, 34.0, 28.0
#: The smallest area of a rectangle, as a fraction of the average area. Users could not see or click
#: smaller rectangles.
_LEAST = 1 / 6


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture."""

    x: float
    y: float
    width: float
    height: float


def grid(count: int) -> tuple[list[Box], float]:
    """Return ``count`` equal boxes in rows of 16 or 32, and the total height of the rows."""
    columns = 16 if count <= 16 else 32
    width = WIDTH / columns
    height = min(width, _ROW)
    boxes = [
        Box(number % columns * width, number // columns * height, width, height)
        for number in range(count)
    ]
    return boxes, -(-count // columns) * height


def strips(weights: Sequence[float], part: float) -> tuple[list[Box], float]:
    """Return rectangles whose areas are in proportion to ``weights``, and their total height.

    The layout is a strip treemap (Bederson, Shneiderman and Wattenberg, 2002). It keeps the order
    of ``weights``, and a small change of a weight does not make rectangles jump. Rectangles of very
    small weights are enlarged, so that users can see and click them.

    :param part: the size of the drawn range, divided by the size of the largest range of the map;
        from 0 to 1. The total height is in proportion to it, but has a minimum.
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
    """Split ``areas`` into rows of rectangles.

    A row ends if one more rectangle would make the rectangles in it longer and thinner.
    """
    rows: list[list[float]] = [[]]
    for area in areas:
        row = rows[-1]
        if row and _aspect_ratio([*row, area]) > _aspect_ratio(row):
            rows.append([area])
        else:
            row.append(area)
    if len(rows) > 1 and _aspect_ratio(rows[-2] + rows[-1]) < _aspect_ratio(rows[-1]):
        # The last row has so few rectangles that they are long and thin. So join the last two rows.
        rows[-2:] = [rows[-2] + rows[-1]]
    return rows


def _aspect_ratio(row: Sequence[float]) -> float:
    """Return the average ratio of long to short side of the rectangles in a row; 1 for squares.

    :param row: the areas of the rectangles.
    """
    height = sum(row) / WIDTH
    return sum(max(area / height**2, height**2 / area) for area in row) / len(row)
