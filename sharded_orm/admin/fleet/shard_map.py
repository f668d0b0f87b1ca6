"""What a drawn map consists of: lanes of nodes, strips of ranges, cells of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from sharded_orm.topology.model import Shard, ShardGroup, ShardRange


@dataclass(frozen=True)
class CellState:
    """How a shard can be. The mark says so without colour."""

    name: str
    mark: str
    meaning: str


#: From the best to the worst; a cell of several shards has the worst of theirs.
STATES: Final = (
    CellState("current", "", "current: it has all migrations"),
    CellState("behind", "↑", "behind: it lacks migrations"),
    CellState("missing", "∅", "missing: its schema or file does not exist"),
    CellState("error", "!", "wrong: it exists and cannot be read"),
    CellState("down", "✕", "down: its node does not answer"),
)
RANK = {state.name: rank for rank, state in enumerate(STATES)}
BY_NAME = {state.name: state for state in STATES}


@dataclass(frozen=True)
class Addresses:
    """Of pages, without a search in all URLs for each of hundreds of cells.

    :param shard: of some shard, whose alias is ``ALIAS``.
    :param range: of some range, ``GROUP/0-1``.
    """

    shard: str
    range: str

    def of_range(self, group: str, first: int, last: int) -> str:
        return self.range.replace("GROUP/0-1", f"{group}/{first}-{last}")

    def of(self, shards: Sequence[Shard]) -> str:
        """Of one shard, or of neighbours."""
        first, last = shards[0], shards[-1]
        if first is last:
            return self.shard.replace("ALIAS", first.alias)
        return self.of_range(first.group, first.number, last.number)


def span(first: int, last: int) -> str:
    """``0-7``, or ``3``."""
    return f"{first}" if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class RangeOnNode:
    """A range of a group on its primary."""

    node: str
    group: ShardGroup
    range: ShardRange

    def __len__(self) -> int:
        return self.range.last - self.range.first + 1


@dataclass(frozen=True)
class Cell:
    """A shard, or neighbours. Coordinates are text, as no locale may change them."""

    label: str
    url: str
    state: CellState
    #: In the cell: the mark of its state, and its number if there is room.
    text: str
    x: str
    y: str
    width: str
    height: str
    middle_x: str
    middle_y: str


@dataclass(frozen=True)
class Strip:
    """A range on the map."""

    group: str
    range: ShardRange
    url: str
    counts: str
    size: str
    height: str
    cells: tuple[Cell, ...]

    @property
    def span(self) -> str:
        return span(self.range.first, self.range.last)

    @property
    def is_open(self) -> bool:
        return self.range.open and self.range.weight > 0


@dataclass(frozen=True)
class Lane:
    """A node on the map."""

    name: str
    address: str
    error: str
    shards: int
    strips: tuple[Strip, ...]
    #: Texts and addresses of the ranges whose replica it is.
    replicas: tuple[tuple[str, str], ...] = ()


@dataclass
class Legend:
    """How many shards are in which state."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RANK, 0))

    def add(self, states: Iterable[str]) -> None:
        for state in states:
            self.counts[state] += 1

    def __iter__(self) -> Iterator[tuple[CellState, int]]:
        return ((state, self.counts[state.name]) for state in STATES)


@dataclass(frozen=True)
class Drawing:
    """The map.

    :param grouped: how many shards one cell stands for, at most.
    :param unsized: of how many shards the size is not known, though it was asked for.
    """

    lanes: tuple[Lane, ...]
    legend: Legend
    grouped: int
    unsized: int
