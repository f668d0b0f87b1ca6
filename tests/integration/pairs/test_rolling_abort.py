"""``manage.py migrate_shards --rolling --abort``: a pair keeps its old schema after all."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import MySQLdb
import pytest

from tests.integration.pairs.open_sides import watched_sides
from tests.integration.pairs.site import RollingSite
from tests.integration.pairs.test_rolling import (
    ALBUM,
    EXECUTE,
    OldRelease,
    assert_upgraded,
    definitions,
    old_release,
    pair_problems,
)
from tests.integration.pairs.test_rolling_restarts import restart
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.services.replication import MasterPair, execute, execute_alone

ABORT = "sharded_orm.operations.pairs.rolling_abort._Abort"


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    return site


@pytest.fixture
def old(site: RollingSite) -> set[str]:
    return definitions(site)


def assert_old(site: RollingSite, old: set[str], written: list[int]) -> None:
    """Both sides have the old schema and all rows, and a later upgrade works as if none had been."""
    site.pair.settle()
    assert definitions(site) == old
    for server in (site.pair.first, site.pair.second):
        rows = execute(server, f"SELECT * FROM {ALBUM} ORDER BY 1")
        assert rows == [(number, 0, "old") for number in written]
        assert execute(server, "SHOW TABLES FROM photos_00000 LIKE 'albums_tag'") == []
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert site.pairs("check", "db1", "db2").code == 0
    assert pair_problems(site) == []


def insert(site: RollingSite, columns: str, values: str) -> None:
    execute(site.pair.second, f"INSERT INTO {ALBUM} ({columns}) VALUES ({values})")


def test_the_passive_side_gets_its_old_schema_back(site: RollingSite, old: set[str]) -> None:
    with old_release(site) as writer:
        site.rolling("--until", "compare")
        done = site.rolling("--abort")
    assert "photos 0-1 got the old schema back" in done.out
    assert writer.errors == []
    assert_old(site, old, writer.written)
    site.rolling()
    assert_upgraded(site, writer.written)


def test_shards_are_switched_back_as_long_as_no_release_writes_new_columns(
    site: RollingSite, old: set[str]
) -> None:
    site.rolling("--until", "switch")
    insert(site, "album_id, user_id, title, stars", "1, 0, 'old', 9")
    refused = site.rolling("--abort", code=1)
    assert "photos_00000: albums_album on 'db2' has values of stars, note" in refused.err
    # The active side takes writes as before.
    insert(site, "album_id, user_id, title", "2, 0, 'old'")
    execute(site.pair.second, f"UPDATE {ALBUM} SET stars = 5")
    execute(site.pair.second, "INSERT INTO photos_00001.albums_tag VALUES (1, 1)")
    assert "albums_tag on 'db2' has rows" in site.rolling("--abort", code=1).err
    execute(site.pair.second, "DELETE FROM photos_00001.albums_tag")
    execute_alone(site.pair.second, f"UPDATE {ALBUM} SET title = 'old'")
    # The other side would stop at the rows of a table that it does not have.
    refused = site.rolling("--abort", "--timeout", "5", code=1)
    assert "albums_tag" in refused.err
    insert(site, "album_id, user_id, title", "3, 0, 'old'")
    site.rolling()
    site.pair.settle()
    assert site.pairs("check", "db1", "db2").code == 0
    assert execute(site.pair.first, f"SELECT album_id, stars FROM {ALBUM} ORDER BY 1") == [
        (1, 5), (2, 5), (3, 5),
    ]  # fmt: skip


def test_after_the_switch_rows_of_the_old_release_are_kept(
    site: RollingSite, old: set[str]
) -> None:
    with old_release(site) as writer:
        site.rolling("--until", "switch")
        site.rolling("--abort")
    assert writer.errors == []
    assert_old(site, old, writer.written)
    site.rolling()
    assert_upgraded(site, writer.written)


def test_commands_name_the_ways_out_of_a_broken_off_upgrade(site: RollingSite) -> None:
    site.rolling("--until", "migrate-passive")
    command = "manage.py migrate_shards albums 0003 --rolling"
    ways = f"finish it by '{command}' first, or undo its round by '{command} --abort'"
    refused = site.manage("migrate_shards", "albums", "0003")
    assert refused.code == 1
    assert ways in refused.err
    assert "Another process" not in refused.err
    first, *_others = site.manage("shards", "status", "--json").json["problems"]
    assert ways in first
    site.rolling()
    site.rolling("--until", "migrate-passive")
    assert site.manage("migrate_shards", "albums", "0003").code == 0


def test_a_failure_to_undo_does_not_hide_why_it_was_to_be_undone(site: RollingSite) -> None:
    site.rolling("--until", "switch")
    insert(site, "album_id, user_id, title, stars", "1, 0, 'old', 9")
    command = ("migrate_shards", "albums", "0003", "--rolling", "--abort")
    aborting = site.start(*command, STOP_AT=f"before:{ABORT}._lost_values:1")
    wait_until_stopped(aborting)
    for statement in ("STOP SLAVE", "RESET SLAVE ALL"):
        execute(site.pair.first, statement)
    _out, err = go_on(aborting)
    site.pair.follow(site.pair.first, site.pair.second)
    assert "albums_album on 'db2' has values of stars" in err
    assert "shards refuse writes until this is undone" in err
    assert "'db1' does not replicate from 'db2'" in err


def test_it_is_refused_when_the_other_side_has_begun(site: RollingSite) -> None:
    assert (
        "no rolling upgrade of 'db1' and 'db2' is unfinished" in site.rolling("--abort", code=1).err
    )
    site.rolling("--until", "migrate-other")
    refused = site.rolling("--abort", code=1)
    assert "has begun to get the new one" in refused.err
    site.rolling()
    assert_upgraded(site, [])


def test_a_migration_that_fails_can_be_aborted(site: RollingSite, old: set[str]) -> None:
    """The passive side stands in the middle of a migration, which cannot be undone as such."""
    # The second operation of 0003 fails: there is an index of that name.
    execute_alone(
        site.pair.second, "CREATE INDEX album_by_user ON photos_00000.albums_album (album_id)"
    )
    assert "photos_00000" in site.rolling(code=1).err
    execute_alone(site.pair.second, "DROP INDEX album_by_user ON photos_00000.albums_album")
    site.rolling("--abort")
    assert_old(site, old, [])
    site.rolling()
    assert_upgraded(site, [])


def _points() -> Iterator[str]:
    for method, count in (("hold", 1), ("release", 2)):
        side = f"sharded_orm.backends.mysql.pair_side.MySQLPairSide.{method}"
        yield from (f"{m}:{side}:{n}" for m in ("before", "after") for n in range(1, count + 1))
    schema_return = "sharded_orm.operations.pairs.schema_return"
    for method, count in (("_execute", 6), ("_forget_migrations", 2)):
        for moment in ("before", "after"):
            yield from (f"{moment}:{schema_return}.{method}:{n}" for n in range(1, count + 1))
    yield f"after:{ABORT}.run:1"
    yield from (f"{moment}:{ABORT}._forget_steps:1" for moment in ("before", "after"))


def _switch_points() -> Iterator[str]:
    for method in ("_switch_back", "_publish"):
        yield from (f"{moment}:{ABORT}.{method}:1" for moment in ("before", "after"))
    steps = "sharded_orm.operations.pairs.round_steps.RoundSteps"
    for method, count in (("close", 2), ("catch_up", 1), ("open", 1)):
        for moment in ("before", "after"):
            yield from (f"{moment}:{steps}.{method}:{n}" for n in range(1, count + 1))


def abort_after_a_kill(site: RollingSite, where: str) -> OldRelease:
    with watched_sides(site.pair), old_release(site) as writer:
        site.rolling("--abort", code=-9, KILL_AT=where)
        assert "being aborted" in site.rolling(code=1).err
        site.rolling("--abort")
    return writer


@pytest.mark.long
@pytest.mark.parametrize("where", [*_points()])
def test_a_killed_abort_goes_on(site: RollingSite, old: set[str], where: str) -> None:
    site.rolling("--until", "migrate-passive")
    writer = abort_after_a_kill(site, where)
    assert writer.errors == []
    assert_old(site, old, writer.written)


@pytest.mark.long
@pytest.mark.parametrize("where", [*_switch_points()])
def test_a_killed_abort_after_the_switch_goes_on(
    site: RollingSite, old: set[str], where: str
) -> None:
    site.rolling("--until", "switch")
    writer = abort_after_a_kill(site, where)
    assert writer.errors == []
    assert_old(site, old, writer.written)


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        *(f"{moment}:{EXECUTE}:{number}" for moment in ("before", "after") for number in (1, 2, 3)),
        *(f"after:sharded_orm.operations.migrate.executor.ScriptExecutor._execute:{n}" for n in range(1, 9)),
        *(f"after:sharded_orm.operations.pairs.switch_runner._SwitchWork._switch_one:{n}" for n in (1, 2)),
        *(f"before:sharded_orm.operations.pairs.record.SwitchRecord.enter:{n}" for n in range(1, 5)),
    ],
)  # fmt: skip
def test_an_upgrade_that_was_killed_can_be_aborted(
    site: RollingSite, old: set[str], where: str
) -> None:
    with watched_sides(site.pair), old_release(site) as writer:
        site.rolling("--parallel", "1", code=-9, KILL_AT=where)
        site.rolling("--abort")
    assert writer.errors == []
    assert_old(site, old, writer.written)
    site.rolling()
    assert_upgraded(site, writer.written)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_an_abort_that_is_killed_again_and_again(
    site: RollingSite, old: set[str], seed: int
) -> None:
    points = random.Random(seed)
    with watched_sides(site.pair), old_release(site) as writer:
        site.rolling("--until", ("migrate-passive", "switch")[seed % 2])
        for where in points.sample([*_points(), *_switch_points()], 6):
            done = site.manage(
                "migrate_shards", "albums", "0003", "--rolling", "--abort", KILL_AT=where
            )
            assert done.code in (0, -9), done.err
            if done.code == 0:
                break
        else:
            site.rolling("--abort")
    assert writer.errors == []
    assert_old(site, old, writer.written)


@pytest.mark.long
def test_an_abort_that_was_silent_for_too_long_publishes_nothing(
    site: RollingSite, old: set[str]
) -> None:
    """The first process is stopped at its publication; the second one cannot switch back."""
    site.rolling("--until", "switch")
    where = "before:sharded_orm.operations.topology._publish:1"
    command = ("migrate_shards", "albums", "0003", "--rolling", "--abort")
    first = site.start(*command, STOP_AT=where)
    wait_until_stopped(first)
    site.let_lease_expire()
    with watched_sides(site.pair):
        with contextlib.closing(MySQLdb.connect(**site.pair.first.address.mysqldb())) as locking:
            row = "INSERT INTO photos_00002.albums_album (album_id, user_id, title) VALUES (1, 2, 'old')"
            # The replication of the row waits for this transaction.
            for statement in ("SET sql_log_bin = 0, @sharded_orm_capture_passes = 1", "BEGIN", row):
                locking.query(statement)
            execute(site.pair.second, row)
            site.rolling("--abort", "--timeout", "1", code=1)
        _out, err = go_on(first)
        assert "taken over by another process" in err
        assert site.active() == ["db2"] * 4
        site.rolling("--abort")
    assert_old(site, old, [])


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_an_abort_that_was_silent_for_too_long_alters_nothing(
    site: RollingSite, number: int
) -> None:
    """The first process is stopped before a change of a table, when another one has ended its abort."""
    site.rolling("--until", "migrate-passive")
    where = f"before:sharded_orm.operations.pairs.schema_return._execute:{number}"
    first = site.start("migrate_shards", "albums", "0003", "--rolling", "--abort", STOP_AT=where)
    wait_until_stopped(first)
    site.let_lease_expire()
    site.rolling("--abort")
    site.rolling("--until", "migrate-passive")
    new = definitions(site)
    _out, err = go_on(first)
    assert "taken over by another process" in err
    assert definitions(site) == new
    site.rolling()
    assert_upgraded(site, [])


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        "after:sharded_orm.backends.mysql.pair_side.MySQLPairSide.hold:1",
        "before:sharded_orm.operations.pairs.round_steps.RoundSteps.close:2",
        f"before:{ABORT}._publish:1",
        f"after:{ABORT}._publish:1",
        "after:sharded_orm.operations.pairs.schema_return._execute:2",
        "after:sharded_orm.backends.mysql.pair_side.MySQLPairSide.release:2",
    ],
)
def test_servers_restart_beside_a_killed_abort(
    site: RollingSite, old: set[str], where: str
) -> None:
    site.rolling("--until", "switch")
    insert(site, "album_id, user_id, title", "1, 0, 'old'")
    site.rolling("--abort", code=-9, KILL_AT=where)
    for server in (site.pair.first, site.pair.second):
        restart(site, server)
    site.rolling("--abort")
    assert_old(site, old, [1])
