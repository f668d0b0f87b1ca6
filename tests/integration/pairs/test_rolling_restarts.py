"""Servers that restart, and so start replication by themselves, while a pair gets a new schema."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.pairs.site import RollingSite
from tests.patience import PATIENCE
from tests.services.replication import (
    LoggingServer,
    MasterPair,
    execute,
    replication_status,
)

ALBUM = "photos_00000.albums_album"
STEPS = ("migrate-passive", "compare", "switch", "migrate-other")


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    return site


def restart(site: RollingSite, server: LoggingServer) -> None:
    """Kill a server and start it; return when it does with the other's events what it will do."""
    server.kill()
    server.start()
    end = time.monotonic() + PATIENCE
    for each in (server, site.pair.other(server)):
        ((written,),) = execute(site.pair.other(each), "SELECT @@gtid_binlog_pos")
        while time.monotonic() < end:
            status = replication_status(each)
            is_done = execute(each, "SELECT MASTER_GTID_WAIT(%s, 0)", (written,)) == [(0,)]
            is_held = status["Slave_SQL_Running"] == "No"
            waits = "MASTER_DELAY" in str(status["Slave_SQL_Running_State"])
            if status["Slave_IO_Running"] == "Yes" and (is_done or is_held or waits):
                break
            time.sleep(0.02)
        else:
            raise AssertionError("replication neither goes on nor waits")
    site.pairs("rejoin", "db1" if server is site.pair.first else "db2")


def finish(site: RollingSite) -> None:
    site.rolling()
    site.pair.settle()
    first, second = (
        execute(server, f"SELECT * FROM {ALBUM} ORDER BY 1")
        for server in (site.pair.first, site.pair.second)
    )
    assert first == second == [(1, 0, "old", 5, None), (2, 0, "new", 9, "kept")]
    assert site.pairs("check", "db1", "db2").code == 0


def write_as_new_release(site: RollingSite) -> None:
    execute(site.pair.second, f"INSERT INTO {ALBUM} VALUES (2, 0, 'new', 9, 'kept')")


def write_as_old_release(site: RollingSite, server: LoggingServer) -> None:
    execute(server, f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES (1, 0, 'old')")


def test_the_side_with_the_old_schema_keeps_new_values_for_later_if_it_restarts(
    site: RollingSite,
) -> None:
    write_as_old_release(site, site.pair.first)
    site.rolling("--until", "switch")
    write_as_new_release(site)
    restart(site, site.pair.first)
    assert execute(site.pair.first, "SELECT @@read_only") == [(0,)]
    # Somebody starts replication by hand.
    execute(site.pair.first, "START SLAVE")
    assert execute(site.pair.first, f"SELECT album_id FROM {ALBUM}") == [(1,)]
    finish(site)


@pytest.mark.long
@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("step", STEPS)
def test_servers_restart_after_each_step(site: RollingSite, step: str, which: str) -> None:
    write_as_old_release(site, site.pair.first)
    site.rolling("--until", step)
    is_switched = STEPS.index(step) >= 2
    if is_switched:
        write_as_new_release(site)
    for server in (site.pair.first, site.pair.second):
        if which in ("both", "first" if server is site.pair.first else "second"):
            restart(site, server)
    if not is_switched:
        site.rolling("--until", "switch")
        write_as_new_release(site)
    finish(site)


@pytest.mark.long
@pytest.mark.parametrize("number", range(1, 11))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_restart_beside_a_killed_command(site: RollingSite, moment: str, number: int) -> None:
    """Both the command and both servers are killed at each step."""
    execute_ = "sharded_orm.operations.pairs.rolling_upgrade._Upgrade._execute"
    write_as_old_release(site, site.pair.first)
    site.rolling(code=-9, KILL_AT=f"{moment}:{execute_}:{number}")
    is_switched = site.active()[0] == "db2"
    if is_switched:
        write_as_new_release(site)
    for server in (site.pair.first, site.pair.second):
        restart(site, server)
    if not is_switched:
        site.rolling("--until", "switch")
        write_as_new_release(site)
    finish(site)
