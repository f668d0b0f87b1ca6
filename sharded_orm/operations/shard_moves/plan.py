"""Plan moves of shards to another node. This module sends no query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations.selection import given_text
from sharded_orm.operations.shard_change import ShardChange
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology, server_of
from sharded_orm.topology.range_entries import entry_of, primary_of, replace_shard


@dataclass(frozen=True)
class ShardToMove(ShardChange):
    """The planned move of a shard from the node ``source`` to the node ``target``.

    :param replica: the node that is the shard's replica after the move; None if there is none.
    :param by_replication: whether the target has the rows already, because its server is a replica
        of the whole server of the source. Otherwise the rows are copied.
    """

    replica: str | None
    by_replication: bool = False

    def publish_in(self, document: Document) -> Document:
        """Return a copy of the topology document in which the shard is on the target node.

        :raises MoveRefused: somebody has changed the topology: in ``document``, the shard is
            neither on the source node nor on the target, or it is on a pair of servers.
        """
        if self.is_published(document):
            return document
        content = document.content()
        entry = entry_of(content, self.group, self.number)
        if entry is None or "pair" in entry or primary_of(entry) != self.source:
            raise MoveRefused(
                [f"the topology was changed meanwhile: it no longer has {self} on {self.source!r}"]
            )
        moved = {**entry, "primary": self.target}
        moved.pop("replica", None)
        if self.replica is not None:
            moved["replica"] = self.replica
        replace_shard(content, self.group, self.number, moved)
        return Document.from_content(content)


@dataclass(frozen=True)
class ShardMovePlan:
    """The shards of a group that are to move to the node ``target``.

    :param shards: one move for each shard, in the order of their numbers.
    :param already: the numbers of requested shards that need not move, because they are on the
        server of ``target`` already.
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

    :param numbers: the numbers of the shards.
    :param replica: the node that becomes the replica of the shards. With None, it is the replica
        that the other ranges on ``to`` have, if all of them have the same one.
    :param by_replication: whether ``to`` is a replica of the server on which the shards are, so
        that their rows need not be copied.
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
    if unknown := {number for number in numbers if number not in found}:
        yield (
            f"group {group!r} has no shard {given_text(unknown)}: its shards are 0 to {found.count - 1}"
        )
    for name in {to, replica or to}:
        if name not in topology.nodes:
            yield f"there is no node {name!r}; NODES has {sorted(topology.nodes)!r}"
            return
    if replica is not None and _same_server(topology, to, replica):
        yield f"{replica!r} is the same server as {to!r}, so it cannot be the replica"
    for number in sorted(set(numbers) - unknown):
        if found.range_of(number).is_pair:
            yield (
                f"shard {number} of group {group!r} is on a pair of servers, from which shards cannot be"
                " moved; 'manage.py shards switch' changes the side that is active"
            )
    if pair := topology.pair_of(to):
        yield f"{to!r} is a side of the pair {pair!r}, to which shards cannot be moved"
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
