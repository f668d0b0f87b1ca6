"""Work on one side of a pair, unnoticed by the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sharded_orm import database_settings, runtime
from sharded_orm.topology.model import ShardGroup, ShardRange, Topology

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide


@contextmanager
def only_on(side: MySQLPairSide, pair: Iterable[str]) -> Iterator[None]:
    """A context manager in whose block this process takes all shards of the pair to be on ``side``.

    Their sessions use the operator's account and write nothing into the binary log, so the other side
    does not get what they change. Only one thread may use this, while no other thread of the process
    uses shards.
    """
    settings = database_settings.operator_settings(side.name)
    assert settings is not None, "opening the pair has checked this"
    quiet = side.quiet_settings(settings)
    runtime.swap(_on_one_side(runtime.topology(), side.name, frozenset(pair), quiet))
    try:
        yield
    finally:
        runtime.swap(None)


def _on_one_side(
    topology: Topology, node: str, names: frozenset[str], settings: Mapping[str, Any]
) -> Topology:
    def moved(r: ShardRange) -> ShardRange:
        if {r.primary, r.replica} != names:
            return r
        (other,) = names - {node}
        return replace(r, primary=node, replica=other)

    def group(each: ShardGroup) -> ShardGroup:
        return replace(each, ranges=tuple(map(moved, each.ranges)))

    return replace(
        topology,
        nodes={**topology.nodes, node: settings},
        groups={name: group(each) for name, each in topology.groups.items()},
    )
