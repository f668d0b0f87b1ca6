"""``manage.py changepassword``: Django's command. It refuses the aliases of groups and shards,
which have no users.
"""

from __future__ import annotations

from django.apps import apps
from django.core.management import CommandError

from sharded_orm.management.one_database import OneDatabaseCommand

if not apps.is_installed("django.contrib.auth"):
    raise CommandError("changepassword needs the app 'django.contrib.auth'.")

from django.contrib.auth.management.commands import changepassword


class Command(OneDatabaseCommand, changepassword.Command):
    remedy = "users are in the global database, so leave --database out"
    takes_shards = False
