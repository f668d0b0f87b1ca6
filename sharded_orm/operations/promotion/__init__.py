"""Switching the primary of a server's ranges to its replica, as an operator's decision (P13)."""

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
