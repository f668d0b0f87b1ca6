"""``manage.py remove_stale_contenttypes``: Django's command. It refuses the aliases of groups and
shards, which have no content types.
"""

from __future__ import annotations

from django.apps import apps
from django.core.management import CommandError

from sharded_orm.management.one_database import OneDatabaseCommand

if not apps.is_installed("django.contrib.contenttypes"):
    raise CommandError("remove_stale_contenttypes needs the app 'django.contrib.contenttypes'.")

from django.contrib.contenttypes.management.commands import remove_stale_contenttypes


class Command(OneDatabaseCommand, remove_stale_contenttypes.Command):
    remedy = "content types are in the global database, so leave --database out"
    takes_shards = False
