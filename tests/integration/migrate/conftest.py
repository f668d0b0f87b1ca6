"""A project with shards to migrate, on SQLite, MariaDB and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.migrate.fleet_project import Fleet, fleet_on


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Group ``shop`` of eight shards that are not created yet."""
    with fleet_on(backend, request, tmp_path, shop=8) as fleet:
        yield fleet


@pytest.fixture
def migrated(fleet: Fleet) -> Fleet:
    """Group ``shop`` with its shards created and migrated."""
    fleet.manage("migrate_shards", "--create")
    return fleet
