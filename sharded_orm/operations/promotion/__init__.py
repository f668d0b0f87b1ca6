"""Promotions: an operator replaces a primary server by its replica (as at Pinterest, P13).

A *range* is a sequence of a group's shards that have the same primary node and replica node. A
promotion makes the replica the primary of all ranges of a server.
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
