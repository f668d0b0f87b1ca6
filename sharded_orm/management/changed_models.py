"""Finds changes of models for which nobody has written a migration."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps
from django.core.management import BaseCommand, get_commands, load_command_class
from django.db import router
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState


def apps_without_migration(aliases: Iterable[str]) -> list[str]:
    """Return the labels of apps whose models have changes that no migration has.

    Apps that have no table in a database of ``aliases`` are left out. Sends no query.
    """
    loader = MigrationLoader(None)
    states = loader.project_state(), ProjectState.from_apps(apps)
    names = {name for state in states for name in state.models}
    places = list(aliases)
    changed = _autodetector()(*states).changes(graph=loader.graph)
    return sorted(
        label
        for label in changed
        if any(
            router.allow_migrate(alias, label, model_name=model_name)
            for app_label, model_name in names
            if app_label == label
            for alias in places
        )
    )


def _autodetector() -> type[MigrationAutodetector]:
    """Return the autodetector of the command ``migrate``, which a project may replace."""
    app = get_commands()["migrate"]
    command = app if isinstance(app, BaseCommand) else load_command_class(app, "migrate")
    return getattr(command, "autodetector", MigrationAutodetector)
