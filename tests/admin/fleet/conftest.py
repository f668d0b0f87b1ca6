"""A site over a fleet on SQLite. Tests restore what they change, except the journal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.fleet.site import Site, serving
from tests.integration.shards.conftest import (  # noqa: F401  # fixtures
    Fleet,
    mysql_fleet,
    own_mariadb,
    sqlite_template,
)


@pytest.fixture(scope="session")
def fleet(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Fleet:  # noqa: F811
    folder = tmp_path_factory.mktemp("fleet") / "fleet"
    shutil.copytree(sqlite_template, folder)
    return Fleet(folder)


@pytest.fixture(scope="session")
def site(fleet: Fleet) -> Iterator[Site]:
    with serving(fleet) as site_over_fleet:
        yield site_over_fleet
