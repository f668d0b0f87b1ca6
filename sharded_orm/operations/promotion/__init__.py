"""Switching the primary of a server's ranges to its replica, as an operator's decision (P13)."""

from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.promotion.plan import Move, Plan, find_plan
from sharded_orm.operations.promotion.preflight import Loss
from sharded_orm.operations.promotion.report import Options, Report
from sharded_orm.operations.promotion.runner import abort, check, promote

__all__ = [
    "Loss", "Move", "Options", "Pause", "Plan", "Report", "abort", "check", "find_plan", "promote",
]  # fmt: skip
