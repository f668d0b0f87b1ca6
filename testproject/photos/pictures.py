"""Landscapes drawn from a number: the same number, the same picture."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

WIDTH, HEIGHT = 480, 360


def draw(seed: int) -> str:
    """An SVG picture of a landscape."""
    # Random of its own, and seeded: a picture never changes.
    chance = random.Random(seed)
    sky = chance.choice([200, 210, 20, 330, 265, 45])
    land = (sky + chance.randrange(120, 240)) % 360
    night = chance.random() < 0.2
    light = 18 if night else chance.randrange(68, 82)
    body = [
        '<defs><linearGradient id="sky" x2="0" y2="1">'
        f'<stop stop-color="hsl({sky} 60% {light}%)"/>'
        f'<stop offset="1" stop-color="hsl({(sky + 35) % 360} 75% {light + 12}%)"/>'
        "</linearGradient></defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="url(#sky)"/>',
        *_sky(chance, night),
        *_hills(chance, land, night),
        *_trees(chance, land, night),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' width="{WIDTH}" height="{HEIGHT}">{"".join(body)}</svg>'
    )


def _sky(chance: random.Random, night: bool) -> Iterator[str]:
    if night:
        for _ in range(40):
            x, y = chance.randrange(WIDTH), chance.randrange(HEIGHT // 2)
            yield f'<circle cx="{x}" cy="{y}" r="{chance.choice([0.8, 1.2, 1.8])}" fill="#fff"/>'
    x, y, r = chance.randrange(60, 420), chance.randrange(50, 150), chance.randrange(22, 44)
    color = "hsl(50 40% 90%)" if night else f"hsl({chance.randrange(15, 55)} 95% 72%)"
    yield f'<circle cx="{x}" cy="{y}" r="{r}" fill="{color}"/>'


def _hills(chance: random.Random, hue: int, night: bool) -> Iterator[str]:
    layers = chance.randrange(3, 5)
    for layer in range(layers):
        base = 170 + layer * (HEIGHT - 190) // layers
        rough = 70 - 14 * layer
        points = []
        height = base + chance.randrange(-rough // 2, rough // 2)
        for x in range(0, WIDTH + 60, 60):
            points.append((x, height))
            height += chance.randrange(-rough, rough + 1)
            height = max(chance.randrange(70, 125), min(base + rough, height))
        path = f"M0 {HEIGHT}V{points[0][1]}"
        for (x0, y0), (x1, y1) in pairwise(points):
            middle = (x0 + x1) // 2
            path += f"C{middle} {y0} {middle} {y1} {x1} {y1}"
        lightness = (26 if night else 62) - layer * (5 if night else 11)
        yield f'<path d="{path}V{HEIGHT}Z" fill="hsl({hue} 32% {lightness}%)"/>'


def _trees(chance: random.Random, hue: int, night: bool) -> Iterator[str]:
    color = f"hsl({hue} 35% {8 if night else 17}%)"
    for _ in range(chance.randrange(0, 9)):
        x, y, size = chance.randrange(WIDTH), chance.randrange(320, 372), chance.randrange(24, 62)
        half = size // 4
        yield f'<path d="M{x - half} {y}L{x} {y - size}L{x + half} {y}Z" fill="{color}"/>'
