"""A group of the test's own, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.migrate.engine import failing
from tests.integration.migrate.engine.fleets import Fleet, Migrations, project
from tests.integration.migrate.engine.fleets import fleet as make_fleet


@pytest.fixture(scope="package")
def _project(django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Migrating it takes longer than most tests.
    with django_db_blocker.unblock(), project(tmp_path_factory.mktemp("project")):
        yield


@pytest.fixture
def fleet(_project: None, django_db_blocker: Any, tmp_path: Path) -> Iterator[Fleet]:
    """A group of eight shards that do not exist yet, and an empty journal in the global database."""
    # Without Django's TestCase, which knows only the aliases of the settings.
    with django_db_blocker.unblock(), make_fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def migrations(fleet: Fleet, tmp_path: Path) -> Iterator[Migrations]:
    """Migrations that the test writes; they replace those of the app."""
    migrations = Migrations(tmp_path)
    with migrations.in_use():
        try:
            yield migrations
        finally:
            failing.error = None
