"""Add shards to a group, and set which ranges of its shards take new keys (Pinterest's and Yupoo's
way to grow, P10 and Y3).

A *range* is a sequence of a group's shards on one primary node. The order of the steps matters:

1. The shards of a new range get their tables. If they had none when a process knows them, a query
   to all shards would fail.
2. The topology names the range.
3. When every process knows the range, it is *opened* for new keys. If it were opened earlier, a
   process that does not know the shards yet could not find the keys that others place there.
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
