"""Landscapes drawn from a number, as WebP: no file is stored anywhere.

Work is bounded: there are three sizes, one picture is drawn at a time, a request that waits for
that too long is refused, and the last pictures are kept.
"""

from __future__ import annotations

import math
import random
import threading
from functools import lru_cache
from io import BytesIO
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFilter, ImageOps

from testproject.photos.scenes import Scene, scene

WIDTHS = (240, 480, 960)  # pixels; each picture is three quarters as high
#: Increase it with every change of the drawing, as browsers keep the pictures.
VERSION = 2

_SCALE = 2  # pictures are drawn so many times larger, then scaled down for smooth edges
_KEPT = 300  # pictures, of 2 to 60 kB
#: Seconds that a request waits for its turn. A page requests all its pictures together.
PATIENCE = 10.0
_one_at_a_time = threading.Lock()

Colour = tuple[int, int, int]


class TooBusy(Exception):
    """Other pictures are being drawn; the client may ask for this one again."""


@lru_cache(_KEPT)
def draw(number: int, width: int) -> bytes:
    """Return a WebP picture of the scene of ``number``; the same for the same arguments.

    Takes 10 to 150 ms. Thread-safe; other threads wait for their turn.

    :param width: width in pixels, one of :data:`WIDTHS`.
    :raises TooBusy: its turn did not come within :data:`PATIENCE`.
    """
    if width not in WIDTHS:
        raise ValueError(f"pictures are {WIDTHS!r} pixels wide, not {width!r}")
    if not _one_at_a_time.acquire(timeout=PATIENCE):
        raise TooBusy(f"picture {number} was not begun within {PATIENCE:g} s")
    try:
        picture = _Canvas(scene(number), width * _SCALE).paint().reduce(_SCALE)
        stream = BytesIO()
        picture.save(stream, "WEBP", quality=82, method=2)
    finally:
        _one_at_a_time.release()
    return stream.getvalue()


# For each time of day: sky above and at the horizon, sun or moon, the haze over distant land, and
# the colour of near land.
_LIGHT: dict[str, list[tuple[Colour, ...]]] = {
    "dawn": [
        ((88, 108, 168), (255, 205, 178), (255, 244, 214), (240, 190, 184), (44, 44, 78)),
        ((70, 120, 160), (255, 224, 190), (255, 250, 225), (225, 205, 200), (32, 60, 78)),
        ((120, 100, 160), (255, 190, 170), (255, 236, 200), (232, 176, 188), (58, 38, 76)),
    ],
    "day": [
        ((62, 134, 205), (200, 228, 242), (255, 253, 235), (182, 208, 224), (30, 70, 62)),
        ((90, 160, 200), (226, 238, 232), (255, 255, 240), (190, 212, 208), (38, 78, 48)),
        ((50, 110, 180), (190, 220, 245), (255, 255, 235), (170, 196, 222), (28, 56, 84)),
    ],
    "dusk": [
        ((54, 40, 92), (252, 140, 88), (255, 226, 150), (214, 116, 104), (30, 18, 46)),
        ((30, 62, 98), (250, 178, 100), (255, 232, 170), (196, 140, 116), (18, 28, 46)),
        ((90, 34, 80), (248, 110, 96), (255, 214, 160), (196, 84, 100), (38, 12, 42)),
    ],
    "night": [
        ((8, 14, 38), (46, 70, 110), (244, 242, 226), (44, 62, 96), (5, 9, 20)),
        ((12, 10, 34), (70, 58, 112), (248, 240, 220), (58, 50, 92), (8, 6, 20)),
        ((4, 20, 34), (30, 88, 104), (240, 246, 232), (28, 70, 84), (3, 12, 18)),
    ],
}


class _Canvas:
    """One picture in progress. Lengths are fractions of its width or height."""

    def __init__(self, what: Scene, width: int) -> None:
        self.scene = what
        self.chance = random.Random(what.shapes)
        self.width, self.height = width, width * 3 // 4
        light = self.chance.choice(_LIGHT[what.time])
        self.top, self.low, self.sun, self.haze, self.near = light
        self.horizon = self.chance.uniform(0.5, 0.62)
        self.sun_at = self.chance.uniform(0.15, 0.85), self._sun_height()
        self.image = Image.new("RGB", (self.width, self.height))

    def _sun_height(self) -> float:
        low = self.scene.time in ("dawn", "dusk")
        return self.horizon - (
            self.chance.uniform(0.02, 0.16) if low else self.chance.uniform(0.28, 0.42)
        )

    def paint(self) -> Image.Image:
        self._sky()
        getattr(self, f"_{self.scene.land}")()
        return self.image

    # -- The sky

    def _sky(self) -> None:
        height = round(self.horizon * self.height) + 1
        self.image.paste(self._gradient([self.top, self.low], height), (0, 0))
        self.image.paste(self.low, (0, height, self.width, self.height))
        if self.scene.time == "night":
            self._stars()
        self._sun()
        if self.scene.time != "night":
            self._clouds()

    def _gradient(self, colours: list[Colour], height: int) -> Image.Image:
        column = Image.new("RGB", (1, height))
        steps = len(colours) - 1
        pixels = []
        for y in range(height):
            part = y / max(1, height - 1) * steps
            place = min(int(part), steps - 1)
            pixels.append(_mix(colours[place], colours[place + 1], part - place))
        column.putdata(pixels)
        return column.resize((self.width, height))

    def _stars(self) -> None:
        pen = ImageDraw.Draw(self.image)
        for _ in range(130):
            x, y = (
                self.chance.random() * self.width,
                self.chance.random() ** 1.4 * self.height * 0.6,
            )
            bright = self.chance.random() ** 2
            radius = self.width * (0.0006 + 0.0012 * bright)
            fill = _mix(self.top, (255, 255, 255), 0.35 + 0.65 * bright)
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)

    def _sun(self) -> None:
        x, y = self.sun_at[0] * self.width, self.sun_at[1] * self.height
        low = self.scene.time in ("dawn", "dusk")
        glow = round(self.width * (0.62 if low else 0.4))
        # Pillow's circle of 256 pixels, black in the middle.
        mask = ImageOps.invert(Image.radial_gradient("L")).point(
            [round((value / 255) ** 2.2 * (190 if low else 120)) for value in range(256)]
        )
        mask = mask.resize((2 * glow, 2 * glow))
        self.image.paste(self.sun, (round(x - glow), round(y - glow)), mask)
        radius = self.width * (0.052 if low else 0.036)
        # A mask, so that the moon's dark side shows the sky.
        disc = Image.new("L", (round(2 * radius), round(2 * radius)))
        pen = ImageDraw.Draw(disc)
        pen.ellipse((0, 0, *disc.size), 255)
        if self.scene.time == "night":
            shift = radius * self.chance.uniform(0.4, 0.9)
            pen.ellipse((shift, -shift / 3, shift + disc.width, disc.height - shift / 3), 0)
        self.image.paste(self.sun, (round(x - radius), round(y - radius)), disc)

    def _clouds(self) -> None:
        # Small and blurred, then scaled up: softer, and cheaper.
        width, height = self.width // 8, self.height // 8
        mask = Image.new("L", (width, height))
        pen = ImageDraw.Draw(mask)
        for _ in range(self.chance.randrange(2, 7)):
            x, y = self.chance.uniform(-0.1, 1), self.chance.uniform(0.05, self.horizon - 0.08)
            long, strength = self.chance.uniform(0.12, 0.4), self.chance.randrange(40, 130)
            for _ in range(5):
                left = (x + self.chance.uniform(-0.1, 0.1)) * width
                upper = (y + self.chance.uniform(-0.012, 0.012)) * height
                box = (left, upper, left + long * width, upper + 0.016 * height + 1)
                pen.ellipse(box, strength)
        mask = mask.filter(ImageFilter.GaussianBlur(width / 110)).resize(
            self.image.size, Image.Resampling.BICUBIC
        )
        self.image.paste(_mix(self.low, (255, 255, 255), 0.55), (0, 0, *self.image.size), mask)

    # -- The lands

    def _ridges(self) -> None:
        layers = self.chance.randrange(5, 7)
        for layer in range(layers):
            far = 1 - layer / (layers - 1)
            base = self.horizon - 0.1 + (1.02 - self.horizon) * (1 - far) * 0.92
            self._layer(self._rough(base, 0.2 * (0.5 + far * 0.5), 0.55), far)
        self._firs(0.97, 0.06, self.chance.randrange(4, 14))

    def _lake(self) -> None:
        for far, rise in ((1.0, 0.17), (0.7, 0.11), (0.42, 0.06)):
            self._layer(
                self._rough(self.horizon - rise, rise * 1.3, 0.55), far, self.horizon + 0.02
            )
        self._mirror(self.horizon)
        self._layer(self._rough(0.95, 0.05, 0.5), 0)
        self._firs(0.97, 0.14, self.chance.randrange(3, 9))

    def _sea(self) -> None:
        top = round(self.horizon * self.height)
        shade = _mix(self.low, self.near, 0.45)
        water = self._gradient(
            [_mix(self.low, shade, 0.5), shade, _mix(shade, self.near, 0.75)], self.height - top
        )
        self.image.paste(water, (0, top))
        if self.chance.random() < 0.7:
            # A cape: it slopes down to the water on one side.
            from_right, end = self.chance.random() < 0.5, self.chance.uniform(0.2, 0.5)
            edge = [
                (x, y + max(0.0, (1 - x if from_right else x) - end) * 0.4)
                for x, y in self._rough(self.horizon - 0.05, 0.07, 0.5)
            ]
            self._layer(edge, 0.55, self.horizon)
        self._glitter(top)
        self._layer(self._waves(0.93, 0.035, 2), 0.1)

    def _dunes(self) -> None:
        sand = _mix((236, 184, 108), self.haze, 0.2)
        if self.scene.time == "night":
            sand = _mix(self.haze, self.near, 0.2)
        layers = 5
        for layer in range(layers):
            near = layer / (layers - 1)
            base = self.horizon + (0.9 - self.horizon) * near
            edge = self._waves(base, 0.04 + 0.09 * near, 1.4 - 0.8 * near)
            lit = _mix(_mix(self.haze, sand, 0.3 + 0.7 * near), self.near, 0.12 * near)
            shade = _mix(lit, self.near, 0.3 + 0.3 * near)
            self._fill(edge, [_mix(lit, self.sun, 0.3 * (1 - near / 2)), lit, shade])

    def _forest(self) -> None:
        self._layer(self._rough(self.horizon - 0.1, 0.16, 0.55), 1)
        rows = 5
        for row in range(rows):
            near = row / (rows - 1)
            base = self.horizon + 0.03 + (0.98 - self.horizon) * near * 0.9
            hill = self._waves(base, 0.03, 1.5)
            colour = _mix(self.haze, self.near, 0.25 + 0.75 * near)
            size = 0.05 + 0.17 * near
            self._trees(hill, size, round(34 - 18 * near), colour)
            self._fill(hill, [colour, _mix(colour, self.haze, 0.35 * (1 - near))])

    # -- Textures and shapes

    def _layer(self, edge: list[tuple[float, float]], far: float, bottom: float = 1.0) -> None:
        """Fill all below ``edge``, in the colour of its distance, with haze in the valley."""
        colour = _mix(self.near, self.haze, far * 0.85)
        self._fill(edge, [colour, _mix(colour, self.haze, 0.15 + 0.3 * far)], bottom)

    def _fill(
        self, edge: list[tuple[float, float]], colours: list[Colour], bottom: float = 1.0
    ) -> None:
        top = max(0, math.floor(min(y for _, y in edge) * self.height))
        low = min(self.height, math.ceil(bottom * self.height))
        if low <= top:
            return
        mask = Image.new("L", (self.width, low - top))
        points = [(x * self.width, y * self.height - top) for x, y in edge]
        corners = [(self.width, low - top), (0, low - top)]
        ImageDraw.Draw(mask).polygon([*points, *corners], 255)
        self.image.paste(self._gradient(colours, low - top), (0, top), mask)

    def _rough(self, base: float, height: float, roughness: float) -> list[tuple[float, float]]:
        """Return a mountain's edge: halved again and again, each time with a smaller shift."""
        line = [self.chance.uniform(-0.5, 0.5) for _ in range(4)]
        shift = 0.5
        for _ in range(6):
            middles = [(a + b) / 2 + self.chance.uniform(-shift, shift) for a, b in pairwise(line)]
            line = [v for pair in zip(line, middles, strict=False) for v in pair] + [line[-1]]
            shift *= roughness
        last = len(line) - 1
        return [(i / last, base + value * height * 0.75) for i, value in enumerate(line)]

    def _waves(self, base: float, height: float, number: float) -> list[tuple[float, float]]:
        """Return a soft edge: three sines."""
        waves = [(number * f, self.chance.uniform(0, math.tau), 1 / f) for f in (1, 1.9, 3.1)]
        return [
            (
                i / 90,
                base
                + height * sum(a * math.sin(f * math.tau * i / 90 + p) for f, p, a in waves) / 1.8,
            )
            for i in range(91)
        ]

    def _trees(
        self, edge: list[tuple[float, float]], size: float, number: int, colour: Colour
    ) -> None:
        pen = ImageDraw.Draw(self.image)
        for place in range(number):
            x = (place + self.chance.random()) / number
            y = edge[min(round(x * (len(edge) - 1)), len(edge) - 1)][1] + 0.01
            self._fir(pen, x, y, size * self.chance.uniform(0.65, 1.15), colour)

    def _firs(self, y: float, size: float, number: int) -> None:
        pen = ImageDraw.Draw(self.image)
        for _ in range(number):
            x = self.chance.random()
            self._fir(
                pen,
                x,
                y + self.chance.uniform(0, 0.03),
                size * self.chance.uniform(0.7, 1.4),
                self.near,
            )

    def _fir(
        self, pen: ImageDraw.ImageDraw, x: float, y: float, size: float, colour: Colour
    ) -> None:
        """Draw a fir of height ``size`` that stands on ``y``: a trunk with jagged branches."""
        middle, foot, tall = x * self.width, y * self.height, size * self.height
        half = tall * 0.2
        left, right = [(middle, foot - tall)], []
        tiers = 7
        for tier in range(1, tiers + 1):
            down = foot - tall + tall * tier / tiers * 0.92
            wide = half * tier / tiers * self.chance.uniform(0.85, 1.15)
            left += [(middle - wide, down), (middle - wide * 0.5, down - tall * 0.02)]
            right += [(middle + wide, down), (middle + wide * 0.5, down - tall * 0.02)]
        trunk = [(middle - tall * 0.015, foot - tall * 0.08), (middle - tall * 0.015, foot)]
        trunk += [(middle + tall * 0.015, foot), (middle + tall * 0.015, foot - tall * 0.08)]
        pen.polygon([*left, *trunk, *reversed(right)], colour)

    def _mirror(self, shore: float) -> None:
        """Draw everything above the shore upside down and darker, with streaks of the wind."""
        top = round(shore * self.height)
        depth = self.height - top
        above = ImageOps.flip(self.image.crop((0, max(0, top - depth), self.width, top)))
        above = above.resize((self.width, depth)).filter(ImageFilter.GaussianBlur(self.width / 500))
        tint = self._gradient([_mix(self.haze, self.near, 0.3), self.near], depth)
        self.image.paste(Image.blend(above, tint, 0.34), (0, top))
        pen = ImageDraw.Draw(self.image, "RGBA")
        for _ in range(46):
            part = self.chance.random() ** 1.5
            y, x = top + part * depth, self.chance.uniform(-0.1, 1) * self.width
            long = self.width * self.chance.uniform(0.04, 0.3)
            thick = max(1, round(self.height * 0.0022 * (0.6 + part)))
            pen.line((x, y, x + long, y), (*self.low, self.chance.randrange(20, 64)), thick)

    def _glitter(self, top: int) -> None:
        """Draw the sun's reflection on the water."""
        pen = ImageDraw.Draw(self.image, "RGBA")
        depth = self.height - top
        for _ in range(230):
            part = self.chance.random() ** 1.3
            wide = 0.012 + 0.11 * part
            x = (self.sun_at[0] + self.chance.gauss(0, wide)) * self.width
            long = self.width * self.chance.uniform(0.004, 0.012 + 0.03 * part)
            y = top + part * depth
            thick = max(1, round(self.height * 0.0018 * (0.7 + 2 * part)))
            alpha = round(self.chance.uniform(60, 200) * (1 - 0.6 * part))
            pen.line((x - long, y, x + long, y), (*self.sun, alpha), thick)


def _mix(one: Colour, other: Colour, part: float) -> Colour:
    """Mix two colours; ``part`` is the share of the other colour, 0 to 1."""
    part = min(1.0, max(0.0, part))
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(one, other, strict=True))
    return red, green, blue
