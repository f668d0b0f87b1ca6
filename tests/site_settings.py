"""Give the settings of a site to a process, which may be one that is forked from a prepared process."""

from __future__ import annotations

import sys
from typing import Any

#: For a prepared process, which knows no site yet.
NO_SITE: dict[str, Any] = {"databases": {"default": {}}, "sharded_orm": {}}


def set_up_django(**settings_by_name: Any) -> None:
    """Set Django up with these settings.

    Where that has been done before with those of another site, replace them. The installed apps must
    be the same, and no connection may have been used. The arguments of the command are in ``sys.argv``.
    """
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(**settings_by_name)
        django.setup()
        return
    assert settings_by_name["INSTALLED_APPS"] == settings.INSTALLED_APPS
    from django.core.cache import caches
    from django.core.management import get_commands
    from django.db import connections

    from sharded_orm import runtime
    from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable
    from sharded_orm.management.startup import end_command, runs_without_topology
    from sharded_orm.settings_validation import validate_settings

    for connection in connections.all(initialized_only=True):
        del connections[connection.alias]
    for name, value in settings_by_name.items():
        setattr(settings, name, value)
    for handler in (connections, caches):
        handler._settings = None
        vars(handler).pop("settings", None)
    runtime.reset()
    # As the app's ready() does.
    try:
        validate_settings()
    except (InvalidConfiguration, TopologyUnavailable) as exc:
        if isinstance(exc, TopologyUnavailable) and runs_without_topology(sys.argv):
            return
        if sys.argv[1] in get_commands():
            end_command(exc, sys.argv)
        raise
    settings.DATABASES.expose(sys.argv[1:])


def import_commands() -> None:
    """Import what commands need, so that forks of this process need not."""
    from django.core.management import load_command_class
    from django.db.migrations.loader import MigrationLoader

    for command in ("keys", "migrate_shards", "shards", "topology"):
        load_command_class("sharded_orm", command)
    MigrationLoader(None, ignore_no_migrations=True)
