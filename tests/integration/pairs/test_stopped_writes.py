"""``manage.py migrate_shards --rolling --stop-writes``: what a rolling upgrade cannot do, with a pause."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.pairs.open_sides import accepts_writes, watched_sides
from tests.integration.pairs.site import SCHEMAS, RollingSite
from tests.integration.pairs.test_rolling import (
    ALBUM,
    EXECUTE,
    definitions,
    pair_problems,
)
from tests.integration.pairs.test_rolling_restarts import restart
from tests.integration.promotion.site import Done
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.services.replication import MasterPair, execute, execute_alone

ROWS = [(number, 0, f"title {number}") for number in range(450)]


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    insert_rows(site)
    return site


def insert_rows(site: RollingSite) -> None:
    values = ", ".join(f"({number}, {user}, '{title}')" for number, user, title in ROWS)
    execute(site.pair.first, f"INSERT INTO {ALBUM} VALUES {values}")
    site.pair.settle()


def stopped(site: RollingSite, *arguments: str, code: int = 0, **environment: str) -> Done:
    """Migrate all albums, which removes a column; the command must exit with the status ``code``."""
    done = site.manage(
        "migrate_shards", "albums", "--rolling", "--stop-writes", *arguments, **environment
    )
    assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
    return done


def writable(site: RollingSite) -> list[bool]:
    """Return for each server whether the application may write to shard 0."""
    return [accepts_writes(server) for server in (site.pair.first, site.pair.second)]


def assert_new(site: RollingSite) -> None:
    site.pair.settle()
    assert len(definitions(site)) == 1
    for server in (site.pair.first, site.pair.second):
        rows = execute(server, f"SELECT * FROM {ALBUM} ORDER BY 1")
        assert rows == [(number, user, 5, None) for number, user, _ in ROWS]
    assert_whole(site)


def assert_whole(site: RollingSite) -> None:
    assert writable(site) == [True, False]
    assert site.active() == ["db1", "db1", "db2", "db2"]
    assert site.pairs("check", "db1", "db2").code == 0
    assert pair_problems(site) == []


def assert_old(site: RollingSite, before: set[str]) -> None:
    site.pair.settle()
    assert definitions(site) == before
    for server in (site.pair.first, site.pair.second):
        assert execute(server, f"SELECT * FROM {ALBUM} ORDER BY 1") == ROWS
    assert_whole(site)


def test_a_column_is_removed_with_a_pause_that_is_told_before(site: RollingSite) -> None:
    refused = site.manage("migrate_shards", "albums", "--rolling")
    assert "--stop-writes does all of this" in refused.err
    plan = stopped(site, "--plan").out
    assert "Writes of these shards wait for about 1 s. --abort goes back until" in plan
    assert writable(site) == [True, False]
    done = stopped(site)
    assert "writes of photos 0-1 waited" in done.err
    assert_new(site)
    assert "makes no sense" in stopped(site, "--until", "compare", code=1).err


def test_an_upgrade_that_has_lost_a_column_is_aborted(site: RollingSite) -> None:
    """The passive side has no titles any more; it gets them from the active side."""
    before = definitions(site)
    stopped(site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
    assert writable(site) == [False, False]
    assert "title" not in str(execute(site.pair.second, f"SHOW CREATE TABLE {ALBUM}"))
    repaired = site.manage("shards", "switch", "photos", "--repair")
    assert repaired.code == 1
    assert "'manage.py migrate_shards albums --rolling --stop-writes' first" in repaired.err
    assert "begun with --stop-writes" in site.rolling(code=1).err
    status = site.manage("shards", "status", "--json").json["problems"]
    assert not any("'manage.py shards switch photos --repair'" in problem for problem in status)
    stopped(site, "--abort")
    assert_old(site, before)
    stopped(site)
    assert_new(site)


def test_sides_that_differ_do_not_stop_writes(site: RollingSite) -> None:
    change = "SET @sharded_orm_capture_passes = 1"
    execute_alone(site.pair.second, change, f"UPDATE {ALBUM} SET title = 'x' WHERE album_id = 7")
    assert f"different rows of {ALBUM}" in stopped(site, code=1).err
    assert writable(site) == [True, False]


def test_writes_stay_refused_while_the_sides_differ(site: RollingSite) -> None:
    stopped(site, code=-9, KILL_AT=f"before:{EXECUTE}:4")
    change = f"UPDATE {ALBUM} SET user_id = %s WHERE album_id = 7"
    execute_alone(site.pair.second, "SET @sharded_orm_capture_passes = 1", change % 9)
    assert f"different rows of {ALBUM}" in stopped(site, code=1).err
    assert writable(site) == [False, False]
    execute_alone(site.pair.second, "SET @sharded_orm_capture_passes = 1", change % 0)
    stopped(site)
    assert_new(site)


_EXECUTED = "sharded_orm.operations.migrate.executor.ScriptExecutor._execute"


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        *(f"{moment}:{EXECUTE}:{number}" for moment in ("before", "after") for number in range(1, 11)),
        *(f"after:{_EXECUTED}:{number}" for number in range(1, 25)),
        *(f"{moment}:sharded_orm.operations.pairs.round_steps.RoundSteps.close:{n}" for moment in ("before", "after") for n in (1, 2, 3)),
        *(f"before:sharded_orm.operations.pairs.round_steps.RoundSteps.open:{n}" for n in (1, 2)),
    ],
)  # fmt: skip
def test_a_killed_upgrade_goes_on(site: RollingSite, where: str) -> None:
    """Never is a side of a shard writable while its sides have different schemas."""
    with watched_sides(site.pair):
        stopped(site, "--parallel", "1", code=-9, KILL_AT=where)
        is_equal = len({
            str(execute(server, f"SHOW CREATE TABLE {SCHEMAS[0]}.albums_album"))
            for server in (site.pair.first, site.pair.second)
        }) == 1  # fmt: skip
        sides = writable(site)
        assert not sides[1]
        assert is_equal or sides == [False, False]
        stopped(site)
    assert_new(site)


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        *(f"{moment}:{EXECUTE}:{number}" for moment in ("before", "after") for number in (1, 2)),
        *(f"after:{_EXECUTED}:{number}" for number in range(1, 11)),
    ],
)
def test_a_killed_upgrade_is_aborted(site: RollingSite, where: str) -> None:
    before = definitions(site)
    stopped(site, "--parallel", "1", code=-9, KILL_AT=where)
    stopped(site, "--abort")
    assert_old(site, before)
    stopped(site)
    assert_new(site)


_ABORT_POINTS = [
    *(
        f"{moment}:sharded_orm.operations.pairs.schema_return.{name}:{number}"
        for moment in ("before", "after")
        for name, count in (("_execute", 4), ("close_side", 2), ("_forget_migrations", 2))
        for number in range(1, count + 1)
    ),
    *(
        f"{moment}:sharded_orm.backends.mysql.side_rows.MySQLSideRows.{name}:{number}"
        for moment in ("before", "after")
        for name, count in (("create_closed", 2), ("store", 3), ("accept_rows", 2))
        for number in range(1, count + 1)
    ),
    "before:sharded_orm.operations.pairs.round_steps.RoundSteps.open:1",
]


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        *_ABORT_POINTS,
        "after:sharded_orm.operations.pairs.round_steps.RoundSteps.open:1",
    ],
)
def test_a_killed_abort_goes_on(site: RollingSite, where: str) -> None:
    before = definitions(site)
    with watched_sides(site.pair):
        stopped(site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
        stopped(site, "--abort", code=-9, KILL_AT=where)
        is_open = where.startswith("after") and ".open:" in where
        assert writable(site) == [is_open, False]
        stopped(site, "--abort")
    assert_old(site, before)


@pytest.mark.long
@pytest.mark.parametrize("point", ["_require_primary_key", "close_side"])
def test_an_abort_that_was_silent_for_too_long_makes_no_table_anew(
    site: RollingSite, point: str
) -> None:
    """The first process is stopped beside its new table, when another one has ended its abort."""

    def table_id() -> object:
        tables = "information_schema.innodb_sys_tables WHERE name = 'photos_00000/albums_album'"
        return execute(site.pair.second, f"SELECT table_id FROM {tables}")

    before = definitions(site)
    stopped(site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
    command = ("migrate_shards", "albums", "--rolling", "--stop-writes", "--abort")
    where = f"before:sharded_orm.operations.pairs.schema_return.{point}:1"
    first = site.start(*command, STOP_AT=where)
    wait_until_stopped(first)
    site.let_lease_expire()
    stopped(site, "--abort")
    of_second = table_id()
    _out, err = go_on(first)
    assert "taken over by another process" in err
    assert table_id() == of_second
    assert_old(site, before)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_an_abort_that_is_killed_again_and_again(site: RollingSite, seed: int) -> None:
    before, points = definitions(site), random.Random(seed)
    with watched_sides(site.pair):
        stopped(site, code=-9, KILL_AT=f"after:{EXECUTE}:2")
        for where in points.sample(_ABORT_POINTS, 5):
            done = site.manage(
                "migrate_shards", "albums", "--rolling", "--stop-writes", "--abort", KILL_AT=where
            )
            assert done.code in (0, -9), done.err
            assert writable(site) == [done.code == 0, False]
            if done.code == 0:
                break
        else:
            stopped(site, "--abort")
    assert_old(site, before)


@pytest.mark.long
@pytest.mark.parametrize("option", [(), ("--abort",)])
@pytest.mark.parametrize("number", [1, 2])
def test_servers_restart_while_writes_are_stopped(
    site: RollingSite, number: int, option: tuple[str, ...]
) -> None:
    before = definitions(site)
    stopped(site, code=-9, KILL_AT=f"after:{EXECUTE}:{number}")
    if option:
        where = "before:sharded_orm.operations.pairs.round_steps.RoundSteps.open:1"
        stopped(site, *option, code=-9, KILL_AT=where)
    for server in (site.pair.first, site.pair.second):
        restart(site, server)
    assert writable(site) == [False, False]
    stopped(site, *option)
    if option:
        assert_old(site, before)
    else:
        assert_new(site)
