"""``manage.py dbshell``: Django's command. It refuses the alias of a shard group, which has no
database of its own.
"""

from __future__ import annotations

from django.core.management.commands import dbshell

from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, dbshell.Command):
    remedy = "'manage.py shards sql {group}_00000' opens the shell of one shard"
