"""The plan of a promotion: which ranges of shards move from which node to which.

Making the plan needs the topology and asks no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from django.db.utils import load_backend

from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import PromotionRefused
from sharded_orm.topology.model import ShardRange, Topology, server_of


@dataclass(frozen=True)
class Move:
    """A range of shards whose primary changes from node ``old`` to node ``new``.

    :param first: the number of the range's first shard; ``last`` is the number of its last shard.
    """

    group: str
    first: int
    last: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.group} {self.first}-{self.last}"


@dataclass(frozen=True)
class PromotionPlan:
    """The plan of a promotion: which ranges of shards move to the new primary.

    A server may have several node names in the topology, so different ranges may name the same two
    servers differently.

    :param node: the node name of the old primary that the operator gave.
    :param new: one of the node names of the new primary.
    :param moves: the ranges that move. Each has the two node names that the topology uses for it.
    """

    node: str
    new: str
    moves: tuple[Move, ...]

    @property
    def old_names(self) -> list[str]:
        """All node names of the old primary: ``node``, and those in ``moves``."""
        return sorted({move.old for move in self.moves} | {self.node})

    @property
    def new_names(self) -> list[str]:
        return sorted({move.new for move in self.moves})

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "new": self.new, "moves": [asdict(move) for move in self.moves]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromotionPlan:
        return cls(data["node"], data["new"], tuple(Move(**move) for move in data["moves"]))


def find_plan(topology: Topology, node: str, to: str | None = None) -> PromotionPlan:
    """Return the plan that replaces ``node`` as the primary of all its ranges of shards.

    The ranges may belong to several groups. A single range cannot be promoted, because
    ``read_only`` makes the whole server read-only.

    :param to: the node that must be the replica of all these ranges; None accepts any node.
    :raises PromotionRefused: the topology does not allow the promotion. The message lists all
        reasons.
    """
    unknown = [name for name in (node, to) if name is not None and name not in topology.nodes]
    if unknown:
        raise PromotionRefused(
            f"there is no node {name!r}; NODES has {sorted(topology.nodes)!r}" for name in unknown
        )
    problems = list(_wrong_engine(topology, node))
    ranges = list(_ranges_on(topology, node))
    if not ranges:
        primaries = sorted({r.primary for g in topology.groups.values() for r in g.ranges})
        problems.append(
            f"{node!r} is the primary of no range. Name the primary whose ranges are to move to"
            f" their replica; primaries are {primaries!r}"
        )
    problems += [
        f"range {(r.first, r.last)!r} of group {group!r} names no replica, and read_only would"
        " fence it with the others: give it one"
        for group, r in ranges
        if r.replica is None
    ]
    if problems:
        raise PromotionRefused(problems)
    moves = tuple(Move(group, r.first, r.last, r.primary, str(r.replica)) for group, r in ranges)
    new = moves[0].new
    if len({server_of(topology.nodes[move.new], move.new) for move in moves}) > 1:
        replicas = ", ".join(f"{move}: {move.new!r}" for move in moves)
        problems.append(
            f"the ranges on {node!r} name different replicas ({replicas}); all move at once, so they"
            " need the same one"
        )
    elif to is not None and not _same(topology, to, new):
        problems.append(f"the ranges on {node!r} name {new!r} as their replica, not {to!r}")
    if problems:
        raise PromotionRefused(problems)
    return PromotionPlan(node, new, moves)


def supports_promotion(settings: Mapping[str, Any]) -> bool:
    """Whether servers of the backend in ``settings`` can be promoted.

    :param settings: an entry of ``DATABASES`` or ``NODES``.
    """
    return features_of(load_backend(settings["ENGINE"]).DatabaseWrapper).supports_promotion


def _wrong_engine(topology: Topology, node: str) -> Iterator[str]:
    if not supports_promotion(topology.nodes[node]):
        yield (
            f"node {node!r} has the engine {topology.nodes[node]['ENGINE']!r}; only MariaDB has the"
            " replication that a promotion needs"
        )


def _ranges_on(topology: Topology, node: str) -> Iterator[tuple[str, ShardRange]]:
    for group in topology.groups.values():
        for shard_range in group.ranges:
            if _same(topology, shard_range.primary, node):
                yield group.name, shard_range


def _same(topology: Topology, name: str, other: str) -> bool:
    nodes = topology.nodes
    return server_of(nodes[name], name) == server_of(nodes[other], other)
