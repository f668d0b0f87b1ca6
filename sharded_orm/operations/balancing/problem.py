"""The problem of balancing, and a plan that solves it, as values. Uses neither Django nor a driver.

The words are those of bin packing: an *item* is in a *bin*. If shards are balanced, the items are
shards and the bins are nodes. If keys are balanced, the items are keys and the bins are shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: A larger ratio is shown as words, not as a percentage. Such ratios occur if a bin is to be
#: emptied, because the share of such a bin is nearly 0.
_MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class Bin:
    """A node that has shards, or a shard that has keys.

    :param capacity: how large the share of this bin is, relative to the other bins. A bin with the
        capacity 0 is emptied.
    :param other: the size of everything in the bin that is not an item of the problem, and so stays
        there.
    """

    name: str
    capacity: float = 1.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """A shard or a key.

    :param bin: the name of the bin in which the item is.
    :param size: the item's bytes, rows, keys or load, whichever is balanced.
    :param targets: the names of the bins to which the item may move. If there are none, it stays.
    """

    name: str
    bin: str
    size: float
    targets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BalanceProblem:
    """Items in bins, to be distributed evenly.

    :param threshold: a bin gives items away if it exceeds its share by more than this fraction,
        such as 0.1.
    :param goal: a bin gives items away until it exceeds its share by at most this fraction.
    """

    bins: tuple[Bin, ...]
    items: tuple[Item, ...]
    threshold: float = 0.1
    goal: float = 0.1


@dataclass(frozen=True, slots=True)
class BalanceMove:
    """The move of one item from the bin ``source`` to the bin ``target``.

    After the move, the fuller of the two bins is less full than the source was before.

    :param source_before: how full the source is before the move. 1.0 is the mean of all bins, in
        proportion to their capacities.
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
    """The reason why a bin stays fuller than it should be.

    :param item: the item that is the reason; None if the reason is what must stay in the bin.
    """

    bin: str
    item: str | None
    text: str


@dataclass(frozen=True)
class BalancePlan:
    """Moves in their order, and what they achieve.

    :param before: the load of each bin now, by the name of the bin.
    :param after: the load of each bin after all moves.
    :param shares: the load that each bin is to have.
    :param obstacles: one entry for each bin that stays too full.
    :param least: a lower bound for the sum of the sizes that any plan must move to reach the goal.
    :param parts: independent parts of the problem, as names of bins. No item can move from one part
        to another.
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
    """Return ``size`` as a percentage of ``whole``, such as ``131%``."""
    return f"{size / whole:.0%}" if size < _MOST * whole else "far more than 100%"
