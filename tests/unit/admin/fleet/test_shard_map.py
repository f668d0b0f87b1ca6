"""What the map of shards says of pairs of servers."""

from __future__ import annotations

from sharded_orm.admin.fleet.shard_map import Addresses, draw, ranges_by_node
from sharded_orm.operations.shards.fleet_status import FleetStatus, NodeStatus
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology


def test_a_node_shows_of_what_it_is_the_replica_or_the_passive_side() -> None:
    nodes = {name: {"ENGINE": "sharded_orm.backends.mysql", "HOST": name} for name in "ab"}
    ranges = (
        ShardRange(0, 1, "a", "b", is_pair=True),
        ShardRange(2, 3, "b", "a", is_pair=True),
        ShardRange(4, 4, "a", "b"),
    )
    topology = Topology(nodes, {"photos": ShardGroup("photos", ranges, "modulo")})
    status = FleetStatus(tuple(NodeStatus(name, None, {}) for name in nodes))
    on_nodes = ranges_by_node(topology, ["photos"])
    drawing = draw(topology, on_nodes, status, {}, "same", Addresses("ALIAS", "GROUP/0-1"))
    assert [(lane.name, lane.shards, lane.replicas, lane.passive) for lane in drawing.lanes] == [
        ("a", 3, (), (("photos 2-3", "photos/2-3"),)),
        ("b", 2, (("photos 4", "photos/4-4"),), (("photos 0-1", "photos/0-1"),)),
    ]
