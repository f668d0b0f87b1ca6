"""Which shards an operation is about: by group, by number, by node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidSelection
from sharded_orm.topology.model import Shard, ShardGroup


@dataclass(frozen=True)
class Selected:
    """Shards of one group, by number; never none."""

    group: ShardGroup
    shards: Sequence[Shard]

    def __len__(self) -> int:
        return len(self.shards)


def select(
    group: str | None = None, numbers: Sequence[range] | None = None, node: str | None = None
) -> list[Selected]:
    """The shards that meet all that is given, one entry per group, in the order of the settings.

    :param group: the name of one group; may be left out with ``numbers`` if there is only one.
    :param numbers: of shards; each must exist. May overlap.
    :param node: the node of their primary.
    :raises InvalidSelection: something does not exist, or no shard is left.

    Memory: a list of the shards, whose records the topology keeps anyway.
    """
    topology = runtime.topology()
    groups = topology.groups
    if not groups:
        raise InvalidSelection("There are no shards: SHARDED_ORM['GROUPS'] is empty.")
    if group is not None and group not in groups:
        raise InvalidSelection(f"There is no group {group!r}; choose from {sorted(groups)!r}.")
    if node is not None and node not in topology.nodes:
        raise InvalidSelection(
            f"There is no node {node!r}; choose from {sorted(topology.nodes)!r}."
        )
    if numbers is not None and group is None and len(groups) > 1:
        raise InvalidSelection(
            f"--shards needs --group: numbers are counted per group. Choose from {sorted(groups)!r}."
        )
    chosen = [groups[group]] if group is not None else list(groups.values())
    found = [
        Selected(each, shards)
        for each in chosen
        if (shards := [s for s in _numbered(each, numbers) if node in (None, s.node)])
    ]
    if not found:
        raise InvalidSelection(
            f"No shard is selected: node {node!r} is the primary of none of them."
        )
    return found


def _numbered(group: ShardGroup, numbers: Sequence[range] | None) -> Iterator[Shard]:
    if numbers is None:
        yield from group.shards()
        return
    beyond = max(part.stop for part in numbers) - 1
    if beyond >= group.count:
        raise InvalidSelection(
            f"Group {group.name!r} has no shard {beyond!r}: its shards are 0 to {group.count - 1}."
        )
    done = 0
    for part in sorted(numbers, key=lambda part: part.start):
        for number in range(max(part.start, done), part.stop):
            yield group.shard(number)
        done = max(done, part.stop)


def parse_numbers(text: str) -> list[range]:
    """``0-511,700`` as ranges.

    :raises ValueError: it is none; names the part.
    """
    ranges = []
    for part in text.split(","):
        # No more digits than any number of a shard has, or will have: int() has its limits.
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part, re.ASCII)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first:
            raise ValueError(f"{part!r} is not a number or a range such as 0-511")
        ranges.append(range(first, last + 1))
    return ranges


def numbers_text(shards: Sequence[Shard]) -> str:
    """What :func:`parse_numbers` reads, for shards sorted by number: ``0-511,700``."""
    parts: list[list[int]] = []
    for shard in shards:
        if parts and shard.number == parts[-1][1] + 1:
            parts[-1][1] = shard.number
        else:
            parts.append([shard.number, shard.number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
