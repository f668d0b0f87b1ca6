"""``manage.py inspectdb``: Django's command. It refuses the alias of a shard group, which has no
tables of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from django.apps import apps

from sharded_orm.management.one_database import OneDatabaseCommand

if TYPE_CHECKING:
    from django.core.management.commands.inspectdb import Command as DjangoCommand
else:
    # If django.contrib.gis is installed, use its inspectdb, which also knows columns with geometry.
    package = "django.contrib.gis" if apps.is_installed("django.contrib.gis") else "django.core"
    DjangoCommand = import_module(f"{package}.management.commands.inspectdb").Command


class Command(OneDatabaseCommand, DjangoCommand):
    pass
