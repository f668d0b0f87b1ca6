"""``manage.py sqlmigrate``: Django's command. It refuses the alias of a shard group, which has no
tables of its own.
"""

from __future__ import annotations

from django.core.management.commands import sqlmigrate

from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, sqlmigrate.Command):
    pass
