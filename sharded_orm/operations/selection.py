"""Select the shards for an operation by group, number and node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.operations.exceptions import InvalidSelection
from sharded_orm.topology.model import Shard, ShardGroup


@dataclass(frozen=True)
class Selected:
    """The selected shards of one group: at least one, sorted by number."""

    group: ShardGroup
    shards: Sequence[Shard]

    def __len__(self) -> int:
        return len(self.shards)


def select(
    group: str | None = None, numbers: Sequence[range] | None = None, node: str | None = None
) -> list[Selected]:
    """Return the shards on which a command has to work, as one :class:`Selected` per group.

    A shard is selected if it meets all conditions. The groups have the order of the settings. A
    group without a selected shard is left out.

    :param group: the name of a group; by default all groups. Required with ``numbers`` if there are
        several groups.
    :param numbers: ranges of shard numbers, which may overlap; by default all. Each shard must
        exist.
    :param node: the name of the node that holds the shards' primary; by default any.
    :raises InvalidSelection: a group, node or shard does not exist, or no shard meets all
        conditions.

    Sends no query.
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
    candidates = [groups[group]] if group is not None else list(groups.values())
    selection = [
        Selected(candidate, shards)
        for candidate in candidates
        if (shards := [s for s in _numbered(candidate, numbers) if node in (None, s.node)])
    ]
    if not selection:
        raise InvalidSelection(
            f"No shard is selected: node {node!r} is the primary of none of them."
        )
    return selection


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
    """Parse shard numbers such as ``0-511,700``, and return one range for each part.

    :raises ValueError: a part is neither a number nor a range; the message names the part.
    """
    ranges = []
    for part in text.split(","):
        # Match at most 18 digits, because no shard number has more. Without a limit, int() would
        # raise its own error for more than 4300 digits, and the message would not name the part.
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part, re.ASCII)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first:
            raise ValueError(f"{part!r} is not a number or a range such as 0-511")
        ranges.append(range(first, last + 1))
    return ranges


def numbers_text(shards: Sequence[Shard]) -> str:
    """Return the numbers of ``shards`` as a text such as ``0-511,700``; see :func:`parse_numbers`.

    :param shards: shards of one group, sorted by number.
    """
    return spans_text(shard.number for shard in shards)


def given_text(values: Iterable[object]) -> str:
    """Return the values that a caller gave as shard numbers, as a text for an error message.

    Wrong values, which are not integers, come last. For example, the text for the values 8, 10, 11,
    12, "1" and None is ``8,10-12,'1',None``.

    :param values: distinct objects of any type.
    """
    values = list(values)
    numbers = sorted(value for value in values if type(value) is int)
    others = sorted(repr(value) for value in values if type(value) is not int)
    return ",".join([spans_text(numbers), *others] if numbers else others)


def spans_text(numbers: Iterable[int]) -> str:
    """Return ``numbers`` as a text such as ``0-511,700``; see :func:`parse_numbers`.

    :param numbers: distinct numbers in ascending order.
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
