"""Several processes on one group: one works, the others are refused; kills, takeovers, signals."""

from __future__ import annotations

import signal

import pytest

from tests.integration.migrate.fleet_project import ADD_NOTE, MAY_FAIL, WAITS, Fleet
from tests.patience import PATIENCE

FIRST = "id user_id title"
NOTED = "id user_id title note"
CANARY = "shop_00000"
ALL = [f"shop_{number:05d}" for number in range(8)]

RUNS = """
from sharded_orm.models import OperationRun
print([(run.pk, run.state, run.error) for run in OperationRun.objects.order_by("pk")][-1])
"""
TAKE = """
from sharded_orm.models import OperationRun
print(OperationRun.objects.filter(unfinished=True).update(token="another's"))
"""


@pytest.fixture
def waiting(migrated: Fleet) -> Fleet:
    """A migration that waits on the canary, then one that adds a column."""
    migrated.migration("0002_waits", WAITS)
    migrated.migration("0003_note", ADD_NOTE)
    migrated.waiting(CANARY)
    return migrated


def test_one_operator_works_and_the_other_is_told_who(waiting: Fleet) -> None:
    first = waiting.start("migrate_shards")
    assert waiting.wait_for_arrival() == CANARY
    for selection in ([], ["--shards", "5"], ["--retry-failed", "--shards", "5"]):
        second = waiting.manage(
            "migrate_shards", *selection, status="--retry-failed" not in selection
        )
        if "--retry-failed" in selection:
            continue  # no shard has failed, so it does nothing and does not collide
        assert f"(process {first.pid})" in second.err
        assert "Another process migrates shop." in second.err
    # Reading the status is always possible.
    status = waiting.manage("migrate_shards", "--status").out
    assert f"(process {first.pid}): running; 7 pending, 1 running" in status
    waiting.release()
    assert waiting.finish(first).out == "8 shards are migrated.\n"
    assert waiting.columns() == dict.fromkeys(ALL, NOTED)


def test_operators_who_start_at_once_migrate_once(migrated: Fleet) -> None:
    """Each refusal says why; no process disturbs another one."""
    migrated.migration("0002_note", ADD_NOTE)
    several = [migrated.start("migrate_shards") for _ in range(4)]
    outcomes = [(process.communicate(timeout=PATIENCE), process.returncode) for process in several]
    assert any(status == 0 for _, status in outcomes)
    for (_, err), status in outcomes:
        assert status == 0 or "Another process migrates shop." in err
    assert migrated.columns() == dict.fromkeys(ALL, NOTED)
    migrated.manage("migrate_shards", "--check")


def test_a_killed_operators_run_is_taken_over_at_once(waiting: Fleet) -> None:
    first = waiting.start("migrate_shards")
    waiting.wait_for_arrival()
    before = waiting.python(RUNS)
    first.kill()
    first.communicate()
    assert "broken off" in waiting.manage("migrate_shards", "--status").out
    waiting.waiting()
    assert waiting.manage("migrate_shards").err == (
        "shop: run 2 continues: no shard is migrated already, 8 are left.\n"
    )
    assert waiting.columns() == dict.fromkeys(ALL, NOTED)
    after = waiting.python(RUNS)
    assert before.replace("running", "done") == after


@pytest.mark.parametrize(
    ("stop", "line"),
    [
        ("shop_00003", "shards 0-2 are migrated already, 1 is left."),
        ("shop_00001", "shard 0 is migrated already, 3 are left."),
    ],
)
def test_a_resumed_run_names_what_is_done(migrated: Fleet, stop: str, line: str) -> None:
    migrated.migration("0002_waits", WAITS)
    migrated.waiting(stop)
    command = ("migrate_shards", "--node", "one", "--parallel", "1")
    first = migrated.start(*command)
    assert migrated.wait_for_arrival() == stop
    first.kill()
    first.communicate()
    migrated.waiting()
    done = migrated.manage(*command)
    assert done.err == f"shop: run 2 continues: {line}\n"
    assert done.out.startswith("4 shards are migrated, ")
    assert migrated.manage(*command).err == ""


def test_who_lost_its_lease_stops_before_the_next_thing(waiting: Fleet) -> None:
    first = waiting.start("migrate_shards")
    waiting.wait_for_arrival()
    assert waiting.python(TAKE) == "1\n"
    waiting.release()
    done = waiting.finish(first, status=1)
    assert "was taken over by another process" in done.err
    assert "Traceback" not in done.err
    assert set(waiting.columns().values()) == {FIRST}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_what_is_under_way(waiting: Fleet, signum: signal.Signals) -> None:
    first = waiting.start("migrate_shards", "--json")
    waiting.wait_for_arrival()
    first.send_signal(signum)
    assert first.stderr is not None
    first.stderr.readline()
    assert "Stopping after the statement under way" in first.stderr.readline()
    waiting.release()
    done = waiting.finish(first, status=128 + signum)
    assert done.json["stopped"] == f"stopped by {signum.name}"
    report = done.json["groups"]["shop"]
    assert report["left"] + report["migrated"] == 8
    assert report["failures"] == []
    assert "stopped by" in waiting.python(RUNS)
    assert [waiting.columns()[alias] for alias in ALL[1:]] == [FIRST] * 7
    waiting.waiting()
    waiting.manage("migrate_shards")
    assert waiting.columns() == dict.fromkeys(ALL, NOTED)


def test_a_second_signal_kills_and_the_run_is_resumed(waiting: Fleet) -> None:
    first = waiting.start("migrate_shards")
    waiting.wait_for_arrival()
    first.terminate()
    assert first.stderr is not None
    first.stderr.readline()
    first.stderr.readline()
    first.terminate()
    waiting.finish(first, status=-signal.SIGTERM)
    waiting.waiting()
    waiting.manage("migrate_shards")
    assert waiting.columns() == dict.fromkeys(ALL, NOTED)


# ##### A target that differs from the last run #####


UNIQUE = (
    'migrations.AddConstraint("order", models.UniqueConstraint(fields=["title"], name="titles"))'
)
TWICE = """
from django.db import connections
for alias in ("shop_00003", "shop_00006"):
    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO shop_order (user_id, title) VALUES (1, 'x'), (2, 'x')")
"""


@pytest.mark.parametrize("first", [MAY_FAIL, UNIQUE], ids=["python", "statement"])
def test_a_shard_of_which_nothing_was_done_goes_anywhere(migrated: Fleet, first: str) -> None:
    """It has failed in the first operation of a migration, so nothing of it was done."""
    migrated.python(TWICE)
    migrated.migration("0002_note", ADD_NOTE)
    migrated.migration("0003_fails", first, ADD_NOTE.replace('"note"', '"more"'))
    migrated.failing("shop_00003", "shop_00006")
    migrated.manage("migrate_shards", status=1)
    migrated.manage("migrate_shards", "shop", "0001", "--node", "one")
    columns = migrated.columns()
    assert [columns[alias] for alias in ALL[:4]] == [FIRST] * 4
    left = migrated.manage("migrate_shards", "--status", "--json").json["groups"]["shop"]
    assert left["left"] == {"failed": 1}


def test_a_shard_in_the_middle_ends_that_first(migrated: Fleet) -> None:
    migrated.migration("0002_note", ADD_NOTE, MAY_FAIL)
    migrated.failing("shop_00003")
    migrated.manage("migrate_shards", status=1)
    if migrated.columns()["shop_00003"] == FIRST:  # SQLite ran it in one transaction
        migrated.manage("migrate_shards", "shop", "zero")
        return
    done = migrated.manage("migrate_shards", "shop", "zero", "--canary", "0", status=1)
    assert "shop_00003 stands in the middle of shop.0002_note" in done.err
    assert "Not migrated: 1 of 8 shards." in done.err
    migrated.failing()
    migrated.manage("migrate_shards", "shop", "0002", "--shards", "3")
    migrated.manage("migrate_shards", "shop", "zero")
    assert migrated.columns() == {}


@pytest.mark.parametrize("answer", ["done", "undone"])
def test_what_nobody_can_tell_is_told_by_a_person(migrated: Fleet, answer: str) -> None:
    migrated.migration("0002_waits", WAITS, atomic=False)
    migrated.migration("0003_note", ADD_NOTE)
    migrated.waiting(CANARY)
    first = migrated.start("migrate_shards")
    migrated.wait_for_arrival()
    first.kill()
    first.communicate()
    migrated.waiting()

    done = migrated.manage("migrate_shards", status=1)
    (line,) = [line for line in done.err.splitlines() if line.startswith("shop_")]
    assert line.startswith(f"{CANARY}: unclear at shop.0002_waits: ")
    assert f"--settle {CANARY}=done" in line
    assert migrated.completed_shards() == []  # it was the canary, so the others wait as well
    # The others do not wait for the answer.
    done = migrated.manage("migrate_shards", status=1)
    assert line in done.err.splitlines()
    assert "Not migrated: 1 of 8 shards." in done.err
    assert migrated.completed_shards() == ALL[1:]
    assert migrated.columns() == {**dict.fromkeys(ALL[1:], NOTED), CANARY: FIRST}
    assert line in migrated.manage("migrate_shards", "--status").out
    migrated.manage("migrate_shards", "--check", status=1)

    settled = migrated.manage("migrate_shards", "--settle", f"{CANARY}={answer}")
    assert settled.out == f"{CANARY}: its operation counts as {answer}. 'migrate_shards' goes on.\n"
    migrated.manage("migrate_shards", "--settle", f"{CANARY}={answer}", status=1)
    migrated.manage("migrate_shards")
    assert migrated.completed_shards() == (ALL[1:] if answer == "done" else ALL)
    assert migrated.columns() == dict.fromkeys(ALL, NOTED)
    migrated.manage("migrate_shards", "--check")
