"""The global database, with the journal of operations, is on a side of the pair."""

from __future__ import annotations

import pytest

from tests.integration.side_switches.site import PairSite
from tests.services.replication import execute
from tests.services.server import HOST

GIVE_UP = ("photos", "--all-from", "db1", "--force", "--no-input")


@pytest.fixture
def site(durable_site: PairSite) -> PairSite:
    """The global database is in a schema of the first server."""
    site = durable_site
    execute(site.pair.first, "CREATE DATABASE photos_global")
    node = site.setting["NODES"]["db1"]
    site.databases["default"] = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "photos_global",
        "HOST": HOST,
        "PORT": node["PORT"],
        "USER": node["USER"],
        "PASSWORD": node["PASSWORD"],
    }
    site.save()
    done = site.manage("migrate", "--database", "default")
    assert done.code == 0, done.err
    site.wait_until_equal()
    return site


def test_a_side_that_is_closed_after_a_restart(site: PairSite) -> None:
    site.pair.first.kill()
    for command in (("pairs", "rejoin", "db1"), ("shards", "switch", "photos", "0")):
        error = site.manage(*command).err
        assert "the server of node 'db1' runs" in error
        assert "run the command again" in error
    site.pair.first.start()
    for command in (("pairs", "rejoin", "db1"), ("shards", "switch", "photos", "0")):
        error = site.manage(*command).err
        assert "the server of node 'db1' is read only" in error
        assert "SET GLOBAL read_only = OFF" in error
    execute(site.pair.first, "SET GLOBAL read_only = OFF")
    assert site.manage("pairs", "rejoin", "db1").code == 0


def test_a_side_that_was_given_up_is_not_closed(site: PairSite) -> None:
    site.databases["default"]["PORT"] = site.setting["NODES"]["db2"]["PORT"]
    site.save()
    site.pair.first.kill()
    site.switch(*GIVE_UP)
    site.pair.first.start()
    site.databases["default"]["PORT"] = site.setting["NODES"]["db1"]["PORT"]
    site.save()
    execute(site.pair.first, "SET GLOBAL read_only = OFF")
    error = site.manage("pairs", "rejoin", "db1").err
    assert "the global database ('default') is on 'db1', which was given up" in error
    ((is_closed,),) = execute(site.pair.first, "SELECT @@read_only")
    assert not is_closed
