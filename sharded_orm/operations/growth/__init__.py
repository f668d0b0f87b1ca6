"""More shards for a group, and which of its ranges take new keys (P10, Y3).

Two orders matter. A range is created before it enters the topology: a process that knows a shard
without tables gets errors when it scatters. And a range enters the topology before it is opened: a
process that does not know a shard yet cannot find the keys that others have placed there.
"""

from __future__ import annotations

from sharded_orm.operations.growth.bounds import parse_bounds
from sharded_orm.operations.growth.growth_run import GrowthReport
from sharded_orm.operations.growth.new_range import NewRange
from sharded_orm.operations.growth.range_settings import set_open, set_weight
from sharded_orm.operations.growth.runner import KIND, give_up, grow

__all__ = [
    "KIND",
    "GrowthReport",
    "NewRange",
    "give_up",
    "grow",
    "parse_bounds",
    "set_open",
    "set_weight",
]
