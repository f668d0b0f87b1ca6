"""What is to be balanced, and the plan for it, as values. Knows neither Django nor a driver.

The words are those of bin packing: an *item* is in a *bin*. For shards, the items are shards and the
bins are nodes. For keys, the items are keys and the bins are shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: A larger ratio says nothing. The share of a bin that is to be emptied is nearly 0.
_MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class Bin:
    """A node that has shards, or a shard that has keys.

    :param capacity: how much it shall have, relative to the other bins. A bin with the capacity 0 is
        emptied.
    :param other: the size of what is in it beside the items of the problem. It stays there.
    """

    name: str
    capacity: float = 1.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """A shard or a key.

    :param bin: the name of the bin in which it is.
    :param size: bytes, rows, keys or load: what is to be balanced.
    :param targets: the names of the bins that may have it. If there are none, it stays.
    """

    name: str
    bin: str
    size: float
    targets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BalanceProblem:
    """Items in bins. Bins that can get items of each other are balanced together.

    :param threshold: a bin gives something away if it has more than its share by this part of it,
        such as 0.1.
    :param goal: it gives so much away that it has more than its share by at most this part.
    """

    bins: tuple[Bin, ...]
    items: tuple[Item, ...]
    threshold: float = 0.1
    goal: float = 0.1


@dataclass(frozen=True, slots=True)
class BalanceMove:
    """A move of an item. After it, the fuller of the two bins is less full than the source was.

    :param source_before: how full the source is before the move: 1.0 means that it has its share.
    """

    item: str
    size: float
    source: str
    target: str
    source_before: float
    source_after: float
    target_before: float
    target_after: float


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a bin stays fuller than the goal.

    :param item: the item that forbids it; None if it is what stays in the bin.
    """

    bin: str
    item: str | None
    text: str


@dataclass(frozen=True)
class BalancePlan:
    """Moves in their order, and what they achieve.

    :param before: the size of what each bin has now, by name.
    :param after: the same after all moves.
    :param shares: the size of what each bin shall have.
    :param obstacles: one for each bin that stays fuller than the goal.
    :param least: what any plan must move to reach the goal, as a lower bound.
    :param parts: the names of bins that are balanced together. Nothing can move from one part to
        another.
    """

    moves: tuple[BalanceMove, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    shares: Mapping[str, float]
    obstacles: tuple[Obstacle, ...] = ()
    least: float = 0.0
    parts: tuple[tuple[str, ...], ...] = ()
    moved: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moved", sum(move.size for move in self.moves))


def percent(size: float, whole: float = 1.0) -> str:
    """Return ``size`` as a part of ``whole``, such as ``131%``."""
    return f"{size / whole:.0%}" if size < _MOST * whole else "far more than 100%"
