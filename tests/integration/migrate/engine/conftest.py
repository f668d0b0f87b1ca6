"""A group of the test's own, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.migrate.engine import failing
from tests.integration.migrate.engine.fleets import Fleet, Migrations
from tests.integration.migrate.engine.fleets import fleet as make_fleet


@pytest.fixture
def fleet(django_db_blocker: Any, tmp_path: Path) -> Iterator[Fleet]:
    """A group of eight shards that do not exist yet, and a global database of its own."""
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
