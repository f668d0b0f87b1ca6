"""``manage.py showmigrations``: Django's command. It refuses the alias of a shard group, which has
no tables of its own.
"""

from __future__ import annotations

from django.core.management.commands import showmigrations

from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, showmigrations.Command):
    remedy = "'manage.py migrate_shards --group {group} --status' shows the state of all, and '--database {group}_00000' that of one shard"
