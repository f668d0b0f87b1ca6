from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.imports.site import site_fixture
from tests.integration.moves.database import Database
from tests.integration.moves.postgresql_session import Session
from tests.integration.moves.site import Site

site = site_fixture(Site, everywhere=True)


@pytest.fixture
def sessions(database: Database) -> Iterator[list[Session]]:
    """Three sessions of other programs, on PostgreSQL."""
    sessions = [Session(database) for _ in range(3)]
    yield sessions
    for session in sessions:
        session.driver.close()
