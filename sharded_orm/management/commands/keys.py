"""``manage.py keys``: move shard keys from one shard to another.

The actions are in the modules of ``sharded_orm.management.keys``; each module lists its actions in
``ACTIONS``.
"""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions
from sharded_orm.management.keys import balance, inspect, move


class Command(CommandOfActions):
    help = "Moves shard keys of a group with a directory to other shards, while the site runs."
    # Skip the system checks: they concern the models, and their warnings would hide this command's
    # output.
    requires_system_checks = []
    actions = (*move.ACTIONS, *inspect.ACTIONS, *balance.ACTIONS)
