"""``manage.py pairs``: look after pairs of servers that replicate from each other.

The actions are in the modules of ``sharded_orm.management.pairs``; each module lists its actions in
``ACTIONS``.
"""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.pairs import replication


class Command(CommandOfActions):
    help = (
        "Sets up, checks and mends master-master pairs: two servers that replicate from each other."
    )
    # Skip the system checks: they concern the models, and their warnings would hide this command's
    # output.
    requires_system_checks = []
    actions = (*replication.ACTIONS,)
