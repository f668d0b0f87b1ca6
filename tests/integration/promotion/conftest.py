from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.promotion.site import Site
from tests.services import ServiceMissing
from tests.services.replication import Pair, replicated_pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two servers for all tests of this folder, which kill and promote them at will."""
    try:
        with replicated_pair() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def site(pair: Pair, tmp_path: Path) -> Site:
    """A site whose second server replicates from the first; no rows are written yet."""
    site = Site(pair, tmp_path)
    site.create_databases()
    return site
