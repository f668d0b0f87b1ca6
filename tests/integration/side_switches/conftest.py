from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import service_missing
from tests.integration.side_switches.site import DURABLE, PairSite, pair_of_servers
from tests.services import ServiceMissing
from tests.services.replication import REPLICATION, MasterPair
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
def durable() -> Iterator[MasterPair]:
    """Two servers that lose no commit if they are killed."""
    try:
        with pair_of_servers(**DURABLE) as pair:
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


@pytest.fixture
def durable_site(durable: MasterPair, tmp_path: Path) -> PairSite:
    """A site whose servers lose no commit if they are killed, and can be made a pair anew."""
    site = PairSite(durable, tmp_path)
    for node in site.setting["NODES"].values():
        node["REPLICATION"] = {"USER": REPLICATION[0], "PASSWORD": REPLICATION[1]}
    site.save()
    site.create_databases()
    site.fence()
    return site
