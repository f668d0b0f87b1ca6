"""Move shard keys from one shard to another while the site runs (Yupoo, Y4).

All rows of a key move together.
"""

from sharded_orm.operations.moves.plan import MovePlan, plan_moves
from sharded_orm.operations.moves.record import in_flight
from sharded_orm.operations.moves.request import AUTO, MoveOptions, MoveReport
from sharded_orm.operations.moves.runner import KIND, abort, move_key, move_keys, repair

__all__ = [
    "AUTO",
    "KIND",
    "MoveOptions",
    "MovePlan",
    "MoveReport",
    "abort",
    "in_flight",
    "move_key",
    "move_keys",
    "plan_moves",
    "repair",
]
