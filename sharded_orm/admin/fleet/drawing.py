"""What the map shows: nodes, their ranges, and in these a cell for each shard, or for several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from django.template.defaultfilters import filesizeformat

from sharded_orm.admin.fleet import picture
from sharded_orm.admin.fleet.pages import address, without_account
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.operations.shards.status import FleetStatus, ShardStatus
from sharded_orm.topology.model import Shard, ShardGroup, ShardRange, Topology

#: Cells of one page; with more shards a cell stands for several.
CELLS: Final = 600
#: Ranges of one page.
RANGES: Final = 60


@dataclass(frozen=True)
class State:
    """How a shard can be. The mark says so without colour."""

    name: str
    mark: str
    meaning: str


#: From the best to the worst; a cell of several shards has the worst of theirs.
STATES: Final = (
    State("current", "", "current: it has all migrations"),
    State("behind", "↑", "behind: it lacks migrations"),
    State("missing", "∅", "missing: its schema or file does not exist"),
    State("error", "!", "wrong: it exists and cannot be read"),
    State("down", "✕", "down: its node does not answer"),
)
_RANK = {state.name: rank for rank, state in enumerate(STATES)}
_BY_NAME = {state.name: state for state in STATES}

# Units of the picture that a letter takes.
_LETTER = 7.2


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
class Place:
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
    state: State
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

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RANK, 0))

    def add(self, states: Iterable[str]) -> None:
        for state in states:
            self.counts[state] += 1

    def __iter__(self) -> Iterator[tuple[State, int]]:
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


def places(topology: Topology, groups: Sequence[str]) -> list[Place]:
    """All ranges of ``groups``, by node, in the order of the topology."""
    order = {name: number for number, name in enumerate(topology.nodes)}
    found = [
        Place(each.primary, topology.groups[name], each)
        for name in groups
        for each in topology.groups[name].ranges
    ]
    return sorted(found, key=lambda place: order[place.node])


def draw(
    topology: Topology,
    shown: Sequence[Place],
    found: FleetStatus,
    sizes: Mapping[str, ShardSize],
    by: str,
    urls: Addresses,
) -> Drawing:
    """The map of ``shown``.

    :param found: the states of all their shards.
    :param by: ``"bytes"``, ``"rows"`` or ``"same"``: what makes a cell large.
    """
    states = {one.shard.alias: one for one in found.shards}
    errors = {node.name: node.error for node in found.nodes if node.error is not None}
    measure = _Measure(sizes, by)
    legend = Legend()
    grouped = 1
    while sum(-(-len(place) // grouped) for place in shown) > max(CELLS, len(shown)):
        grouped *= 2
    largest = max((measure.of_place(place) for place in shown), default=0.0)
    strips: dict[str, list[Strip]] = {}
    for place in shown:
        strip = _strip(place, states, measure, largest, grouped, legend, urls)
        strips.setdefault(place.node, []).append(strip)
    names = [node.name for node in found.nodes]
    replicas = _replicas(topology, shown, urls)
    lanes = [
        Lane(
            name,
            address(topology.nodes.get(name, {})),
            without_account(errors.get(name, "")),
            sum(len(place) for place in shown if place.node == name),
            tuple(strips.get(name, ())),
            tuple(replicas.get(name, ())),
        )
        for name in names
    ]
    return Drawing(tuple(lanes), legend, grouped, measure.unknown)


def _replicas(
    topology: Topology, shown: Sequence[Place], urls: Addresses
) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for place in shown:
        name, each = place.group.name, place.range
        if each.replica is not None:
            text = f"{name} {span(each.first, each.last)}"
            found.setdefault(each.replica, []).append(
                (text, urls.of_range(name, each.first, each.last))
            )
    return found


class _Measure:
    """How large shards are drawn, and said to be."""

    def __init__(self, sizes: Mapping[str, ShardSize], by: str) -> None:
        self._sizes = sizes
        self._by = by
        self.unknown = 0

    def of(self, alias: str) -> float:
        size = self._sizes.get(alias)
        if self._by == "same" or size is None:
            return 0.0
        return float(size.bytes if self._by == "bytes" else size.rows or 0)

    def of_place(self, place: Place) -> float:
        return sum(
            self.of(place.group.shard(number).alias)
            for number in range(place.range.first, place.range.last + 1)
        )

    def text(self, aliases: Sequence[str]) -> str:
        """``12 MB, about 340 rows``; "" if nothing is known."""
        known = [self._sizes[alias] for alias in aliases if alias in self._sizes]
        if not known:
            return ""
        rows = [size.rows for size in known if size.rows is not None]
        told = filesizeformat(sum(size.bytes for size in known)).replace("\xa0", " ")
        return told + (f", about {sum(rows):,} rows" if rows else "")

    def count_unknown(self, aliases: Iterable[str]) -> None:
        if self._by != "same":
            rows = self._by == "rows"
            for alias in aliases:
                size = self._sizes.get(alias)
                self.unknown += size is None or (rows and size.rows is None)


def _strip(
    place: Place,
    states: Mapping[str, ShardStatus],
    measure: _Measure,
    largest: float,
    grouped: int,
    legend: Legend,
    urls: Addresses,
) -> Strip:
    group, each = place.group, place.range
    spans = [
        (first, min(first + grouped - 1, each.last))
        for first in range(each.first, each.last + 1, grouped)
    ]
    whole = measure.of_place(place)
    if whole:
        weights = [
            sum(measure.of(group.shard(number).alias) for number in range(first, last + 1))
            for first, last in spans
        ]
        boxes, height = picture.strips(weights, whole / largest)
    else:
        boxes, height = picture.grid(len(spans))
    cells, counts = [], Legend()
    for (first, last), box in zip(spans, boxes, strict=True):
        shards = [group.shard(number) for number in range(first, last + 1)]
        aliases = [shard.alias for shard in shards]
        told = [states.get(alias) for alias in aliases]
        names = ["down" if one is None else one.state for one in told]
        counts.add(names)
        label = _label(aliases, names, told, measure)
        cells.append(_cell(label, urls.of(shards), names, span(first, last), box))
        measure.count_unknown(aliases)
    for name, count in counts.counts.items():
        legend.counts[name] += count
    aliases = [group.shard(number).alias for number in range(each.first, each.last + 1)]
    return Strip(
        group.name,
        each,
        urls.of_range(group.name, each.first, each.last),
        _counted(counts.counts),
        measure.text(aliases),
        f"{height:.1f}",
        tuple(cells),
    )


def _cell(label: str, url: str, names: Sequence[str], number: str, box: picture.Box) -> Cell:
    worst = _BY_NAME[max(names, key=_RANK.__getitem__)]
    # A gap between neighbours.
    x, y, width, height = box.x + 1, box.y + 1, box.width - 2, box.height - 2
    middle = (x + width / 2, y + height / 2)
    text = f"{worst.mark} {number}".strip()
    if width < _LETTER * len(text) + 4 or height < 2 * _LETTER:
        text = worst.mark
    coordinates = (f"{value:.1f}" for value in (x, y, width, height, *middle))
    return Cell(label, url, worst, text, *coordinates)


def _label(
    aliases: Sequence[str],
    names: Sequence[str],
    told: Sequence[ShardStatus | None],
    measure: _Measure,
) -> str:
    size = measure.text(aliases)
    if len(aliases) > 1:
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        parts = [f"{aliases[0]} to {aliases[-1]}", _counted(counts), size]
    else:
        one = told[0]
        behind = f" by {one.behind} migrations" if one is not None and one.behind else ""
        parts = [aliases[0], names[0] + behind, size]
    return ": ".join(filter(None, (parts[0], ", ".join(filter(None, parts[1:])))))


def _counted(counts: Mapping[str, int]) -> str:
    """``7 current, 1 behind``."""
    return ", ".join(f"{counts[name]:,} {name}" for name in _RANK if counts.get(name))
