"""``manage.py shards``: show, create, use and grow the logical shards.

Each module of ``sharded_orm.management.shards`` has related actions in a tuple ``ACTIONS``. The
command joins them.
"""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.shards import grow, promote, run, status, where


class Command(CommandOfActions):
    help = "Shows, checks, creates and uses the logical shards."
    # The checks of models do not matter here, and their warnings would hide this command's output.
    requires_system_checks = []
    actions = (
        *status.ACTIONS,
        *run.ACTIONS,
        *where.ACTIONS,
        *grow.ACTIONS,
        *promote.ACTIONS,
    )
