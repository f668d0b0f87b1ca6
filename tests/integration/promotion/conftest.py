from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.postgresql_site import PostgreSQLSite
from tests.integration.promotion.site import Site
from tests.services import ServiceMissing
from tests.services.replication import Pair, replicated_pair
from tests.services.streaming import StreamingPair, streaming_pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two servers for all tests of this folder, which kill and promote them at will."""
    try:
        with replicated_pair() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def streaming() -> Iterator[StreamingPair]:
    """Two servers of PostgreSQL, as :func:`pair`."""
    try:
        with streaming_pair() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def mariadb_site(pair: Pair, tmp_path: Path) -> Site:
    """A site whose second server replicates from the first; no rows are written yet."""
    site = Site(pair, tmp_path)
    site.create_databases()
    return site


@pytest.fixture
def postgresql_site(streaming: StreamingPair, tmp_path: Path) -> PostgreSQLSite:
    """The same on PostgreSQL."""
    site = PostgreSQLSite(streaming, tmp_path)
    site.create_databases()
    return site


@pytest.fixture(params=["mariadb", pytest.param("postgresql", marks=pytest.mark.long)])
def site(request: pytest.FixtureRequest) -> Site:
    """A site on one of both. What a routine run proves on PostgreSQL is in ``test_postgresql.py``."""
    site: Site = request.getfixturevalue(f"{request.param}_site")
    return site
