"""Moves of shards between a server and its replica."""

from __future__ import annotations

import pytest

from tests.integration.promotion.site import Site
from tests.services.replication import OPERATOR, execute


@pytest.fixture
def site(mariadb_site: Site) -> Site:
    return mariadb_site


def test_shards_are_not_moved_between_a_server_and_its_replica(site: Site) -> None:
    done = site.manage("shards", "move", "photos", "0", "--to", "db2")
    assert done.code == 1
    assert "'db2' replicates from 'db1'" in done.err
    # Neither the other way round.
    groups = site.document()["groups"]
    for each in groups["photos"]["RANGES"]:
        each["primary"], each["replica"] = "db2", "db1"
    site.publish(groups)
    done = site.manage("shards", "move", "photos", "0", "--to", "db1")
    assert done.code == 1
    assert "'db2' replicates from 'db1'" in done.err


def test_an_account_that_may_not_see_the_replication(site: Site) -> None:
    execute(site.pair.second, f"REVOKE SLAVE MONITOR ON *.* FROM {OPERATOR[0]}")
    try:
        done = site.manage("shards", "move", "photos", "0", "--to", "db2")
    finally:
        execute(site.pair.second, f"GRANT SLAVE MONITOR ON *.* TO {OPERATOR[0]}")
    assert done.code == 1
    assert "grant SLAVE MONITOR" in done.err
