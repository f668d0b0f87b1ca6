"""``manage.py migrate``: Django's command. It refuses the alias of a shard group, which
``migrate_shards`` migrates.
"""

from __future__ import annotations

from django.core.management.commands import migrate

from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, migrate.Command):
    remedy = "'manage.py migrate_shards --group {group}' migrates them"
