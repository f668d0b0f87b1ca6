"""Plan which shards change their active side, and make the topology with these changes.

This module sends no query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.selection import given_text
from sharded_orm.operations.shard_change import ShardChange
from sharded_orm.topology.document import Document
from sharded_orm.topology.range_entries import entry_of, replace_shard


@dataclass(frozen=True)
class SideChange(ShardChange):
    """A shard whose active side changes from the node ``source`` to the node ``target``.

    :param epoch: the shard's new epoch, a number. A new epoch begins if ``source`` is given up
        because its server is down. None for other changes, which keep the epoch.
    """

    epoch: int | None = None

    def is_published(self, document: Document) -> bool:
        entry = entry_of(document.content(), self.group, self.number)
        is_of_epoch = self.epoch is None or (
            entry is not None and entry.get("epoch", 0) == self.epoch
        )
        return is_of_epoch and super().is_published(document)

    def publish_in(self, document: Document) -> Document:
        """Return a copy of the topology's ``document`` in which the shard is active on ``target``.

        :raises SwitchRefused: in ``document``, the shard is not on this pair any more.
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
        epoch = {} if self.epoch is None else {"epoch": self.epoch}
        replace_shard(content, self.group, self.number, {**entry, "active": self.target, **epoch})
        return Document.from_content(content)


@dataclass(frozen=True)
class SwitchPlan:
    """The shards of one group that change their active side.

    :param changes: sorted by the shards' numbers.
    :param already: the numbers of requested shards that need no change, because they are active on
        the wanted side.
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
    force: bool = False,
) -> SwitchPlan:
    """Return which shards must change their active side.

    :param numbers: the numbers of the shards; None if ``all_from`` is given.
    :param to_side: the node that becomes active. By default, the passive side of each shard does.
    :param all_from: the name of a node, to change all shards of the group that are active on this
        node. If ``to_side`` is given as well, only shards whose passive side is ``to_side`` change.
    :param force: whether the active side is given up, because its server is down.
    :raises SwitchRefused: the topology does not allow this. Every reason is listed.
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
        # Also take shards for which the node ``all_from`` is the passive side: they need no change.
        # If there are only such shards, the plan is empty and no error is raised. This happens if
        # an earlier command was killed after its last shard, and is repeated.
        numbers = [
            number
            for r in found.ranges
            if r.is_pair and {all_from, to_side or all_from} <= {r.primary, r.replica}
            for number in range(r.first, r.last + 1)
        ]
        if not numbers:
            other = "" if to_side is None else f" whose other side is {to_side!r}"
            raise SwitchRefused([f"{all_from!r} is a side of no shard of group {group!r}{other}"])
    problems = list(_problems(group, numbers, to_side))
    if problems:
        raise SwitchRefused(problems)
    changes, already = [], []
    for number in sorted(set(numbers)):
        r = found.range_of(number)
        if r.primary == to_side or (all_from is not None and r.primary != all_from):
            already.append(number)
        else:
            epoch = r.epoch + 1 if force else None
            changes.append(SideChange(group, number, r.primary, str(r.replica), epoch))
    return SwitchPlan(group, tuple(changes), tuple(already))


def _problems(group: str, numbers: Sequence[int], to_side: str | None) -> Iterator[str]:
    found = runtime.group(group)
    if unknown := {number for number in numbers if number not in found}:
        yield (
            f"group {group!r} has no shard {given_text(unknown)}: its shards are 0 to {found.count - 1}"
        )
    for number in sorted(set(numbers) - unknown):
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
