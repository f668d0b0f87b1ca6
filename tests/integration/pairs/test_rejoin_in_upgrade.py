"""``manage.py pairs rejoin`` beside an upgrade that is aborted, or that has stopped writes.

The rejoin opens the server, and nothing else: each fence and each held replication stays as it is.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.integration.pairs.open_sides import accepts_writes, watched_sides
from tests.integration.pairs.site import RollingSite
from tests.integration.pairs.test_rolling import (
    ALBUM,
    EXECUTE,
    assert_upgraded,
    definitions,
    old_release,
)
from tests.integration.pairs.test_rolling_abort import assert_old
from tests.integration.pairs.test_stopped_writes import assert_new, insert_rows, stopped
from tests.integration.pairs.test_stopped_writes import assert_old as assert_kept
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.patience import PATIENCE
from tests.services.replication import LoggingServer, MasterPair, execute, replication_status

ROLLING = ("migrate_shards", "albums", "0003", "--rolling")
STOPPING = ("migrate_shards", "albums", "--rolling", "--stop-writes")
_SIDE = "sharded_orm.backends.mysql.pair_side.MySQLPairSide"
_ROWS = "sharded_orm.backends.mysql.side_rows.MySQLSideRows"
_STEPS = "sharded_orm.operations.pairs.round_steps.RoundSteps"
_ABORT = "sharded_orm.operations.pairs.rolling_abort._Abort"
_RETURN = "sharded_orm.operations.pairs.schema_return"
#: The comparison has stopped the replication to the passive side.
COMPARING = f"before:{_SIDE}.run_until"

#: Points of an abort, each with the step after which the upgrade is aborted.
ABORT_POINTS = [
    *(("migrate-passive", point) for point in (
        f"after:{_SIDE}.hold:1", f"after:{_RETURN}._execute:1", f"before:{_SIDE}.release:1", f"{COMPARING}:1",
    )),
    *(("switch", point) for point in (
        f"after:{_SIDE}.hold:1", f"before:{_STEPS}.close:2", f"before:{_SIDE}.release:1", f"before:{_ABORT}._publish:1",
        f"after:{_ABORT}._publish:1", f"after:{_SIDE}.hold:2", f"after:{_RETURN}._execute:1", f"{COMPARING}:1",
    )),
]  # fmt: skip
#: Points of an upgrade that stops writes, and of its abort.
STOPPED = [
    f"{COMPARING}:1",
    f"before:{_STEPS}.close:2",
    f"after:{EXECUTE}:1",
    f"after:{EXECUTE}:2",
    f"{COMPARING}:2",
]
STOPPED_ABORT = [
    f"after:{_ROWS}.create_closed:1", f"before:{_ROWS}.store:2", f"before:{_ROWS}.accept_rows:1",
    f"{COMPARING}:1", f"before:{_STEPS}.open:1",
]  # fmt: skip
#: The one of these that each run tests: a table is made anew, and has no fence yet.
ROUTINE = (STOPPED_ABORT[0], "db2")


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    return site


@pytest.fixture
def stopping_site(site: RollingSite) -> RollingSite:
    """A site with rows, for upgrades that stop writes."""
    insert_rows(site)
    return site


def state(site: RollingSite) -> list[tuple[bool, int]]:
    """Return for each server whether it takes writes, and for how long it holds what it receives."""
    return [
        (accepts_writes(server), int(replication_status(server)["SQL_Delay"]))
        for server in (site.pair.first, site.pair.second)
    ]


def insert(server: LoggingServer, number: int) -> None:
    execute(
        server, f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES (%s, 0, 'old')", (number,)
    )


def rejoin_beside(site: RollingSite, where: str, *command: str) -> None:
    """Both sides rejoin while ``command`` is stopped at a point. It goes on, and ends well."""
    process = site.start(*command, STOP_AT=where)
    wait_until_stopped(process)
    before = state(site)
    for node in ("db1", "db2"):
        site.pairs("rejoin", node)
    assert state(site) == before
    _, err = go_on(process)
    if "taken over by another process" in err:  # This machine was slow.
        done = site.manage(*command)
        assert done.code == 0, done.err
    else:
        assert process.returncode == 0, err


def restart_beside(site: RollingSite, where: str, server: LoggingServer, *command: str) -> None:
    """A server restarts and rejoins while ``command`` is stopped at a point. Run again, it ends well."""
    process = site.start(*command, STOP_AT=where)
    wait_until_stopped(process)
    before = state(site)
    server.kill()
    server.start()
    site.pairs("rejoin", "db1" if server is site.pair.first else "db2")
    assert state(site) == before
    _, err = go_on(process)
    assert not re.search("different|anew", err)
    # The other server tries once a second to reach the one that has restarted. Until then, no check is passed.
    for each in (site.pair.first, site.pair.second):
        wait_until_reconnected(each)
    if process.returncode:  # The server was killed while the command had sessions there.
        done = site.manage(*command)
        assert done.code == 0, done.err


def wait_until_reconnected(server: LoggingServer) -> None:
    """Return when ``server`` is not about to try again to reach the other one, which has restarted."""
    end = time.monotonic() + PATIENCE
    while replication_status(server)["Slave_IO_Running"] == "Connecting":
        assert time.monotonic() < end


@pytest.mark.long
@pytest.mark.parametrize(("step", "where"), ABORT_POINTS)
def test_beside_an_abort(site: RollingSite, step: str, where: str) -> None:
    old = definitions(site)
    with watched_sides(site.pair), old_release(site) as writer:
        site.rolling("--until", step)
        rejoin_beside(site, where, *ROLLING, "--abort")
    assert writer.errors == []
    assert_old(site, old, writer.written)


@pytest.mark.long
@pytest.mark.parametrize("node", ["db1", "db2"])
@pytest.mark.parametrize(("step", "where"), ABORT_POINTS)
def test_after_a_restart_beside_an_abort(
    site: RollingSite, step: str, where: str, node: str
) -> None:
    old = definitions(site)
    site.rolling("--until", step)
    insert(site.server(site.active()[0]), 1)
    restart_beside(site, where, site.server(node), *ROLLING, "--abort")
    assert_old(site, old, [1])


@pytest.mark.long
@pytest.mark.parametrize("where", STOPPED)
def test_beside_an_upgrade_that_has_stopped_writes(stopping_site: RollingSite, where: str) -> None:
    with watched_sides(stopping_site.pair):
        rejoin_beside(stopping_site, where, *STOPPING)
    assert_new(stopping_site)


@pytest.mark.long
@pytest.mark.parametrize("node", ["db1", "db2"])
@pytest.mark.parametrize("where", STOPPED)
def test_after_a_restart_while_writes_are_stopped(
    stopping_site: RollingSite, where: str, node: str
) -> None:
    restart_beside(stopping_site, where, stopping_site.server(node), *STOPPING)
    assert_new(stopping_site)


@pytest.mark.long
@pytest.mark.parametrize("where", STOPPED_ABORT)
def test_beside_the_abort_of_an_upgrade_that_has_stopped_writes(
    stopping_site: RollingSite, where: str
) -> None:
    """Tables are made anew on the passive side, where nobody may write until they are complete."""
    old = definitions(stopping_site)
    stopped(stopping_site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
    with watched_sides(stopping_site.pair):
        rejoin_beside(stopping_site, where, *STOPPING, "--abort")
    assert_kept(stopping_site, old)


@pytest.mark.parametrize(
    ("where", "node"),
    [
        pytest.param(each, node, marks=() if (each, node) == ROUTINE else pytest.mark.long)
        for each in STOPPED_ABORT
        for node in ("db1", "db2")
    ],
)
def test_after_a_restart_beside_the_abort_of_an_upgrade_that_has_stopped_writes(
    stopping_site: RollingSite, where: str, node: str
) -> None:
    old = definitions(stopping_site)
    stopped(stopping_site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
    restart_beside(stopping_site, where, stopping_site.server(node), *STOPPING, "--abort")
    assert_kept(stopping_site, old)


def test_a_side_that_is_read_only_does_not_end_a_pause(stopping_site: RollingSite) -> None:
    stopped(stopping_site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
    execute(stopping_site.pair.first, "SET GLOBAL read_only = ON")
    refused = stopped(stopping_site, "--abort", code=1)
    assert "'db1' is read only, as after a restart: run 'manage.py pairs rejoin db1'" in refused.err
    refused = stopped(stopping_site, code=1)
    assert "'db1' is read only, as after a restart" in refused.err
    stopping_site.pairs("rejoin", "db1")
    stopped(stopping_site)
    assert_new(stopping_site)


def test_replication_that_is_started_by_hand_during_a_comparison(site: RollingSite) -> None:
    """The passive side executes rows of a later moment than that of the active side."""
    process = site.start(*ROLLING, STOP_AT=f"{COMPARING}:1")
    wait_until_stopped(process)
    insert(site.pair.first, 1)
    execute(site.pair.second, "START SLAVE")
    site.pair.settle()
    _, err = go_on(process)
    assert "was started during the comparison" in err
    site.rolling()
    assert_upgraded(site, [1])
