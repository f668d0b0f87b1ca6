"""Promotions: an operator replaces a primary server by its replica (as at Pinterest, P13).

A *range* is a sequence of shards, such as 0 to 511, with the same primary node and the same replica
node. A promotion replaces a server in all ranges of which it is the primary: the replica becomes
their primary.
"""

from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.promotion.plan import Move, PromotionPlan, find_plan
from sharded_orm.operations.promotion.preflight import Loss
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.promotion.runner import abort, check, promote

__all__ = [
    "Loss",
    "Move",
    "Pause",
    "PromotionOptions",
    "PromotionPlan",
    "PromotionReport",
    "abort",
    "check",
    "find_plan",
    "promote",
]  # fmt: skip
