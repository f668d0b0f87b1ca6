"""Plan moves of shards, and make the topology that a move publishes. This module sends no query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard, Topology, server_of


@dataclass(frozen=True)
class ShardToMove:
    """A shard that is to be moved.

    :param source: the node on which the shard is.
    :param target: the node to which the shard moves.
    :param replica: the node of the shard's replica after the move; None if it has none.
    :param by_replication: whether the target has the rows already, because it is a replica of the
        whole source.
    """

    group: str
    number: int
    source: str
    target: str
    replica: str | None
    by_replication: bool = False

    def __str__(self) -> str:
        return f"shard {self.number} of group {self.group!r}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)

    def on(self, node: str) -> Shard:
        """Return the shard as if it were on the node ``node``, not on its present node."""
        return replace(runtime.shard(self.group, self.number), node=node)

    # ##### The topology document #####

    def is_published(self, document: Document) -> bool:
        """Return whether the topology in ``document`` places the shard on the target."""
        entry = self._entry(document.content())
        return entry is not None and entry["primary"] == self.target

    def publish_in(self, document: Document) -> Document:
        """Return a copy of ``document`` whose topology places the shard on the target node.

        All shards of a range are on one node. So the range that contains the shard is divided, and
        neighbouring ranges that are alike are joined.

        :raises MoveRefused: the document places the shard neither on the source node nor on the
            target.
        """
        if self.is_published(document):
            return document
        content = document.content()
        entry = self._entry(content)
        if entry is None or entry["primary"] != self.source:
            raise MoveRefused(
                [f"the topology was changed meanwhile: it no longer has {self} on {self.source!r}"]
            )
        ranges = []
        for each in content["groups"][self.group]["RANGES"]:
            ranges += list(self._divided(each)) if each is entry else [each]
        content["groups"][self.group]["RANGES"] = _joined(ranges)
        return Document.from_content(content)

    def _entry(self, content: dict[str, Any]) -> dict[str, Any] | None:
        for entry in content["groups"].get(self.group, {}).get("RANGES", ()):
            first, last = entry["range"]
            if first <= self.number <= last:
                found: dict[str, Any] = entry
                return found
        return None

    def _divided(self, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
        first, last = entry["range"]
        if first < self.number:
            yield {**entry, "range": [first, self.number - 1]}
        moved = {**entry, "range": [self.number, self.number], "primary": self.target}
        moved.pop("replica", None)
        yield moved if self.replica is None else {**moved, "replica": self.replica}
        if self.number < last:
            yield {**entry, "range": [self.number + 1, last]}


def _joined(ranges: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring ranges that differ only in the numbers of their shards."""
    joined: list[dict[str, Any]] = []
    for entry in sorted(ranges, key=lambda entry: entry["range"][0]):
        if joined and _without_shards(joined[-1]) == _without_shards(entry):
            joined[-1] = {**joined[-1], "range": [joined[-1]["range"][0], entry["range"][1]]}
        else:
            joined.append(entry)
    return joined


def _without_shards(entry: dict[str, Any]) -> dict[str, Any]:
    defaults = {"replica": None, "open": True, "weight": 1, "pinned": False}
    return {**defaults, **{key: value for key, value in entry.items() if key != "range"}}


@dataclass(frozen=True)
class ShardMovePlan:
    """The shards of a group that are to move to the node ``target``.

    :param shards: the shards to move, in the order of their numbers.
    :param already: the numbers of the requested shards that are on the server of ``target``
        already.
    """

    group: str
    target: str
    shards: tuple[ShardToMove, ...]
    already: tuple[int, ...]

    @property
    def by_replication(self) -> bool:
        return any(move.by_replication for move in self.shards)


def plan_shard_moves(
    group: str,
    numbers: Sequence[int],
    to: str,
    replica: str | None = None,
    *,
    by_replication: bool = False,
) -> ShardMovePlan:
    """Return the plan to move shards to the node ``to``.

    :param numbers: numbers of the shards.
    :param replica: the node that becomes the replica of the shards. None means the replica of the
        other ranges on ``to``, if all of them have the same replica.
    :param by_replication: whether ``to`` is a replica of the servers on which the shards are.
    :raises MoveRefused: the topology does not allow these moves. Every reason is listed.
    :raises UnknownShard: there is no such group.
    """
    topology = runtime.topology()
    found = runtime.group(group)
    problems = list(_problems(topology, group, numbers, to, replica))
    if problems:
        raise MoveRefused(problems)
    if replica is None:
        replica = _replica_of(topology, to)
    moves, already = [], []
    for number in sorted(set(numbers)):
        source = found.shard(number).node
        if _same_server(topology, source, to):
            already.append(number)
        else:
            moves.append(ShardToMove(group, number, source, to, replica, by_replication))
    return ShardMovePlan(group, to, tuple(moves), tuple(already))


def _problems(
    topology: Topology, group: str, numbers: Sequence[int], to: str, replica: str | None
) -> Iterator[str]:
    found = topology.groups[group]
    for number in numbers:
        if number not in found:
            yield f"group {group!r} has no shard {number!r}: its shards are 0 to {found.count - 1}"
    for name in {to, replica or to}:
        if name not in topology.nodes:
            yield f"there is no node {name!r}; NODES has {sorted(topology.nodes)!r}"
            return
    if replica is not None and _same_server(topology, to, replica):
        yield f"{replica!r} is the same server as {to!r}, so it cannot be the replica"
    engines = {topology.nodes[name]["ENGINE"] for name in (to, found.ranges[0].primary)}
    if len(engines) > 1:
        yield (
            f"the nodes of group {group!r} and {to!r} have different engines {sorted(engines)!r}:"
            " shards move between servers of the same kind only"
        )


def _replica_of(topology: Topology, node: str) -> str | None:
    replicas = {
        shard_range.replica
        for group in topology.groups.values()
        for shard_range in group.ranges
        if shard_range.primary == node
    }
    return replicas.pop() if len(replicas) == 1 else None


def _same_server(topology: Topology, name: str, other: str) -> bool:
    nodes = topology.nodes
    return server_of(nodes[name], name) == server_of(nodes[other], other)
