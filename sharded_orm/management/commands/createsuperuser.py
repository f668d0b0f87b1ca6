"""``manage.py createsuperuser``: Django's command. It refuses the aliases of shards, and those of groups
that have no users.
"""

from __future__ import annotations

from django.apps import apps
from django.core.management import CommandError

if not apps.is_installed("django.contrib.auth"):
    raise CommandError("createsuperuser needs the app 'django.contrib.auth'.")

from django.contrib.auth.management.commands import createsuperuser

from sharded_orm.management.user_command import UserCommand


class Command(UserCommand, createsuperuser.Command):
    pass
