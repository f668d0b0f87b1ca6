"""A side is lost for ever while a pair gets a new schema: it is given up, and comes back as a copy."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pairs.open_sides import accepts_writes
from tests.integration.pairs.site import SCHEMAS, RollingSite
from tests.integration.pairs.test_rolling import ALBUM, EXECUTE
from tests.patience import PATIENCE
from tests.services.replication import LoggingServer, MasterPair, execute, replication_status

_EXECUTED = "sharded_orm.operations.migrate.executor.ScriptExecutor._execute"
_SIDE = "sharded_orm.backends.mysql.pair_side.MySQLPairSide"
_RECORD = "sharded_orm.operations.pairs.record.SwitchRecord"
#: The step after which the side is lost, or the point at which the upgrade is killed before that.
WHEN = (
    f"before:{_EXECUTED}:3",
    "migrate-passive",
    f"after:{_SIDE}.run_until:1",
    "compare",
    f"before:{_RECORD}.publish:1",
    f"after:{_RECORD}.publish:1",
    "switch",
    f"before:{_EXECUTED}:11",
    "migrate-other",
    "finish",
)
#: The rows of the two releases, in the new schema.
OLD, NEW = (0, "old", 5, None), (0, "new", 9, "kept")


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    return site


def write_as_old_release(server: LoggingServer, number: int) -> None:
    execute(server, f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES ({number}, 0, 'old')")


def write_as_new_release(server: LoggingServer, number: int) -> None:
    execute(server, f"INSERT INTO {ALBUM} VALUES ({number}, 0, 'new', 9, 'kept')")


def upgrade_until(site: RollingSite, when: str) -> None:
    if ":" in when:
        site.rolling("--parallel", "1", code=-9, KILL_AT=when)
    else:
        site.rolling("--until", when)


def write_a_row(site: RollingSite) -> tuple[Any, ...]:
    """Write a row on the active side, with its schema. Return it, when the other side has received it."""
    active = site.server(site.active()[0])
    row = (2, *NEW) if active is site.pair.second else (2, *OLD)
    receives = replication_status(site.pair.other(active))["Slave_IO_Running"] == "Yes"
    if not (receives and accepts_writes(active)):
        return ()  # The upgrade was killed in a comparison, or between the two sides.
    if row[1:] == NEW:
        write_as_new_release(active, 2)
    else:
        write_as_old_release(active, 2)
    await_received(site, active)
    return row


def await_received(site: RollingSite, active: LoggingServer) -> None:
    """Return when the other side has received what was written on ``active``."""
    ((domain, logged),) = execute(active, "SELECT @@gtid_domain_id, @@gtid_binlog_pos")
    (own,) = (gtid for gtid in logged.split(",") if gtid.startswith(f"{domain}-"))
    end = time.monotonic() + PATIENCE
    while own not in replication_status(site.pair.other(active))["Gtid_IO_Pos"].split(","):
        assert time.monotonic() < end


def give_up(
    site: RollingSite, lost: str, *, check: str = "--no-input", code: int = 0, **environment: str
) -> str:
    command = ("shards", "switch", "photos", "--all-from", lost, "--force", check)
    done = site.manage(*command, **environment)
    assert done.code == code, done.err
    return done.out + done.err


def make_anew(site: RollingSite, lost: LoggingServer) -> None:
    """Replace the data of a server by a copy of the other server."""
    survivor = site.pair.other(lost)
    ((position,),) = execute(survivor, "SELECT @@gtid_current_pos")
    survivor.stop()
    lost.kill()
    shutil.rmtree(lost.folder / "data")
    shutil.copytree(survivor.folder / "data", lost.folder / "data")
    lost.password = survivor.password
    for server in (survivor, lost):
        server.start()
    execute(survivor, "SET GLOBAL read_only = OFF")
    for statement in ("RESET MASTER", f"SET GLOBAL gtid_slave_pos = '{position}'"):
        execute(lost, statement)


def assert_survives(site: RollingSite, lost: str, row: tuple[Any, ...]) -> None:
    """The other side has all that it has received, also values of new columns, and takes writes."""
    survivor = site.pair.other(site.server(lost))
    assert site.active() == ["db2" if lost == "db1" else "db1"] * 4
    # It cannot make the fence of the side that is dead.
    assert "4 shards are migrated" in site.manage("migrate_shards", "albums", "0003").out
    write_as_new_release(survivor, 3)
    rows = [(1, *OLD), *([row] if row else []), (3, *NEW)]
    assert execute(survivor, f"SELECT * FROM {ALBUM} ORDER BY 1") == rows
    # What the upgrade did not get to has no default that is kept for the old release.
    definitions = {
        str(execute(survivor, f"SHOW CREATE TABLE {schema}.albums_album")[0][1]).replace(
            " DEFAULT 5", ""
        )
        for schema in SCHEMAS
    }
    assert len(definitions) == 1


@pytest.mark.parametrize(
    ("when", "lost"),
    [
        (when, lost)
        if (when, lost) == ("switch", "db2")
        else pytest.param(when, lost, marks=pytest.mark.long)
        for when in WHEN
        for lost in ("db1", "db2")
    ],
)
def test_a_side_that_is_lost_during_an_upgrade_is_given_up(
    site: RollingSite, tmp_path: Path, when: str, lost: str
) -> None:
    write_as_old_release(site.pair.first, 1)
    site.pair.settle()
    upgrade_until(site, when)
    row = write_a_row(site)
    server = site.server(lost)
    server.kill()
    checked = give_up(site, lost, check="--check")
    assert "The rolling upgrade of db1 and db2 ends." in checked
    assert "Nothing was changed" in checked
    told = give_up(site, lost)
    assert f"The rolling upgrade has ended: {lost} was given up" in told
    assert_survives(site, lost, row)
    server.start()
    rejoin = ("pairs", "rejoin", lost, "--folder", str(tmp_path))
    refused = site.manage(*rejoin)
    assert refused.code == 1
    assert "was given up during a rolling upgrade" in refused.err
    make_anew(site, server)
    done = site.manage(*rejoin)
    assert done.code == 0, done.err
    assert site.pairs("check").code == 0
    done = site.manage("shards", "switch", "photos", "0", "--to-side", lost)
    assert done.code == 0, done.err
    write_as_new_release(server, 4)
    site.pair.settle()
    first, second = (
        execute(each, f"SELECT * FROM {ALBUM} ORDER BY 1")
        for each in (site.pair.first, site.pair.second)
    )
    assert first == second
    assert first[-1] == (4, *NEW)


_END = "sharded_orm.operations.pairs.upgrade_end.UpgradeEnd"
_CALLS = (
    f"{_EXECUTED}:2",
    f"{_END}.migrate_survivor:1",
    f"{_SIDE}.stop_receiving:1",
    f"{_SIDE}.execute_received:1",
    f"{_SIDE}.forget:1",
    f"{_END}.finish:1",
)
#: Of a side that is active for no shard.
_EPOCHS = (f"{_END}._with_epochs:1", f"{_END}._store_epochs:1")
KILLS = [
    *(("db2", f"{side}:{call}") for call in (*_CALLS, f"{_RECORD}.publish:1") for side in ("before", "after")),
    *(("db1", f"{side}:{call}") for call in (*_CALLS[2:], *_EPOCHS) for side in ("before", "after")),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("lost", "where"), KILLS)
def test_a_killed_giving_up_goes_on(
    site: RollingSite, tmp_path: Path, lost: str, where: str
) -> None:
    write_as_old_release(site.pair.first, 1)
    site.pair.settle()
    upgrade_until(site, "switch")
    row = write_a_row(site)
    site.server(lost).kill()
    give_up(site, lost, code=-9, KILL_AT=where)
    if where != f"after:{_END}.finish:1":
        # Nothing else may go on with the upgrade by then.
        assert site.manage("migrate_shards", "albums", "0003", "--rolling").code == 1
    give_up(site, lost)
    assert_survives(site, lost, row)
    site.server(lost).start()
    refused = site.pairs("rejoin", lost, "--folder", str(tmp_path), code=1)
    assert "was given up during" in refused.err


@pytest.mark.long
@pytest.mark.parametrize("lost", ["db1", "db2"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_side_that_is_lost_while_writes_are_stopped(
    site: RollingSite, number: int, lost: str
) -> None:
    write_as_old_release(site.pair.first, 1)
    site.pair.settle()
    kill = {"KILL_AT": f"after:{EXECUTE}:{number}"}
    command = ("migrate_shards", "albums", "--rolling", "--stop-writes")
    assert site.manage(*command, **kill).code == -9
    site.server(lost).kill()
    give_up(site, lost)
    survivor = site.pair.other(site.server(lost))
    assert accepts_writes(survivor)
    assert "4 shards are migrated" in site.manage("migrate_shards", "albums").out
    assert execute(survivor, f"SELECT * FROM {ALBUM}") == [(1, 0, 5, None)]


def test_a_side_that_answers_is_not_given_up_during_an_upgrade(site: RollingSite) -> None:
    site.rolling("--until", "compare")
    told = give_up(site, "db1", code=1)
    assert "'db1' answers, and 'db2' receives from it: go on with the upgrade" in told
    site.rolling()
    assert site.pairs("check").code == 0
