"""The plan of a promotion: which ranges of shards move from which node to which.

Making the plan reads only the topology, and queries no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from django.db.utils import load_backend

from sharded_orm.backends.features import features_of
from sharded_orm.backends.replication import ReplicationServer, can_be_promoted, server_class
from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.topology.model import ShardRange, Topology, instance_of

#: The phases of a promotion after its new topology document was published. From then on, the
#: promotion can only be finished, not undone.
PUBLISHED: Final = ("promoting", "switched")


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

    One server can have several node names in the topology. For example, nodes ``db1`` and ``db1b``
    may have the same address. So two ranges on the same server may name it differently.

    :param node: the node name of the old primary that the operator gave.
    :param new: the node name by which the first range in ``moves`` names the new primary.
    :param moves: the ranges that move, each with the node names that the topology uses for it.
    :param engine: the ``ENGINE`` of all these nodes.
    """

    node: str
    new: str
    moves: tuple[Move, ...]
    engine: str

    @property
    def server_class(self) -> type[ReplicationServer]:
        """The subclass of :class:`ReplicationServer` that represents the old and the new
        primary.
        """
        return server_class({"ENGINE": self.engine})

    @property
    def old_names(self) -> list[str]:
        """All node names of the old primary: ``node``, and the names in ``moves``."""
        return sorted({move.old for move in self.moves} | {self.node})

    @property
    def new_names(self) -> list[str]:
        return sorted({move.new for move in self.moves})

    def to_json(self) -> dict[str, Any]:
        moves = [asdict(move) for move in self.moves]
        return {"node": self.node, "new": self.new, "moves": moves, "engine": self.engine}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PromotionPlan:
        moves = tuple(Move(**move) for move in data["moves"])
        return cls(data["node"], data["new"], moves, data["engine"])


def find_plan(topology: Topology, node: str, to: str | None = None) -> PromotionPlan:
    """Return the plan to replace node ``node`` as the primary of all its ranges of shards.

    The plan has the ranges of all groups, and on PostgreSQL of all databases, because a promotion
    always affects a whole server: a single range of a server can neither refuse writes nor become
    primary.

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
        f"range {(r.first, r.last)!r} of group {group!r} names no replica, and it would be fenced"
        " with the others: give it one"
        for group, r in ranges
        if r.replica is None
    ]
    problems += _sides_of_pairs(topology, [node, *(r.replica for _, r in ranges if r.replica)])
    if problems:
        raise PromotionRefused(problems)
    moves = tuple(Move(group, r.first, r.last, r.primary, str(r.replica)) for group, r in ranges)
    new = moves[0].new
    problems += _wrong_databases(topology, node, moves)
    if len({instance_of(topology.nodes[move.new], move.new) for move in moves}) > 1:
        replicas = ", ".join(f"{move}: {move.new!r}" for move in moves)
        problems.append(
            f"the ranges on {node!r} name different replicas ({replicas}); all move at once, so they"
            " need the same one"
        )
    elif to is not None and not _same(topology, to, new):
        problems.append(f"the ranges on {node!r} name {new!r} as their replica, not {to!r}")
    if problems:
        raise PromotionRefused(problems)
    return PromotionPlan(node, new, moves, topology.nodes[node]["ENGINE"])


def databases_of(topology: Topology, names: Iterable[str]) -> list[str]:
    """Return the names of the databases in which nodes keep their shards as schemas (PostgreSQL).

    Return an empty list on MariaDB, where each shard is a database of its own.

    :param names: the names of the nodes.
    """
    nodes = [topology.nodes[name] for name in names if name in topology.nodes]
    return sorted({str(node.get("NAME") or "") for node in nodes if _shares_database(node)})


def _shares_database(node: Mapping[str, Any]) -> bool:
    return features_of(load_backend(node["ENGINE"]).DatabaseWrapper).shards_share_database


def _wrong_engine(topology: Topology, node: str) -> Iterator[str]:
    if not can_be_promoted(topology.nodes[node]):
        yield (
            f"node {node!r} has the engine {topology.nodes[node]['ENGINE']!r}; only MariaDB and"
            " PostgreSQL have the replication that a promotion needs"
        )


def _wrong_databases(topology: Topology, node: str, moves: Sequence[Move]) -> Iterator[str]:
    pairs = {(move.old, move.new) for move in moves}
    for name in sorted({node, *(name for pair in pairs for name in pair)}):
        if "" in databases_of(topology, [name]):
            yield f"node {name!r} names no database: give it NAME, because databases are closed by name"
    for old, new in sorted(pairs):
        if databases_of(topology, [old]) != databases_of(topology, [new]):
            yield (
                f"the replica of {old!r} has its shards in the same database, and node {new!r} has the"
                f" NAME {topology.nodes[new].get('NAME')!r} instead of {topology.nodes[old].get('NAME')!r}"
            )


def _sides_of_pairs(topology: Topology, names: Iterable[str]) -> Iterator[str]:
    for name in sorted(set(names)):
        if name in topology.nodes and (pair := topology.pair_of(name)):
            yield (
                f"{name!r} is a side of the pair {pair!r}, and a promotion would end its replication; 'manage.py"
                " shards switch' changes the side that is active"
            )


def _ranges_on(topology: Topology, node: str) -> Iterator[tuple[str, ShardRange]]:
    for group in topology.groups.values():
        for shard_range in group.ranges:
            if _same(topology, shard_range.primary, node):
                yield group.name, shard_range


def _same(topology: Topology, name: str, other: str) -> bool:
    nodes = topology.nodes
    return instance_of(nodes[name], name) == instance_of(nodes[other], other)
