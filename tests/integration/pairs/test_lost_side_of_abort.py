"""A side is lost for ever while an upgrade of its pair is being aborted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pairs.open_sides import accepts_writes
from tests.integration.pairs.site import RollingSite
from tests.integration.pairs.test_lost_side import (
    NEW,
    OLD,
    assert_survives,
    await_received,
    give_up,
    make_anew,
    write_as_new_release,
    write_as_old_release,
)
from tests.integration.pairs.test_rolling import ALBUM, EXECUTE
from tests.services.replication import MasterPair, execute

_ABORT = "sharded_orm.operations.pairs.rolling_abort._Abort"
_STEPS = "sharded_orm.operations.pairs.round_steps.RoundSteps"
_CHANGE = "sharded_orm.operations.pairs.schema_return._execute"
#: The points at which the abort is killed, after the switch of the round.
SWITCHING_BACK = (
    f"after:{_STEPS}.close:1",
    f"after:{_STEPS}.catch_up:1",
    f"before:{_ABORT}._publish:1",
    f"after:{_ABORT}._publish:1",
    f"after:{_STEPS}.open:1",
)
RETURNING = (
    f"before:{_CHANGE}:1",
    f"after:{_CHANGE}:2",
    f"after:{_ABORT}._forget_steps:1",
    f"after:{_ABORT}.run:1",
)


@pytest.fixture
def site(pair: MasterPair, tmp_path: Path) -> RollingSite:
    site = RollingSite(pair, tmp_path)
    site.create_databases()
    write_as_old_release(site.pair.first, 1)
    site.pair.settle()
    return site


def abort_until(site: RollingSite, where: str, *, until: str = "switch") -> tuple[object, ...]:
    """Kill the abort of an upgrade. Return the row that was written before it."""
    site.rolling("--until", until)
    active = site.server(site.active()[0])
    write_as_old_release(active, 2)
    await_received(site, active)
    site.rolling("--abort", code=-9, KILL_AT=where)
    return (2, *OLD)


def cases() -> list[object]:
    routine = {("db2", RETURNING[1]), ("db1", SWITCHING_BACK[2])}
    every = [
        *(("db2", where) for where in (*SWITCHING_BACK, *RETURNING)),
        *(("db1", where) for where in SWITCHING_BACK),
    ]
    return [
        pytest.param(*case, marks=() if case in routine else pytest.mark.long) for case in every
    ]


@pytest.mark.parametrize(("lost", "where"), cases())
def test_a_side_that_is_lost_during_an_abort_is_given_up(
    site: RollingSite, tmp_path: Path, lost: str, where: str
) -> None:
    row = abort_until(site, where)
    server = site.server(lost)
    survivor = site.pair.other(server)
    server.kill()
    assert f"The rolling upgrade has ended: {lost} was given up" in give_up(site, lost)
    assert accepts_writes(survivor)
    assert_survives(site, lost, row)
    server.start()
    rejoin = ("pairs", "rejoin", lost, "--folder", str(tmp_path))
    assert "was given up during a rolling upgrade" in site.manage(*rejoin).err
    make_anew(site, server)
    done = site.manage(*rejoin)
    assert done.code == 0, done.err
    done = site.manage("shards", "switch", "photos", "0", "--to-side", lost)
    assert done.code == 0, done.err
    write_as_new_release(server, 4)
    site.pair.settle()
    assert site.pairs("check").code == 0
    for each in (site.pair.first, site.pair.second):
        rows = execute(each, f"SELECT * FROM {ALBUM} ORDER BY 1")
        assert rows == [(1, *OLD), row, (3, *NEW), (4, *NEW)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "where"),
    [
        ("db1", f"before:{_ABORT}.run:1"),
        ("db1", f"after:{_STEPS}.hold:1"),
        ("db2", f"before:{_ABORT}.run:1"),
        ("db2", f"after:{_STEPS}.hold:1"),
        ("db2", f"after:{_CHANGE}:2"),
    ],
)
def test_a_side_that_is_lost_before_the_switch(site: RollingSite, where: str, lost: str) -> None:
    row = abort_until(site, where, until="compare")
    site.server(lost).kill()
    give_up(site, lost)
    assert_survives(site, lost, row)


@pytest.mark.parametrize("where", [RETURNING[1]])
def test_the_side_with_the_old_schema_is_needed_once_it_is_given_back(
    site: RollingSite, where: str
) -> None:
    abort_until(site, where)
    site.pair.first.kill()
    for check in ("--check", "--no-input"):
        refused = give_up(site, "db1", check=check, code=1)
        assert "only 'db1' knows that schema: start 'db1' again" in refused
    status = site.manage("shards", "status").out
    assert "end the upgrade by 'manage.py shards switch GROUP --all-from NODE --force'" in status
    assert "The pair db1 and db2 could not be asked: node 'db1' does not answer" in status
    site.pair.first.start()
    assert site.pairs("rejoin", "db1").code == 0
    site.rolling("--abort")
    site.pair.settle()
    assert site.pairs("check", "db1", "db2").code == 0
    for each in (site.pair.first, site.pair.second):
        assert execute(each, f"SELECT * FROM {ALBUM}") == [(1, 0, "old"), (2, 0, "old")]


@pytest.mark.long
def test_the_operator_has_made_the_new_schema_by_hand(site: RollingSite) -> None:
    """No table was changed back yet, so nothing is left to do but to say so in the journal."""
    row = abort_until(site, RETURNING[0])
    site.pair.first.kill()
    give_up(site, "db1", code=1)
    site.journal(
        "UPDATE sharded_orm_run SET arguments = json_remove(arguments, '$.returning')"
        " WHERE kind = 'rolling' AND unfinished"
    )
    give_up(site, "db1")
    assert_survives(site, "db1", row)


@pytest.mark.long
@pytest.mark.parametrize("where", [f"before:{_CHANGE}:1", f"after:{_CHANGE}:1"])
def test_a_side_is_lost_while_writes_are_stopped(site: RollingSite, where: str) -> None:
    command = ("migrate_shards", "albums", "--rolling")
    kill = {"KILL_AT": f"after:{EXECUTE}:2"}
    assert site.manage(*command, "--stop-writes", **kill).code == -9
    assert site.manage(*command, "--abort", KILL_AT=where).code == -9
    site.server("db2").kill()
    give_up(site, "db2")
    assert accepts_writes(site.pair.first)
    assert execute(site.pair.first, f"SELECT * FROM {ALBUM}") == [(1, 0, "old")]
    assert "4 shards are migrated" in site.manage("migrate_shards", "albums").out
    assert execute(site.pair.first, f"SELECT * FROM {ALBUM}") == [(1, 0, 5, None)]
