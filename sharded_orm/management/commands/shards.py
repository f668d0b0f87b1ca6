"""``manage.py shards``: look at, make, use and grow the logical shards.

Each family of actions is a module of ``sharded_orm.management.shards`` with a tuple
``ACTIONS``; this command only joins them.
"""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.shards import grow, promote, run, status, where


class Command(CommandOfActions):
    help = "Shows, checks, creates and uses the logical shards."
    # The state of models is no matter of shards, and their warnings would hide what is told here.
    requires_system_checks = []
    actions = (
        *status.ACTIONS,
        *run.ACTIONS,
        *where.ACTIONS,
        *grow.ACTIONS,
        *promote.ACTIONS,
    )
