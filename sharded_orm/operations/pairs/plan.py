"""Plan which shards change their active side, and make the topology that a switch publishes.

This module sends no query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from sharded_orm import runtime
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard
from sharded_orm.topology.range_entries import entry_of, primary_of, replace_shard


@dataclass(frozen=True)
class SideChange:
    """A shard whose active side changes from the node ``source`` to the node ``target``."""

    group: str
    number: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"shard {self.number} of group {self.group!r}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)

    def on(self, node: str) -> Shard:
        """Return the shard as if the side ``node`` were active."""
        return replace(runtime.shard(self.group, self.number), node=node)

    def is_published(self, document: Document) -> bool:
        """Return whether the side ``target`` is active in ``document``."""
        entry = entry_of(document.content(), self.group, self.number)
        return entry is not None and primary_of(entry) == self.target

    def publish_in(self, document: Document) -> Document:
        """Return a copy of ``document`` in which the side ``target`` is active.

        :raises SwitchRefused: the document has the shard elsewhere than on this pair.
        """
        if self.is_published(document):
            return document
        content = document.content()
        entry = entry_of(content, self.group, self.number)
        if entry is None or set(entry.get("pair", ())) != {self.source, self.target}:
            raise SwitchRefused(
                [
                    f"the topology was changed meanwhile: {self} is no longer on the pair"
                    f" {[self.source, self.target]!r}"
                ]
            )
        replace_shard(content, self.group, self.number, {**entry, "active": self.target})
        return Document.from_content(content)


@dataclass(frozen=True)
class SwitchPlan:
    """The shards of one group whose active side is to change.

    :param changes: in the order of the shards' numbers.
    :param already: the numbers of the requested shards that are active on the wanted side already.
    """

    group: str
    changes: tuple[SideChange, ...]
    already: tuple[int, ...]


def find_plan(
    group: str,
    numbers: Sequence[int] | None,
    *,
    to_side: str | None = None,
    all_from: str | None = None,
) -> SwitchPlan:
    """Return which shards change their active side.

    :param numbers: numbers of the shards; None with ``all_from``.
    :param to_side: the node that is to be active. By default, each shard changes to its other side.
    :param all_from: the node of which all active shards of the group are taken.
    :raises SwitchRefused: the topology does not allow it. Every reason is listed.
    :raises UnknownShard: there is no such group.
    """
    topology, found = runtime.topology(), runtime.group(group)
    problems = [
        f"there is no node {name!r}; NODES has {sorted(topology.nodes)!r}"
        for name in (to_side, all_from)
        if name is not None and name not in topology.nodes
    ]
    if problems:
        raise SwitchRefused(problems)
    if numbers is None:
        numbers = [
            number
            for r in found.ranges
            if r.is_pair and r.primary == all_from
            for number in range(r.first, r.last + 1)
        ]
        if not numbers:
            raise SwitchRefused([f"{all_from!r} is the active side of no shard of group {group!r}"])
    problems = list(_problems(group, numbers, to_side))
    if problems:
        raise SwitchRefused(problems)
    changes, already = [], []
    for number in sorted(set(numbers)):
        r = found.range_of(number)
        if r.primary == to_side or (all_from is not None and r.primary != all_from):
            already.append(number)
        else:
            changes.append(SideChange(group, number, r.primary, str(r.replica)))
    return SwitchPlan(group, tuple(changes), tuple(already))


def _problems(group: str, numbers: Sequence[int], to_side: str | None) -> Iterator[str]:
    found = runtime.group(group)
    for number in sorted(set(numbers)):
        if number not in found:
            yield f"group {group!r} has no shard {number!r}: its shards are 0 to {found.count - 1}"
            continue
        r = found.range_of(number)
        if not r.is_pair:
            yield (
                f"shard {number} of group {group!r} is not on a pair, but on {r.primary!r}; RANGES needs"
                " 'pair' and 'active' for it"
            )
        elif to_side not in (None, r.primary, r.replica):
            yield (
                f"{to_side!r} is no side of shard {number} of group {group!r}; its pair is"
                f" {sorted((r.primary, str(r.replica)))!r}"
            )
