"""The journal: who holds a run, what a run leaves, and what a process without its run may write."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import LeaseLost, OperationHeld
from sharded_orm.models import OperationRun, OperationScript, OperationStep
from sharded_orm.operations.exceptions import JournalMissing
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.journal import (
    BATCH,
    CARRIED,
    FAILED,
    PENDING,
    RUNNING,
    STOPPED,
    UNCLEAR,
    JournalRun,
    Scripts,
    hold_run,
    last_run,
    open_steps,
)
from tests.patience import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_backend]
ONE, TWO = "photos_00001", "photos_00002"


def migrating(**arguments: Any) -> Any:
    return hold_run("migrate", "photos", arguments)


def row(run: JournalRun) -> OperationRun:
    return OperationRun.objects.get(pk=run.id)


def states() -> dict[tuple[int, str], str]:
    return {
        (step.run_id, step.alias): step.state for step in OperationStep.objects.order_by("run_id")
    }


# ##### The holder of a run #####


def test_who_comes_second_is_told_who_holds_the_run() -> None:
    with migrating() as run:
        with pytest.raises(OperationHeld) as caught, migrating():
            pass
        held = row(run)
        assert f"run {run.id}," in str(caught.value)
        assert f"{held.user}@{held.host} (process {held.pid})" in str(caught.value)
        # Another subject or kind does not collide.
        with hold_run("migrate", "events", {}), hold_run("check", "photos", {}):
            pass


def test_a_run_that_was_left_is_taken_at_once() -> None:
    with migrating(target="one") as first:
        pass
    with migrating(target="two") as second:
        assert second.resumed
        assert second.id == first.id
        assert second.arguments == {"target": "one"}


def test_a_run_whose_process_died_on_this_machine_is_taken_over_at_once() -> None:
    with migrating() as run:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        OperationRun.objects.filter(pk=run.id).update(pid=dead.pid)
        with migrating() as second:
            assert second.id == run.id


def test_a_run_whose_process_nobody_waited_for_is_taken_over_at_once() -> None:
    """For example in a container whose first process does not wait for orphans."""
    with migrating() as run:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        OperationRun.objects.filter(pk=run.id).update(pid=dead.pid)
        with migrating() as second:
            assert second.id == run.id
        dead.wait()


def test_a_run_of_another_machine_is_taken_over_when_it_is_silent() -> None:
    """Its process id means nothing here, even if no process has it."""
    with migrating() as run:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        rows = OperationRun.objects.filter(pk=run.id)
        rows.update(machine="elsewhere", pid=dead.pid)
        with pytest.raises(OperationHeld), migrating():
            pass
        rows.update(alive_at=DatabaseClock() - timedelta(seconds=leases.EXPIRES + 1))
        with migrating() as second:
            assert second.id == run.id


@pytest.mark.mysql_settings  # SQLite's test database is in memory, where a reader locks tables
def test_signs_of_life_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "INTERVAL", 0.01)
    with migrating() as run:
        before = row(run)
        eventually(lambda: row(run).signs > before.signs + 2)
        now = row(run)
        assert now.alive_at is not None
        assert before.alive_at is not None
        assert now.alive_at > before.alive_at


@pytest.mark.parametrize(
    "write",
    [
        lambda run, step: step.begin(operation="AddField"),
        lambda run, step: step.mark_done(),
        lambda run, step: step.mark_failed(ValueError()),
        lambda run, step: run.create_steps([TWO]),
        lambda run, step: run.note(target="mine"),
        lambda run, step: run.finish(),
    ],
)
def test_who_lost_the_run_writes_nothing(write: Callable[[Any, Any], None]) -> None:
    with migrating() as run:
        run.create_steps([ONE])
        step = run.step(ONE)
        run.check()
        OperationRun.objects.filter(pk=run.id).update(token="another's", user="bob")
        with pytest.raises(LeaseLost):
            write(run, step)
        with pytest.raises(LeaseLost):
            run.check()
        assert states() == {(run.id, ONE): PENDING}
    # And ends no run of another process.
    assert row(run).token == "another's"
    assert row(run).arguments == {}


def test_who_could_give_no_sign_for_too_long_stops_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with migrating() as run:
        run.check()
        monkeypatch.setattr(leases, "EXPIRES", 0.0)
        with pytest.raises(LeaseLost):
            run.check()


def test_a_run_that_is_given_up_is_another() -> None:
    with migrating() as first:
        pass
    with hold_run("migrate", "photos", {}, resume=False) as second:
        assert not second.resumed
        assert second.id != first.id
    assert row(first).state == "abandoned"


# ##### Where it is refused #####


def test_inside_a_transaction_it_is_refused() -> None:
    with transaction.atomic(), pytest.raises(JournalMissing, match="inside a transaction"):
        with migrating():
            pass
    assert not OperationRun.objects.exists()


def test_without_its_tables_the_remedy_is_named() -> None:
    with connection.schema_editor() as editor:
        for model in (OperationScript, OperationStep, OperationRun):
            editor.delete_model(model)
    try:
        with pytest.raises(JournalMissing, match=r"manage\.py migrate sharded_orm"), migrating():
            pass
        with pytest.raises(JournalMissing):
            last_run("migrate", "photos")
    finally:
        with connection.schema_editor() as editor:
            for model in (OperationRun, OperationStep, OperationScript):
                editor.create_model(model)


# ##### Steps #####


def test_a_step_tells_what_is_under_way() -> None:
    with migrating() as run:
        run.create_steps([ONE, TWO])
        run.create_steps([ONE, TWO])  # no second ones
        step = run.step(ONE)
        step.begin(migration="photos.0002_title", operation="AddField", position={"index": 3})
        step.begin(position={"index": 4})
        stored = run.step(ONE)
        assert (stored.state, stored.migration, stored.operation) == (
            RUNNING, "photos.0002_title", "AddField"
        )  # fmt: skip
        assert stored.position == {"index": 4}
        step.mark_done()
        assert run.by_state() == {"done": 1, "pending": 1}


def test_a_step_that_is_stopped_has_begun_or_has_not() -> None:
    with migrating() as run:
        run.create_steps([ONE, TWO])
        one, two = run.step(ONE), run.step(TWO)
        one.begin()
        one.mark_stopped()
        two.begin(position={"index": 1})
        two.mark_stopped()
        assert states() == {(run.id, ONE): PENDING, (run.id, TWO): STOPPED}


def test_causes_are_kept_in_one_line() -> None:
    with migrating() as run:
        run.create_steps([ONE, TWO])
        run.step(TWO).mark_failed(ValueError("no\nsuch  column"))
        run.step(ONE).mark_unclear("look at the table")
        assert [(step.alias, step.state, step.error) for step in run.failures()] == [
            (ONE, UNCLEAR, "look at the table"),
            (TWO, FAILED, "ValueError: no such column"),
        ]


def test_what_a_finished_run_left_is_carried_to_the_next() -> None:
    three, four = "photos_00003", "photos_00004"
    with migrating() as first:
        first.create_steps([ONE, TWO, three, four])
        first.step(ONE).begin(migration="photos.0002", position={"index": 7})
        first.step(TWO).mark_failed(ValueError("full"))
        first.step(three).mark_done()
        first.finish("failed")
    assert open_steps("migrate", "photos").count() == 2
    with migrating() as second:
        assert not second.resumed
        second.create_steps([ONE, three, four])
        one = second.step(ONE)
        assert (one.state, one.migration, one.position) == (RUNNING, "photos.0002", {"index": 7})
        assert second.step(three).state == second.step(four).state == PENDING
    assert states()[first.id, ONE] == CARRIED
    # It was not among those: it waits for a run that asks for it.
    assert states()[first.id, TWO] == FAILED
    assert {row.alias for row in open_steps("migrate", "photos")} == {ONE, TWO}
    with hold_run("migrate", "events", {}) as other:
        other.create_steps([TWO])
        assert other.step(TWO).state == PENDING


def test_scripts_are_the_first_ones_and_stay_while_they_are_needed() -> None:
    scripts = Scripts()
    with migrating() as first:
        assert scripts.get(first, "key") is None
        assert scripts.put(first, "key", {"sql": ["one"]}) == {"sql": ["one"]}
        assert scripts.put(first, "key", {"sql": ["two"]}) == {"sql": ["one"]}
        first.create_steps([ONE])
        first.step(ONE).begin(position={"run": first.id, "script": "key"})
        first.finish("failed")
    assert scripts.get(first.id, "key") == {"sql": ["one"]}
    with migrating() as second:
        second.create_steps([ONE])
        assert scripts.get(second, "key") is None
        second.step(ONE).mark_done()
        second.finish()
    assert not OperationScript.objects.exists()


def test_the_last_run_as_others_see_it() -> None:
    assert last_run("migrate", "photos") is None
    with migrating() as run:
        run.create_steps([ONE])
        seen = last_run("migrate", "photos")
        assert seen is not None
        assert (seen.id, seen.state, seen.held, seen.by_state()) == (
            run.id, "running", True, {"pending": 1}
        )  # fmt: skip
    seen = last_run("migrate", "photos")
    assert seen is not None
    assert (seen.state, seen.held) == ("broken off", False)
    with migrating() as run:
        run.finish("failed", "3 of 64 shards are not migrated")
    seen = last_run("migrate", "photos")
    assert seen is not None
    assert (seen.state, seen.error) == ("failed", "3 of 64 shards are not migrated")
    assert seen.finished_at is not None


# ##### Costs #####


def test_costs_in_statements() -> None:
    with migrating() as run:
        with CaptureQueriesContext(
            connection,
        ) as made:
            run.create_steps(f"photos_{number:05d}" for number in range(2 * BATCH))
        # For each batch: begin, guard, unfinished steps, existing steps, insert, carried-over
        # steps, commit; SQLite inserts fewer rows at once.
        inserts = sum("INSERT" in query["sql"] for query in made)
        assert len(made) - inserts <= 2 * 6
        if connection.vendor == "mysql":
            assert inserts == 2
        with CaptureQueriesContext(connection) as made:
            step = run.step(ONE)
            step.begin(operation="AddField", position={"index": 1})
            step.mark_done()
        assert len(made) == 2  # steps() need not read the rows that it has just inserted
        with CaptureQueriesContext(connection) as made:
            assert run.step(ONE).state == "done"
        assert len(made) == 1


def test_memory_does_not_grow_with_the_shards() -> None:
    with migrating() as run:
        names = (f"photos_{number:05d}" for number in range(4096))
        run.create_steps([ONE])
        tracemalloc.start()
        try:
            run.create_steps(names)
            OperationStep.objects.update(state=FAILED, error="x" * 1000)
            assert sum(1 for _ in run.failures()) == 4096
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # The rows of a batch, and the driver's buffers for them.
        assert peak < 4 * 1024 * 1024
