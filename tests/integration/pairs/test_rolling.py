"""``manage.py migrate_shards --rolling``: a pair gets a new schema while an old release writes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

from tests.integration.pairs.site import SCHEMAS, RollingSite
from tests.services.replication import (
    APPLICATION,
    OPERATOR,
    LoggingServer,
    MasterPair,
    execute,
    execute_alone,
)
from tests.services.server import HOST

TARGET = ("albums", "0003")
ALBUM = "photos_00000.albums_album"
EXECUTE = "sharded_orm.operations.pairs.rolling_upgrade._Upgrade._execute"
STEPS = ("migrate-passive", "compare", "switch", "migrate-other", "finish")


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    return site


class OldRelease(threading.Thread):
    """Writes albums to shard 0 on the side that takes them, with the columns of the old schema."""

    def __init__(self, site: RollingSite) -> None:
        super().__init__(daemon=True)
        self._servers = (site.pair.first, site.pair.second)
        self._stopped = threading.Event()
        self.written: list[int] = []
        self.errors: list[str] = []

    def run(self) -> None:
        connections = [self._connect(server) for server in self._servers]
        sides = itertools.cycle(connections)
        side = next(sides)
        for number in itertools.count():
            if self._stopped.is_set():
                break
            try:
                with side.cursor() as cursor:
                    cursor.execute(
                        f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES (%s, 0, 'old')",
                        (number,),
                    )
            except MySQLdb.OperationalError as exc:
                if exc.args[0] != 1644:  # the refusal of a fence
                    self.errors.append(str(exc))
                side = next(sides)
            else:
                self.written.append(number)
        for connection in connections:
            connection.close()

    @staticmethod
    def _connect(server: LoggingServer) -> Any:
        return MySQLdb.connect(
            host=HOST, port=server.port, user=APPLICATION[0], passwd=APPLICATION[1], autocommit=True
        )

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@contextlib.contextmanager
def old_release(site: RollingSite) -> Iterator[OldRelease]:
    writer = OldRelease(site)
    writer.start()
    try:
        yield writer
    finally:
        writer.stop()


def definitions(site: RollingSite) -> set[str]:
    """Return the definitions of the table of albums on all shards of both servers."""
    return {
        str(execute(server, f"SHOW CREATE TABLE {schema}.albums_album")[0][1])
        for server in (site.pair.first, site.pair.second)
        for schema in SCHEMAS
    }


def pair_problems(site: RollingSite) -> list[str]:
    """Return what ``shards status`` finds, but for migrations that are not applied."""
    problems = site.manage("shards", "status", "--json").json["problems"]
    return [problem for problem in problems if "Run 'manage.py migrate_shards" not in problem]


def change_alter(site: RollingSite, verb: str, preposition: str) -> None:
    """Give the application's account the privilege to alter tables, or take it away."""
    for server in (site.pair.first, site.pair.second):
        execute_alone(server, f"{verb} ALTER ON `%`.* {preposition} {APPLICATION[0]}@'%'")


def assert_upgraded(site: RollingSite, written: list[int]) -> None:
    site.pair.settle()
    first, second = (
        execute(server, f"SELECT * FROM {ALBUM} ORDER BY 1")
        for server in (site.pair.first, site.pair.second)
    )
    assert first == second == [(number, 0, "old", 5, None) for number in written]
    assert site.active() == ["db2", "db2", "db1", "db1"]
    assert len(definitions(site)) == 1
    assert site.pairs("check", "db1", "db2").code == 0


def test_a_pair_gets_a_new_schema_while_the_old_release_writes(site: RollingSite) -> None:
    plan = site.rolling("--plan").out
    assert [line.split(":")[0].strip() for line in plan.splitlines()[2:7]] == list(STEPS)
    with old_release(site) as writer:
        done = site.rolling()
    assert writer.errors == []
    assert len(writer.written) > 10
    assert_upgraded(site, writer.written)
    assert "albums.album.stars: the default stays in the database" in done.out
    (definition,) = definitions(site)
    assert "`stars` int(11) NOT NULL DEFAULT 5" in definition
    assert site.rolling().out.startswith("db1 and db2: nothing to migrate.")
    change_alter(site, "REVOKE", "FROM")
    try:
        site.rolling("--drop-defaults")
    finally:
        change_alter(site, "GRANT", "TO")
    site.pair.settle()
    (definition,) = definitions(site)
    assert "`stars` int(11) NOT NULL," in definition
    assert site.pairs("check", "db1", "db2").code == 0


def test_it_stops_after_a_step_and_goes_on(site: RollingSite) -> None:
    """Meanwhile other operations are refused, and name what to do."""
    written = []
    for number, step in enumerate(STEPS[:-1]):
        active = site.pair.first if number < 3 else site.pair.second
        execute(
            active, f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES ({number}, 0, 'old')"
        )
        written.append(number)
        done = site.rolling("--until", step)
        assert f"Stopped before the step {STEPS[number + 1]}" in done.out
    assert (
        "a rolling upgrade of 'db1' and 'db2' goes on"
        in site.pairs("check", "db1", "db2", code=1).err
    )
    status = "\n".join(site.manage("shards", "status", "--json").json["problems"])
    assert "goes on with its step 'finish', and replication stands still" in status, status
    assert "Mend the replication" not in status, status
    switch = ("shards", "switch", "photos", "2")
    for command in (("migrate_shards",), switch, (*switch, "--check")):
        refused = site.manage(*command)
        assert refused.code == 1
        assert "--rolling'" in refused.err
        assert "MASTER_DELAY" not in refused.err
    other = site.manage("migrate_shards", "albums", "0002", "--rolling")
    assert "finish it first, by the same command" in other.err
    site.rolling()
    assert_upgraded(site, written)


def test_operations_that_need_another_way_are_refused_before_anything_starts(
    site: RollingSite,
) -> None:
    before = definitions(site)
    refused = site.manage("migrate_shards", "--rolling", "albums")
    assert refused.code == 1
    assert (
        "albums.0004_no_title: Remove field title from album: the other side still sends"
        in refused.err
    )
    assert "Instead, deploy a release whose models do not have it" in refused.err
    assert definitions(site) == before
    assert site.pairs("check", "db1", "db2").code == 0


def test_what_would_fail_later_is_refused_before_anything_starts(site: RollingSite) -> None:
    before = definitions(site)
    unknown = site.manage("migrate_shards", "albums", "0009", "--rolling")
    assert unknown.code == 1
    documented = copy.deepcopy(site.setting)
    site.setting["GROUPS"]["photos"]["RANGES"] = site.document()["groups"]["photos"]["RANGES"]
    del site.setting["TOPOLOGY"]
    site.save()
    assert "Sides cannot be switched" in site.rolling(code=1).err
    site.setting = documented
    site.save()
    assert definitions(site) == before
    # Neither run is left unfinished.
    assert site.manage("migrate_shards", "albums", "0001").code == 0


def test_only_migrations_run_that_were_planned(site: RollingSite) -> None:
    """A release with more migrations has come to the machine since the upgrade began."""
    before = definitions(site)
    site.rolling(code=-9, KILL_AT=f"before:{EXECUTE}:1")
    site.run(
        "from sharded_orm.models import OperationRun; run = OperationRun.objects.get(kind='rolling');"
        " run.arguments['migrations'].remove('albums.0003_note'); run.save(); answer = None"
    )
    assert "albums.0003_note would run, too" in site.rolling(code=1).err
    assert definitions(site) == before
    assert "a rolling upgrade" in site.pairs("setup", "db1", "db2", code=1).err


def test_migrate_shards_fences_the_tables_that_it_creates(site: RollingSite) -> None:
    assert site.manage("migrate_shards", "albums", "0003").code == 0
    insert = "INSERT INTO photos_0000{}.albums_tag VALUES (1, 0)"
    with contextlib.closing(OldRelease._connect(site.pair.second)) as passive:
        with pytest.raises(MySQLdb.OperationalError, match="passive side of a pair"):
            passive.cursor().execute(insert.format(0))
        passive.cursor().execute(insert.format(2))
    execute_alone(site.pair.second, f"REVOKE TRIGGER ON `%`.* FROM {OPERATOR[0]}@'%'")
    try:
        done = site.manage("migrate_shards", "albums")
        assert done.code == 1
        assert "run 'manage.py shards switch photos 0-3 --fence'" in done.err
    finally:
        execute_alone(site.pair.second, f"GRANT TRIGGER ON `%`.* TO {OPERATOR[0]}@'%'")


@pytest.mark.long
def test_migrate_shards_does_not_wait_for_a_passive_side_that_lags(site: RollingSite) -> None:
    execute(site.pair.second, "STOP SLAVE SQL_THREAD")
    try:
        done = site.manage("migrate_shards", "albums", "0003")
    finally:
        execute(site.pair.second, "START SLAVE")
    assert done.code == 0
    assert "'db2' did not get to" in done.err
    assert "run 'manage.py shards switch photos 0-3 --fence'" in done.err
    site.pair.settle()
    assert site.manage("migrate_shards", "albums").code == 0


@pytest.mark.long
def test_a_passive_side_to_which_a_new_shard_has_not_come_lags_only(site: RollingSite) -> None:
    execute(site.pair.first, "DROP DATABASE photos_00000")
    site.pair.settle()
    execute(site.pair.second, "STOP SLAVE SQL_THREAD")
    try:
        done = site.manage("migrate_shards", "--create", "albums")
    finally:
        execute(site.pair.second, "START SLAVE")
    assert done.code == 0, done.err
    assert "'db2' did not get to" in done.err


def test_sides_that_differ_are_not_switched(site: RollingSite) -> None:
    execute(site.pair.first, f"INSERT INTO {ALBUM} (album_id, user_id, title) VALUES (1, 0, 'old')")
    site.pair.settle()
    execute_alone(
        site.pair.second,
        "SET @sharded_orm_capture_passes = 1",
        f"UPDATE {ALBUM} SET title = 'other'",
    )
    error = site.rolling(code=1).err
    assert f"different rows of {ALBUM}" in error
    assert "make 'db2' anew from it" in error
    assert site.active() == ["db1", "db1", "db2", "db2"]
    execute_alone(
        site.pair.second, "SET @sharded_orm_capture_passes = 1", f"UPDATE {ALBUM} SET title = 'old'"
    )
    site.rolling()
    assert_upgraded(site, [1])


@pytest.mark.long
def test_an_operation_that_is_unclear_on_one_side_can_be_settled(site: RollingSite) -> None:
    executed = "sharded_orm.operations.migrate.executor.ScriptExecutor._execute"
    site.rolling("--parallel", "1", code=-9, KILL_AT=f"before:{executed}:1")
    assert site.run(
        "from sharded_orm.models import OperationStep;"
        " steps = OperationStep.objects.filter(run__kind='migrate side', alias='photos_00000');"
        " answer = steps.update(state='unclear')"
    )
    assert "photos_00000" in site.rolling(code=1).err
    done = site.manage("migrate_shards", "--settle", "photos_00000=undone")
    assert done.code == 0, done.err
    site.rolling()
    assert_upgraded(site, [])


@pytest.mark.long
@pytest.mark.parametrize(
    "where",
    [
        *(
            f"{side}:{EXECUTE}:{number}"
            for side in ("before", "after")
            for number in range(1, 11)
        ),
        *(f"after:migrate:{number}" for number in range(1, 9)),
        *(f"before:sharded_orm.operations.migrate.executor.ScriptExecutor._execute:{n}" for n in range(1, 17)),
        *(f"after:sharded_orm.operations.migrate.executor.ScriptExecutor._execute:{n}" for n in range(1, 17)),
        "after:sharded_orm.backends.mysql.pair_side.MySQLPairSide.run_until:1",
        "after:sharded_orm.backends.mysql.pair_side.MySQLPairSide.hold:2",
    ],
)  # fmt: skip
def test_a_killed_upgrade_goes_on(site: RollingSite, where: str) -> None:
    with old_release(site) as writer:
        site.rolling("--parallel", "1", code=-9, KILL_AT=where)
        site.rolling()
    assert writer.errors == []
    assert_upgraded(site, writer.written)
