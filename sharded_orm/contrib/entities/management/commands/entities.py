"""``manage.py entities``: the cleaner of entities, and the indexes of stores."""

from __future__ import annotations

from sharded_orm.management.actions import CommandOfActions


class Command(CommandOfActions):
    help = "Looks after entities and their indexes."
    actions = ()
