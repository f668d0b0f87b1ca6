from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.side_switches.site import PairSite, pair_of_servers
from tests.services import ServiceMissing
from tests.services.replication import MasterPair
from tests.services.zookeeper import ZooKeeperServer


@pytest.fixture(scope="session")
def masters() -> Iterator[MasterPair]:
    """Two servers for all tests of this folder, which replicate from each other."""
    try:
        with pair_of_servers() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperServer]:
    try:
        with ZooKeeperServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def bare_site(masters: MasterPair, tmp_path: Path) -> PairSite:
    """A site whose passive sides accept writes, as before its first fence."""
    site = PairSite(masters, tmp_path)
    site.create_databases()
    return site


@pytest.fixture
def site(bare_site: PairSite) -> PairSite:
    bare_site.fence()
    return bare_site
