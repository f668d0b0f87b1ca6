"""A shard whose migration was broken off anywhere goes on as if nothing had happened.

Broken off here means that an exception that nobody handles ends it right after the journal was
told of a thing (which then was not begun), or right before it is told of the next one (so the
last one took effect). Real kills, also in the middle of a statement, are in ``test_kills``.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from sharded_orm.operations.runs.journal import JournalStep
from tests.integration.migrate.engine.failing import Broken
from tests.integration.migrate.engine.fleets import Fleet

pytestmark = pytest.mark.every_backend


class Breaking:
    """Breaks off at the entry of the journal whose turn it is."""

    def __init__(self) -> None:
        self.left = 0
        self.before = False
        self.told: list[str] = []

    def on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        at = JournalStep.begin

        def broken_at(step: JournalStep, **changes: Any) -> None:
            self.left -= 1
            if self.left == 0 and self.before:
                raise Broken
            at(step, **changes)
            self.told.append(f"{step.migration}: {step.operation}")
            if self.left == 0:
                raise Broken

        monkeypatch.setattr(JournalStep, "begin", broken_at)


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    made = Breaking()
    made.on(monkeypatch)
    return made


def broken_off_again_and_again(fleet: Fleet, breaking: Breaking, number: int, **how: Any) -> int:
    """Migrate in many attempts, each of which does one thing more; their number."""
    for attempt in count(1):
        # The first entry of an attempt is often that of the thing which it repeats.
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
    # Where a transaction holds each migration, few of them show it all.
    start = "0001" if fleet.connection(0).vendor == "mysql" else "0022"
    for number in (0, 1):
        fleet.slowly(number, "fleet", start)
    fleet.slowly(0)
    assert broken_off_again_and_again(fleet, breaking, 1) > 5
    fleet.assert_same(1, 0)


def test_backwards(fleet: Fleet, breaking: Breaking) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.slowly(number)
    fleet.slowly(0, "fleet", "0020")
    target = ("fleet", "0020")
    assert broken_off_again_and_again(fleet, breaking, 1, target=target) > 5
    fleet.assert_same(1, 0)


def test_a_new_shard(fleet: Fleet, breaking: Breaking) -> None:
    fleet.create(0, 1)
    fleet.slowly(0)
    assert broken_off_again_and_again(fleet, breaking, 1) > 2
    fleet.assert_same(1, 0)
