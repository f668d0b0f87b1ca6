"""A snapshot that says which shards are on which nodes, and the balancing problem made from it.

The problem has the size of each shard, and the nodes to which it may move. This module sends no
queries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from sharded_orm.operations.balancing.problem import BalanceProblem, Bin, Item
from sharded_orm.operations.exceptions import BalanceRefused
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology, server_of
from sharded_orm.topology.schema_names import SchemaNames, shared_number


@dataclass(frozen=True)
class FleetSnapshot:
    """The shards of all groups at one moment, with their sizes.

    :param topology: the topology, with the capacities of nodes and the pinned shards, which must
        not move.
    :param sizes: maps the alias of each shard to its size: the bytes, rows, keys or load of the
        shard, whichever is to be balanced. A shard that is missing counts as 0.
    :param recent: aliases of shards that have moved a short time ago, so they must not move again.
    """

    topology: Topology
    sizes: Mapping[str, float]
    recent: frozenset[str] = field(default_factory=frozenset)


def balance_problem(
    snapshot: FleetSnapshot, groups: Collection[str], *, threshold: float, goal: float
) -> BalanceProblem:
    """Return the problem of balancing the shards of ``groups``.

    The items of the problem are shards, and its bins are nodes.

    The bins are the nodes that are the primary of a range, and all nodes that have a ``CAPACITY``.
    A shard may move to a primary of its own group, and to any node with a ``CAPACITY`` above 0. A
    shard must stay if its range is pinned or on a pair of servers, if it has moved a short time
    ago, or if it belongs to another group than ``groups``. The sizes of shards that stay count,
    too. A pure function.

    :param threshold: as in :class:`BalanceProblem`.
    :param goal: as in :class:`BalanceProblem`.
    :raises BalanceRefused: the topology does not say which server has which shards.
    """
    topology = snapshot.topology
    problems = [*_server_problems(topology), *_schema_problems(topology, groups)]
    if problems:
        raise BalanceRefused(problems)
    replication = _replication(topology)
    items = []
    names: set[str] = set()
    for group in topology.groups.values():
        targets = _targets(topology, group)
        names |= {part.primary for part in group.ranges}
        for part in group.ranges:
            # A server and its replica contain the same schemas. So a shard cannot move from a
            # server to the replica of that server, or the other way round.
            allowed = targets - replication.get(part.primary, frozenset()) - {part.replica}
            if group.name not in groups or part.pinned or part.is_pair:
                allowed = frozenset()
            for number in range(part.first, part.last + 1):
                alias = group.shard(number).alias
                stays = alias in snapshot.recent
                size = snapshot.sizes.get(alias, 0)
                items.append(Item(alias, part.primary, size, frozenset() if stays else allowed))
    names |= {name for name, node in topology.nodes.items() if "CAPACITY" in node}
    bins = tuple(Bin(name, capacity_of(topology, name)) for name in sorted(names))
    return BalanceProblem(bins, tuple(items), threshold, goal)


def capacity_of(topology: Topology, node: str) -> float:
    return float(topology.nodes[node].get("CAPACITY", 1.0))


def _targets(topology: Topology, group: ShardGroup) -> frozenset[str]:
    engine = topology.nodes[group.ranges[0].primary].get("ENGINE")
    primaries = {part.primary for part in group.ranges}
    return frozenset(
        name
        for name, node in topology.nodes.items()
        if (name in primaries or "CAPACITY" in node)
        and capacity_of(topology, name) > 0
        and node.get("ENGINE") == engine
        # Shards cannot be moved to or from a pair of servers.
        and not topology.pair_of(name)
    )


def _replication(topology: Topology) -> dict[str, frozenset[str]]:
    """Map the name of each node to the nodes to which it replicates, or which replicate to it.

    For example, ``{"db1": {"db2"}, "db2": {"db1"}}``, if ``db2`` is the replica of ``db1``. If
    several node names stand for one server, all these names are included.
    """
    servers: dict[object, set[str]] = {}
    for name, node in topology.nodes.items():
        servers.setdefault(server_of(node, name), set()).add(name)
    related: dict[str, set[str]] = {}
    for part in _ranges(topology):
        if part.replica is None:
            continue
        ends = [servers[server_of(topology.nodes[n], n)] for n in (part.primary, part.replica)]
        for one, other in (ends, ends[::-1]):
            for name in one:
                related.setdefault(name, set()).update(other)
    return {name: frozenset(names) for name, names in related.items()}


def _ranges(topology: Topology) -> Iterator[ShardRange]:
    return (part for group in topology.groups.values() for part in group.ranges)


def _server_problems(topology: Topology) -> Iterator[str]:
    nodes_by_server: dict[object, set[str]] = {}
    for part in _ranges(topology):
        server = server_of(topology.nodes[part.primary], part.primary)
        nodes_by_server.setdefault(server, set()).add(part.primary)
    for name, node in topology.nodes.items():
        if "CAPACITY" in node:
            nodes_by_server.setdefault(server_of(node, name), set()).add(name)
    for names in nodes_by_server.values():
        if len(names) > 1:
            yield (
                f"the nodes {sorted(names)!r} are one server, so moves between them would free nothing:"
                " use one name in all RANGES, and give only that node a CAPACITY"
            )


def _schema_problems(topology: Topology, groups: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each pair of groups that have schemas of the same name.

    A server can have only one schema of a name. So a plan must not bring shards of two such groups
    to one server.
    """
    for one, other in combinations(topology.groups.values(), 2):
        if one.name not in groups and other.name not in groups:
            continue
        names = [SchemaNames.of(group.database_name, group.name) for group in (one, other)]
        spans = [[(0, group.count - 1)] for group in (one, other)]
        if shared_number(names[0], spans[0], names[1], spans[1]) is not None:
            yield (
                f"the groups {one.name!r} and {other.name!r} give their schemas the same names, so their"
                " shards must not meet on a server: move such shards by 'manage.py shards move'"
            )
