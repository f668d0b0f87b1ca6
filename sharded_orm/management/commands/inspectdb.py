"""``manage.py inspectdb``, Django's command, which refuses the alias of a group."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from django.apps import apps

from sharded_orm.management.one_database import OneDatabaseCommand

if TYPE_CHECKING:
    from django.core.management.commands.inspectdb import Command as DjangoCommand
else:
    # Django's app for geometry has an inspectdb of its own.
    package = "django.contrib.gis" if apps.is_installed("django.contrib.gis") else "django.core"
    DjangoCommand = import_module(f"{package}.management.commands.inspectdb").Command


class Command(OneDatabaseCommand, DjangoCommand):
    pass
