"""Drawing the map: nodes, their ranges, and in these a cell for each shard, or for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sharded_orm.admin.fleet import treemap
from sharded_orm.admin.fleet.pages import address
from sharded_orm.admin.fleet.shard_map import (
    BY_NAME,
    RANK,
    Addresses,
    Cell,
    Drawing,
    Lane,
    Legend,
    RangeOnNode,
    Strip,
    span,
)
from sharded_orm.admin.fleet.shard_sizes import Measure
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.status import FleetStatus, ShardStatus
from sharded_orm.topology.model import Topology

#: Cells of one page; with more shards a cell stands for several.
CELLS: Final = 600
#: Ranges of one page.
RANGES: Final = 60
# Units of the picture that a letter takes.
_LETTER = 7.2


def places(topology: Topology, groups: Sequence[str]) -> list[RangeOnNode]:
    """All ranges of ``groups``, by node, in the order of the topology."""
    order = {name: number for number, name in enumerate(topology.nodes)}
    found = [
        RangeOnNode(each.primary, topology.groups[name], each)
        for name in groups
        for each in topology.groups[name].ranges
    ]
    return sorted(found, key=lambda place: order[place.node])


def draw(
    topology: Topology,
    shown: Sequence[RangeOnNode],
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
    measure = Measure(sizes, by)
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
            without_accounts(errors.get(name, "")),
            sum(len(place) for place in shown if place.node == name),
            tuple(strips.get(name, ())),
            tuple(replicas.get(name, ())),
        )
        for name in names
    ]
    return Drawing(tuple(lanes), legend, grouped, measure.unknown)


def _replicas(
    topology: Topology, shown: Sequence[RangeOnNode], urls: Addresses
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


def _strip(
    place: RangeOnNode,
    states: Mapping[str, ShardStatus],
    measure: Measure,
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
        boxes, height = treemap.strips(weights, whole / largest)
    else:
        boxes, height = treemap.grid(len(spans))
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


def _cell(label: str, url: str, names: Sequence[str], number: str, box: treemap.Box) -> Cell:
    worst = BY_NAME[max(names, key=RANK.__getitem__)]
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
    measure: Measure,
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
    return ", ".join(f"{counts[name]:,} {name}" for name in RANK if counts.get(name))
