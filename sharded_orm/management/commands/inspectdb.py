"""``manage.py inspectdb``, Django's command, which refuses the alias of a group."""

from __future__ import annotations

from django.apps import apps

from sharded_orm.management.one_database import OneDatabaseCommand

if apps.is_installed("django.contrib.gis"):  # It has an inspectdb of its own.
    from django.contrib.gis.management.commands import inspectdb
else:
    from django.core.management.commands import inspectdb


class Command(OneDatabaseCommand, inspectdb.Command):
    pass
