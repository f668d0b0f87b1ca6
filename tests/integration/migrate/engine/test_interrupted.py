"""A shard whose migration was interrupted anywhere goes on as if nothing had happened.

Interrupted means here: an exception that nobody handles is raised right after the journal has
recorded a step (which then did not start), or right before it records the next one (so the last
step took effect). Real kills, also in the middle of a statement, are in ``test_kills``.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.runs.journal import JournalStep
from tests.integration.migrate.engine.failing import Broken
from tests.integration.migrate.engine.fleets import Fleet, Migrations

# On SQLite a transaction holds each migration, so few interruptions differ; ``test_kills`` has some of them.
pytestmark = [pytest.mark.every_backend, pytest.mark.long_on("sqlite")]


class Breaking:
    """Raises an exception at the given entry of the journal."""

    def __init__(self) -> None:
        self.left = 0
        self.before = False
        self.entries: list[str] = []

    def on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        at = JournalStep.begin

        def broken_at(step: JournalStep, **changes: Any) -> None:
            self.left -= 1
            if self.left == 0 and self.before:
                raise Broken
            at(step, **changes)
            self.entries.append(f"{step.migration}: {step.operation}")
            if self.left == 0:
                raise Broken

        monkeypatch.setattr(JournalStep, "begin", broken_at)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    made = Breaking()
    made.on(monkeypatch)
    return made


def broken_off_again_and_again(fleet: Fleet, breaking: Breaking, number: int, **how: Any) -> int:
    """Migrate in many attempts, each of which does one more step; return their number."""
    for attempt in count(1):
        # The first entry of an attempt often belongs to the step that it repeats.
        breaking.left = 2
        breaking.before = bool(attempt % 2)
        try:
            fleet.migrate(number, **how)
        except Broken:
            continue
        return attempt
    raise AssertionError


def test_forwards(fleet: Fleet, breaking: Breaking) -> None:
    fleet.create(0, 1)
    # Where a transaction holds each migration, the last few migrations show it all.
    start = "0001" if fleet.connection(0).vendor == "mysql" else "0022"
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", start)
    fleet.migrate_with_django(0)
    assert broken_off_again_and_again(fleet, breaking, 1) > 5
    fleet.assert_same(1, 0)


def test_backwards(fleet: Fleet, breaking: Breaking) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number)
    fleet.migrate_with_django(0, "fleet", "0020")
    target = ("fleet", "0020")
    assert broken_off_again_and_again(fleet, breaking, 1, target=target) > 5
    fleet.assert_same(1, 0)


def test_a_new_shard(fleet: Fleet, breaking: Breaking) -> None:
    fleet.create(0, 1)
    fleet.migrate_with_django(0)
    assert broken_off_again_and_again(fleet, breaking, 1) > 2
    fleet.assert_same(1, 0)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_migrations_that_change_nothing(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """One statement records them, and no step of the journal stands for it."""
    fleet.create(0, 1)
    fleet.migrate(0, 1)
    insert = "migrations.RunPython(failing.insert, migrations.RunPython.noop)"
    migrations.add("0002_insert", insert)
    for name in ("0003_nothing", "0004_nothing"):
        migrations.add(name, 'migrations.AlterModelOptions("album", {"verbose_name": "x"})')
    migrations.add("0005_insert", insert)
    record = Records.record

    def broken(records: Records, keys: Any, *, backwards: bool) -> None:
        is_it = list(keys) == [("fleet", "0003_nothing"), ("fleet", "0004_nothing")]
        if is_recorded or not is_it:
            record(records, keys, backwards=backwards)
        if is_it:
            raise Broken

    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(Records, "record", broken)
        fleet.migrate(0)
    fleet.migrate(0)
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)
    rows = "SELECT count(*) FROM fleet_album"
    assert fleet.execute(0, rows) == fleet.execute(1, rows)
