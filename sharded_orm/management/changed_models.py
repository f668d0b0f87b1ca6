"""Finds changes of models for which nobody has written a migration."""

from __future__ import annotations

from django.apps import apps
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState


def apps_without_migration() -> list[str]:
    """Return the labels of apps whose models have changes that no migration has. Sends no query."""
    loader = MigrationLoader(None)
    detector = MigrationAutodetector(loader.project_state(), ProjectState.from_apps(apps))
    return sorted(detector.changes(graph=loader.graph))
