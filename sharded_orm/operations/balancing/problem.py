"""The problem of balancing nodes or shards, and a plan that solves it, as values. Uses neither
Django nor a driver.

The words are those of bin packing: an *item* is in a *bin*. If shards are balanced, the items are
shards and the bins are nodes. If keys are balanced, the items are keys and the bins are shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Texts show the load of a bin as a percentage of the load that it is to have. A bin that is to be
#: emptied should have almost no load, so its percentage would have many digits. If the load is at
#: least this many times what it is to be, the text is "far more than 100%" instead.
_MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class Bin:
    """A node that has shards, or a shard that has keys.

    :param capacity: how much this bin is to have, relative to the other bins: a bin with the
        capacity 2 is to have twice the load of a bin with the capacity 1. A bin with the capacity 0
        is emptied.
    :param other: the size of everything in the bin that is not an item of the problem, and so stays
        there.
    """

    name: str
    capacity: float = 1.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """A shard or a key that the plan may move.

    :param bin: the name of the node or shard in which the item is.
    :param size: the item's bytes, rows, keys or load, whichever is balanced.
    :param targets: the names of the nodes or shards to which the item may move. If there are none,
        it stays.
    """

    name: str
    bin: str
    size: float
    targets: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BalanceProblem:
    """Items (shards or keys) in bins (nodes or shards), to be distributed evenly.

    :param threshold: items move out of a bin only if its load exceeds its share by more than this
        fraction, such as 0.1. The share of a bin is the load that the bin is to have.
    :param goal: items move out of a bin above the threshold until its load exceeds its share by at
        most this fraction.
    """

    bins: tuple[Bin, ...]
    items: tuple[Item, ...]
    threshold: float = 0.1
    goal: float = 0.1


@dataclass(frozen=True, slots=True)
class BalanceMove:
    """The move of one item (a shard or key) from the bin ``source`` to the bin ``target``, which
    are nodes or shards.

    After the move, the fuller of the two bins is less full than the source was before.

    :param source_before: how full the source is before the move. At 1.0, it has the mean load of
        all bins, in proportion to its capacity.
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
    """The reason why a bin (a node or shard) stays fuller than it should be.

    :param item: the name of the shard or key that is the obstacle: it is too large for every bin,
        or it is the smallest one, and even its move would gain too little. None if no item may
        move, or if what must stay in the bin is already too much.
    """

    bin: str
    item: str | None
    text: str


@dataclass(frozen=True)
class BalancePlan:
    """The moves that balance shards on nodes, or keys on shards, and what they achieve.

    :param moves: the moves, in the order in which they are to be made.
    :param before: maps the name of each bin (node or shard) to its load now.
    :param after: maps the name of each bin to its load after all moves.
    :param shares: maps the name of each bin to the load that the bin is to have.
    :param obstacles: one entry for each bin that stays too full.
    :param least: a lower bound for the work: every plan that reaches the goal moves items whose
        sizes have at least this sum.
    :param parts: independent parts of the problem, as tuples of the names of bins, such as
        ``(("db1", "db2"), ("db3",))``. No item can move from one part to another.
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
