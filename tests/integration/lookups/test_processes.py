"""Processes that want the same value at once, and processes that are killed at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from sharded_orm.testing import ensure_shards
from tests.integration.lookups import processes
from tests.integration.lookups.processes import EMAILS, STEPS, Processes
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def forked(tmp_path: Path, db: None) -> Iterator[Processes]:
    are_files = connections["photos"].features_class.shards_are_files
    if not are_files:
        ensure_shards("photos")  # or each process would make the shards anew
    forked = Processes(tmp_path if are_files else None)
    yield forked
    if not are_files:
        forked.run(processes.clean)


def test_one_of_several_creators_gets_a_value(forked: Processes) -> None:
    won = Counter(email for got in forked.race() for email in got)
    assert won == Counter(f"{number}@x" for number in range(EMAILS))
    assert len(forked.run(processes.addresses)) == EMAILS
    assert forked.run(processes.state)[1:] == (0, 0)
    assert forked.run(processes.repaired)


@pytest.mark.long
@pytest.mark.parametrize("write", ["create", "change", "delete"])
def test_a_writer_is_killed_at_each_step(forked: Processes, write: str) -> None:
    # A creation may be a transaction by itself, which has no commit of its own.
    assert kill_at(forked, write, STEPS) >= (4 if write == "create" else 8)


@pytest.mark.mysql_settings
def test_a_writer_is_killed_before_and_after_its_commit(forked: Processes) -> None:
    steps = [step for step in STEPS if step[1] in ("_commit_writes", "remove") and step[2]]
    assert kill_at(forked, "change", [STEPS[1], *steps]) == 3


def kill_at(forked: Processes, write: str, steps: Sequence[tuple[str, str, bool]]) -> int:
    """Kill a process at each step, and compare what it leaves. Return the number of kills."""
    functions: dict[str, Any] = {
        "create": (processes.create, "new@x"),
        "change": (processes.change, "new@x"),
        "delete": (processes.delete,),
    }
    old = None if write == "create" else "old@x"
    kills = 0
    if old is not None:
        forked.run(processes.create, old)
    for step in steps:
        kills += forked.run(processes.killed_at, step, *functions[write], killed=True)
        assert forked.run(processes.after_a_kill, old) == (0, 0, True, True), step
    return kills
