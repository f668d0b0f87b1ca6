"""What decides on which shard a key is, by the strategy of its group."""

from __future__ import annotations

from sharded_orm.routing.base import make_strategy
from sharded_orm.routing.range import RangeStrategy
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting


def keys_of(group: ShardGroup) -> KeyRouting:
    """For groups with any strategy; one's own counts as what it derives from, or tells.

    :raises InvalidConfiguration: the strategy cannot be made.
    """
    strategy = make_strategy(group)
    if strategy.places:
        return KeyRouting.PLACED
    if strategy.embedded is not None:
        return KeyRouting.EMBEDDED
    if isinstance(strategy, RangeStrategy):
        return KeyRouting.RANGES
    return KeyRouting.COMPUTED
