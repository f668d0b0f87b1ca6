"""The scene of a picture, computed from a number: the same number, the same scene."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Kinds of landscape, with the noun that pages use.
LANDS = {
    "ridges": "mountain ridges one behind the other",
    "lake": "a lake below mountains",
    "sea": "the open sea",
    "dunes": "sand dunes",
    "forest": "firs on hills in the mist",
}
TIMES = {"dawn": "at dawn", "day": "by day", "dusk": "at dusk", "night": "at night"}
# Most people take photos by day.
_CHANCES = {"dawn": 3, "day": 4, "dusk": 4, "night": 2}


@dataclass(frozen=True)
class Scene:
    """One landscape; ``shapes`` is the seed of its random details."""

    land: str
    time: str
    shapes: int

    @property
    def description(self) -> str:
        """A description for people who do not see the picture."""
        return f"Drawing of {LANDS[self.land]} {TIMES[self.time]}"


def scene(number: int) -> Scene:
    """Return the scene of a photo; any integer has one."""
    # A separate, seeded generator, so that a picture never changes.
    chance = random.Random(f"scene {number}")
    land = chance.choice(list(LANDS))
    (time,) = chance.choices(list(_CHANCES), list(_CHANCES.values()))
    return Scene(land, time, chance.getrandbits(32))
