"""The shard map: nodes as lanes, their ranges as strips, and in these a cell for each shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from django.template.defaultfilters import filesizeformat

from sharded_orm.admin.fleet import treemap
from sharded_orm.admin.fleet.pages import address
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.status import FleetStatus, ShardStatus
from sharded_orm.topology.model import Shard, ShardGroup, ShardRange, Topology

#: Cells of one page. With more shards, a cell stands for several.
CELLS: Final = 600
#: Ranges of one page.
RANGES: Final = 60
# Width of a letter, in units of the picture.
_LETTER = 7.2


@dataclass(frozen=True)
class CellState:
    """A state that a shard can have. The mark shows it without colour."""

    name: str
    mark: str
    meaning: str


#: From the best to the worst. A cell of several shards has the worst of their states.
STATES: Final = (
    CellState("current", "", "current: it has all migrations"),
    CellState("behind", "↑", "behind: it lacks migrations"),
    CellState("missing", "∅", "missing: its schema or file does not exist"),
    CellState("error", "!", "wrong: it exists and cannot be read"),
    CellState("down", "✕", "down: its node does not answer"),
)
RANK = {state.name: rank for rank, state in enumerate(STATES)}


@dataclass(frozen=True)
class Addresses:
    """URLs of pages, without a search in all URL patterns for each of hundreds of cells.

    :param shard: the URL of the page of a shard, with the alias ``ALIAS``.
    :param range: the URL of the page of a range, with ``GROUP/0-1``.
    """

    shard: str
    range: str

    def of_range(self, group: str, first: int, last: int) -> str:
        return self.range.replace("GROUP/0-1", f"{group}/{first}-{last}")

    def of_shards(self, shards: Sequence[Shard]) -> str:
        """The page of one shard, or of neighbours."""
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

    def shards(self, first: int | None = None, last: int | None = None) -> list[Shard]:
        """The shards ``first`` to ``last``, by default all of the range."""
        first = self.range.first if first is None else first
        last = self.range.last if last is None else last
        return [self.group.shard(number) for number in range(first, last + 1)]


def ranges_by_node(topology: Topology, groups: Sequence[str]) -> list[RangeOnNode]:
    """All ranges of ``groups``, by node, in the order of the topology."""
    order = {name: index for index, name in enumerate(topology.nodes)}
    ranges = [
        RangeOnNode(shard_range.primary, topology.groups[name], shard_range)
        for name in groups
        for shard_range in topology.groups[name].ranges
    ]
    return sorted(ranges, key=lambda on_node: order[on_node.node])


# ##### What the template draws #####


@dataclass(frozen=True)
class Cell:
    """A shard, or neighbours. Coordinates are text because no locale may change them."""

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
    #: Texts and URLs of the ranges whose replica the node is.
    replicas: tuple[tuple[str, str], ...] = ()


@dataclass
class Legend:
    """The number of shards in each state."""

    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[tuple[CellState, int]]:
        return ((state, self.counts[state.name]) for state in STATES)


@dataclass(frozen=True)
class Drawing:
    """The map.

    :param grouped: the number of shards that one cell stands for, at most.
    :param unsized: the number of shards whose size was asked for and is not known.
    """

    lanes: tuple[Lane, ...]
    legend: Legend
    grouped: int
    unsized: int


# ##### Sizes #####


class Measure:
    """Sizes of shards: as weights of the cells, and in words."""

    def __init__(self, sizes: Mapping[str, ShardSize], by: str) -> None:
        self._sizes = sizes
        self._by = by
        self.unknown = 0

    def of(self, shards: Iterable[Shard]) -> float:
        """The size of ``shards`` together; 0 for those whose size is not known."""
        if self._by == "same":
            return 0.0
        sizes = filter(None, (self._sizes.get(shard.alias) for shard in shards))
        return float(sum(size.bytes if self._by == "bytes" else size.rows or 0 for size in sizes))

    def text(self, shards: Iterable[Shard]) -> str:
        """``12 MB, about 340 rows``; empty if nothing is known."""
        sizes = [self._sizes[shard.alias] for shard in shards if shard.alias in self._sizes]
        if not sizes:
            return ""
        rows = [size.rows for size in sizes if size.rows is not None]
        text = filesizeformat(sum(size.bytes for size in sizes)).replace("\xa0", " ")
        return text + (f", about {sum(rows):,} rows" if rows else "")

    def count_unknown(self, shards: Iterable[Shard]) -> None:
        if self._by != "same":
            by_rows = self._by == "rows"
            for shard in shards:
                size = self._sizes.get(shard.alias)
                self.unknown += size is None or (by_rows and size.rows is None)


# ##### Drawing #####


def draw(
    topology: Topology,
    ranges: Sequence[RangeOnNode],
    status: FleetStatus,
    sizes: Mapping[str, ShardSize],
    by: str,
    urls: Addresses,
) -> Drawing:
    """The map of ``ranges``.

    :param status: the states of all their shards.
    :param by: ``"bytes"``, ``"rows"`` or ``"same"``: what makes a cell large.
    """
    statuses = {shard_status.shard.alias: shard_status for shard_status in status.shards}
    errors = {node.name: node.error for node in status.nodes if node.error is not None}
    measure = Measure(sizes, by)
    legend = Legend()
    grouped = 1
    while sum(-(-len(on_node) // grouped) for on_node in ranges) > max(CELLS, len(ranges)):
        grouped *= 2
    largest = max((measure.of(on_node.shards()) for on_node in ranges), default=0.0)
    strips: dict[str, list[Strip]] = {}
    for on_node in ranges:
        strip = _strip(on_node, statuses, measure, largest, grouped, legend, urls)
        strips.setdefault(on_node.node, []).append(strip)
    names = [node.name for node in status.nodes]
    replicas = _replicas(ranges, urls)
    lanes = [
        Lane(
            name,
            address(topology.nodes.get(name, {})),
            without_accounts(errors.get(name, "")),
            sum(len(on_node) for on_node in ranges if on_node.node == name),
            tuple(strips.get(name, ())),
            tuple(replicas.get(name, ())),
        )
        for name in names
    ]
    return Drawing(tuple(lanes), legend, grouped, measure.unknown)


def _replicas(ranges: Sequence[RangeOnNode], urls: Addresses) -> dict[str, list[tuple[str, str]]]:
    """Texts and URLs of ranges by the node of their replica."""
    replicas: dict[str, list[tuple[str, str]]] = {}
    for on_node in ranges:
        name, shard_range = on_node.group.name, on_node.range
        if shard_range.replica is not None:
            text = f"{name} {span(shard_range.first, shard_range.last)}"
            url = urls.of_range(name, shard_range.first, shard_range.last)
            replicas.setdefault(shard_range.replica, []).append((text, url))
    return replicas


def _strip(
    on_node: RangeOnNode,
    statuses: Mapping[str, ShardStatus],
    measure: Measure,
    largest: float,
    grouped: int,
    legend: Legend,
    urls: Addresses,
) -> Strip:
    name, shard_range = on_node.group.name, on_node.range
    shards_by_cell = [
        on_node.shards(first, min(first + grouped - 1, shard_range.last))
        for first in range(shard_range.first, shard_range.last + 1, grouped)
    ]
    size = measure.of(on_node.shards())
    if size:
        weights = [measure.of(shards) for shards in shards_by_cell]
        boxes, height = treemap.strips(weights, size / largest)
    else:
        boxes, height = treemap.grid(len(shards_by_cell))
    cells, counts = [], Counter[str]()
    for shards, box in zip(shards_by_cell, boxes, strict=True):
        shard_statuses = [statuses.get(shard.alias) for shard in shards]
        states = ["down" if status is None else status.state for status in shard_statuses]
        counts.update(states)
        label = _label(shards, states, shard_statuses[0], measure)
        cells.append(_cell(label, urls.of_shards(shards), states, shards, box))
        measure.count_unknown(shards)
    legend.counts.update(counts)
    return Strip(
        name,
        shard_range,
        urls.of_range(name, shard_range.first, shard_range.last),
        _in_words(counts),
        measure.text(on_node.shards()),
        f"{height:.1f}",
        tuple(cells),
    )


def _cell(
    label: str, url: str, states: Sequence[str], shards: Sequence[Shard], box: treemap.Box
) -> Cell:
    worst = STATES[max(map(RANK.__getitem__, states))]
    # A gap between neighbours.
    x, y, width, height = box.x + 1, box.y + 1, box.width - 2, box.height - 2
    middle = (x + width / 2, y + height / 2)
    text = f"{worst.mark} {span(shards[0].number, shards[-1].number)}".strip()
    if width < _LETTER * len(text) + 4 or height < 2 * _LETTER:
        text = worst.mark
    coordinates = (f"{value:.1f}" for value in (x, y, width, height, *middle))
    return Cell(label, url, worst, text, *coordinates)


def _label(
    shards: Sequence[Shard], states: Sequence[str], status: ShardStatus | None, measure: Measure
) -> str:
    """What a screen reader says of a cell; ``status`` is that of its first shard."""
    if len(shards) > 1:
        name, state = f"{shards[0].alias} to {shards[-1].alias}", _in_words(Counter(states))
    else:
        behind = f" by {status.behind} migrations" if status is not None and status.behind else ""
        name, state = shards[0].alias, states[0] + behind
    return f"{name}: {', '.join(filter(None, (state, measure.text(shards))))}"


def _in_words(counts: Mapping[str, int]) -> str:
    """``7 current, 1 behind``."""
    return ", ".join(f"{counts[name]:,} {name}" for name in RANK if counts.get(name))
