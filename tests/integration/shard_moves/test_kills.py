"""A mover that is killed at any moment: one command brings the shard to its old or its new place."""

from __future__ import annotations

import signal

import pytest

from tests.integration.shard_moves.site import Site

_MOVER = "sharded_orm.operations.shard_moves.shard_mover.ShardMover"
_RECORD = "sharded_orm.operations.shard_moves.record.ShardMoveRecord"
_CAPTURE = "sharded_orm.backends.change_capture.ChangeCapture"
_ACCESS = "sharded_orm.backends.row_access.RowAccess"
#: The process dies at the end of that call of the method.
BEFORE_HIDING = [
    f"{_RECORD}.enter:1",
    f"{_CAPTURE}.watch:1",
    f"{_MOVER}._prepare:1",
    f"{_ACCESS}.store:2",
    f"{_MOVER}._compare_open:1",
]
HIDDEN = [f"{_MOVER}._hide:1", f"{_MOVER}._copy_the_rest:1", f"{_RECORD}.enter:3"]
PUBLISHED = [f"{_RECORD}.publish:1", f"{_MOVER}._switch:1", f"{_RECORD}.keep_until:1"]
# A kill is the same for the code on each backend: SQLite has every other one in the routine runs.
MOMENTS = [
    moment if not number % 2 else pytest.param(moment, marks=pytest.mark.long_on("sqlite"))
    for number, moment in enumerate(BEFORE_HIDING + HIDDEN + PUBLISHED)
]


def killed(site: Site, moment: str, *arguments: str) -> None:
    done = site.python(
        "manage.py", "shards", "move", "accounts", "0", "--to", "db2", *arguments, KILL_AT=moment
    )
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_repair_ends_what_was_left(site: Site, moment: str) -> None:
    _, before = site.state()
    killed(site, moment)
    if moment in BEFORE_HIDING or moment == PUBLISHED[-1]:
        assert site.state()[1] == before
    report = site.move("accounts", "--repair", "--json").json
    assert report["failures"] == {}
    assert site.state() == ("db2" if moment in PUBLISHED else "db1", before)
    if moment not in PUBLISHED:
        assert site.left() == ""
    site.run("Account.objects.create(name='later')")


@pytest.mark.long_on("sqlite")
@pytest.mark.parametrize("moment", [BEFORE_HIDING[3], HIDDEN[0], PUBLISHED[0]])
def test_the_same_command_goes_on(site: Site, moment: str) -> None:
    _, before = site.state()
    killed(site, moment)
    site.move("accounts", "0", "--to", "db2")
    assert site.state() == ("db2", before)
    site.move("accounts", "--cleanup")
    assert site.left() == ""


def test_a_move_that_was_broken_off_is_a_problem_of_its_group(site: Site) -> None:
    killed(site, BEFORE_HIDING[0])
    remedy = "'manage.py shards move accounts --repair'"
    assert remedy in site.manage("shards", "status").out
    assert remedy in site.manage("shards", "status", "--json").json["problems"][0]
    assert remedy in site.manage("shards", "check", "--sample", "0", code=1).err
    assert remedy not in site.manage("shards", "status", "--group", "books").out
    site.move("accounts", "--repair")
    assert remedy not in site.manage("shards", "status").out


def test_a_clean_up_that_was_killed_after_it_dropped_the_tables(site: Site) -> None:
    site.move("accounts", "0", "--to", "db2")
    cleanup = ("manage.py", "shards", "move", "accounts", "--cleanup")
    module = "sharded_orm.operations.shard_moves.leftovers"
    assert site.python(*cleanup, KILL_AT=f"{module}.remove_copy:1").code == -signal.SIGKILL
    said = site.move("accounts", "--cleanup")
    assert "tables of shard 0" in said.out + said.err
    assert "were not deleted" not in said.out + said.err
    assert "old tables" not in (again := site.move("accounts", "--cleanup")).out + again.err
    assert site.left() == ""
