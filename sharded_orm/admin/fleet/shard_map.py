"""The shard map of the admin. Each node is a lane, each range of shards is a strip in the lane of
its node, and each shard is a cell in a strip.
"""

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
from sharded_orm.operations.shards.fleet_status import FleetStatus, ShardStatus
from sharded_orm.topology.model import Shard, ShardGroup, ShardRange, Topology

#: A page of the map draws at most this many cells. A cell is one shard. If the ranges on the page
#: have more shards than this, each cell is several neighbouring shards.
CELLS: Final = 600
#: The number of ranges on one page.
RANGES: Final = 60
# The estimated width of a letter, in units of the SVG picture.
_LETTER = 7.2


@dataclass(frozen=True)
class CellState:
    """A state of a shard, as the map shows it.

    ``mark`` is a character that is written in a cell, so that users who do not see colours know the
    state.
    """

    name: str
    mark: str
    meaning: str


#: All states, from the best to the worst. A cell of several shards shows the worst of their states.
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
    """Patterns for the URLs of the pages of shards and ranges.

    Filling in a pattern costs less than calling ``reverse()`` for each of hundreds of cells.

    :param shard: the URL of a shard's page, with ``ALIAS`` where the shard's alias goes.
    :param range: the URL of a range's page, with ``GROUP/0-1`` where the shard group and the
        numbers of the first and last shard go.
    """

    shard: str
    range: str

    def of_range(self, group: str, first: int, last: int) -> str:
        return self.range.replace("GROUP/0-1", f"{group}/{first}-{last}")

    def of_shards(self, shards: Sequence[Shard]) -> str:
        """Return the URL of the page of ``shards``.

        For one shard, this is the page of the shard. For several neighbouring shards, this is the
        page of a range.
        """
        first, last = shards[0], shards[-1]
        if first is last:
            return self.shard.replace("ALIAS", first.alias)
        return self.of_range(first.group, first.number, last.number)


def span(first: int, last: int) -> str:
    """Return the numbers of neighbouring shards as text: ``0-7``, or ``3`` for one shard."""
    return f"{first}" if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class RangeOnNode:
    """A range of shards of a shard group, with the node that has the primary databases of the
    range.
    """

    node: str
    group: ShardGroup
    range: ShardRange

    def __len__(self) -> int:
        return self.range.last - self.range.first + 1

    def shards(self, first: int | None = None, last: int | None = None) -> list[Shard]:
        """Return the shards with the numbers ``first`` to ``last``; by default, all shards of the
        range.
        """
        first = self.range.first if first is None else first
        last = self.range.last if last is None else last
        return [self.group.shard(number) for number in range(first, last + 1)]


def ranges_by_node(topology: Topology, groups: Sequence[str]) -> list[RangeOnNode]:
    """Return all ranges of ``groups`` with their nodes. The ranges of a node are next to each
    other, and the nodes are in the order in which the topology lists them.
    """
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
    """The rectangle of one shard, or of several neighbouring shards.

    Coordinates are stored as text, because a template would write numbers with a decimal comma in
    some locales.
    """

    label: str
    url: str
    state: CellState
    #: The text in the cell: the mark of the state and, if there is room, the number of the shard or
    #: the numbers of the shards.
    text: str
    x: str
    y: str
    width: str
    height: str
    middle_x: str
    middle_y: str


@dataclass(frozen=True)
class Strip:
    """A range of shards on the map, with its cells."""

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
    """A node on the map, with the strips of the ranges whose primary databases are on the node."""

    name: str
    address: str
    error: str
    shards: int
    strips: tuple[Strip, ...]
    #: Links to the ranges that have a replica on this node. A link is a pair of text and URL.
    replicas: tuple[tuple[str, str], ...] = ()
    #: Links to the ranges for which this node is the passive server of a pair, as pairs of text and
    #: URL.
    passive: tuple[tuple[str, str], ...] = ()


@dataclass
class Legend:
    """The numbers next to the states in the legend of the shard map: how many shards are in each
    state.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[tuple[CellState, int]]:
        return ((state, self.counts[state.name]) for state in STATES)


@dataclass(frozen=True)
class Drawing:
    """All data that the template of the shard map needs.

    :param grouped: how many shards a cell of the map has at most.
    :param unsized: the number of shards whose size is not known; 0 if the map does not show sizes.
    """

    lanes: tuple[Lane, ...]
    legend: Legend
    grouped: int
    unsized: int


# ##### Sizes #####


class Measure:
    """The sizes of shards. The map draws them as the areas of cells, and shows them as texts.

    :param sizes: the known sizes, keyed by the alias of the shard.
    :param by: what the area of a cell shows: ``"bytes"``, ``"rows"``, or ``"same"`` for equal
        cells.
    """

    def __init__(self, sizes: Mapping[str, ShardSize], by: str) -> None:
        self._sizes = sizes
        self._by = by
        self.unknown = 0

    def of(self, shards: Iterable[Shard]) -> float:
        """Return the total size of ``shards``, in bytes or rows; an unknown size counts as 0.

        Always return 0 if the map shows cells of equal area.
        """
        if self._by == "same":
            return 0.0
        sizes = filter(None, (self._sizes.get(shard.alias) for shard in shards))
        return float(sum(size.bytes if self._by == "bytes" else size.rows or 0 for size in sizes))

    def text(self, shards: Iterable[Shard]) -> str:
        """Return the sum of the known sizes of ``shards``, such as ``12 MB, about 340 rows``.

        Return an empty text if none of the sizes is known.
        """
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
    """Return the map of ``ranges``.

    :param status: the states of all shards of ``ranges``.
    :param sizes: the known sizes of shards, keyed by the alias of the shard.
    :param by: what the area of a cell shows: ``"bytes"`` or ``"rows"``; or ``"same"`` for equal
        cells.
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
    replicas = _replicas(ranges, urls, of_pairs=False)
    passive = _replicas(ranges, urls, of_pairs=True)
    lanes = [
        Lane(
            name,
            address(topology.nodes.get(name, {})),
            without_accounts(errors.get(name, "")),
            sum(len(on_node) for on_node in ranges if on_node.node == name),
            tuple(strips.get(name, ())),
            tuple(replicas.get(name, ())),
            tuple(passive.get(name, ())),
        )
        for name in names
    ]
    return Drawing(tuple(lanes), legend, grouped, measure.unknown)


def _replicas(
    ranges: Sequence[RangeOnNode], urls: Addresses, *, of_pairs: bool
) -> dict[str, list[tuple[str, str]]]:
    """Return links to the ranges that have a replica.

    The result maps a node to the links of all ranges whose replica is on this node. A link is a
    pair: the name of the range, such as ``photos 0-7``, and the URL of its page.

    :param of_pairs: True for the ranges whose replica is the passive server of a pair; False for
        the ranges with ordinary replicas.
    """
    replicas: dict[str, list[tuple[str, str]]] = {}
    for on_node in ranges:
        name, shard_range = on_node.group.name, on_node.range
        if shard_range.replica is not None and shard_range.is_pair == of_pairs:
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
    # Leave a gap between neighbouring cells.
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
    """Return the text that a screen reader reads out for a cell of the map.

    The cell stands for one shard, or for several neighbouring shards if the map has many.

    :param shards: the shards of the cell.
    :param states: their states, in the same order.
    :param status: the status of the first shard, which tells how many migrations it lacks. None if
        the shard's node does not answer. Not used for a cell of several shards.
    """
    if len(shards) > 1:
        name, state = f"{shards[0].alias} to {shards[-1].alias}", _in_words(Counter(states))
    else:
        behind = f" by {status.behind} migrations" if status is not None and status.behind else ""
        name, state = shards[0].alias, states[0] + behind
    return f"{name}: {', '.join(filter(None, (state, measure.text(shards))))}"


def _in_words(counts: Mapping[str, int]) -> str:
    """Return as text how many shards are in each state, such as ``7 current, 1 behind``."""
    return ", ".join(f"{counts[name]:,} {name}" for name in RANK if counts.get(name))
