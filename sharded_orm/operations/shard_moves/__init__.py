"""Move shards to another node while the site runs (Pinterest, P10)."""

from sharded_orm.operations.shard_moves.plan import ShardMovePlan
from sharded_orm.operations.shard_moves.request import ShardMoveOptions, ShardMoveReport
from sharded_orm.operations.shard_moves.runner import check_shard_moves, move_shards, repair
from sharded_orm.operations.shard_moves.runs_under_way import KIND

__all__ = [
    "KIND",
    "ShardMoveOptions",
    "ShardMovePlan",
    "ShardMoveReport",
    "check_shard_moves",
    "move_shards",
    "repair",
]
