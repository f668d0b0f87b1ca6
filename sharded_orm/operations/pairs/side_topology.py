"""Make this process work on one side of a pair, with the operator's account.

The caller chooses whether its changes are replicated to the other side.
"""

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
def only_on(side: MySQLPairSide, pair: Iterable[str], *, is_logged: bool = False) -> Iterator[None]:
    """A context manager. In its block, this process uses ``side`` for all shards of the pair, even
    for shards that are active on the other side.

    The sessions use the operator's account. The block changes the topology of the whole process. So
    no other thread may use shards during the block.

    :param is_logged: whether changes are replicated to the other side. If False, the changes are
        not written to the binary log, and fences do not refuse them.
    """
    settings = database_settings.operator_settings(side.name)
    assert settings is not None, "opening the pair has checked this"
    if not is_logged:
        settings = side.quiet_settings(settings)
    runtime.swap(_on_one_side(runtime.topology(), side.name, frozenset(pair), settings))
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
