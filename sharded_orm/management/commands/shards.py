"""``manage.py shards``: show, create, use and grow the logical shards.

The actions are in the modules of ``sharded_orm.management.shards``; each module lists its actions
in ``ACTIONS``.
"""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.shards import (
    balance,
    grow,
    imports,
    move,
    promote,
    run,
    split,
    status,
    switch,
    where,
)


class Command(CommandOfActions):
    help = "Shows, checks, creates and uses the logical shards."
    # Skip the system checks: they concern the models, and their warnings would hide this command's
    # output.
    requires_system_checks = []
    actions = (
        *status.ACTIONS,
        *run.ACTIONS,
        *where.ACTIONS,
        *grow.ACTIONS,
        *promote.ACTIONS,
        *switch.ACTIONS,
        *imports.ACTIONS,
        *move.ACTIONS,
        *split.ACTIONS,
        *balance.ACTIONS,
    )
