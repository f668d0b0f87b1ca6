"""``manage.py createcachetable``: Django's command. It refuses the aliases of groups and shards,
which have no cache tables.
"""

from __future__ import annotations

from django.core.management.commands import createcachetable

from sharded_orm.management.one_database import OneDatabaseCommand


class Command(OneDatabaseCommand, createcachetable.Command):
    remedy = "cache tables are in the global database, so leave --database out"
    takes_shards = False
