from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.side_switches.site import PairSite, two_masters
from tests.services import ServiceMissing
from tests.services.replication import Pair


@pytest.fixture(scope="session")
def masters() -> Iterator[Pair]:
    """Two servers for all tests of this folder, which replicate from each other."""
    try:
        with two_masters() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def bare_site(masters: Pair, tmp_path: Path) -> PairSite:
    """A site whose passive sides accept writes, as before its first fence."""
    site = PairSite(masters, tmp_path)
    site.create_databases()
    return site


@pytest.fixture
def site(bare_site: PairSite) -> PairSite:
    bare_site.fence()
    return bare_site
