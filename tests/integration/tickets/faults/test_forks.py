"""A child never hands out its parent's ids, nor uses its parent's connections."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.ids.tickets.session import SequenceSlot
from tests.integration.tickets.faults import forking
from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import (
    MariaDBTickets,
    PostgreSQLTickets,
    SQLiteTickets,
    TicketDatabase,
)
from tests.patience import PATIENCE
from tests.python_process import run_python

ROOT = Path(__file__).parents[4]
BLOCKS = pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.long), 100])
ENDS = pytest.mark.parametrize("end", ["exit", "_exit"])
BUSY = pytest.mark.parametrize("busy", ["busy", "idle"])


def fork(
    pair: Sequence[TicketDatabase], folder: Path, block_size: int, busy: str, end: str
) -> dict[str, Any]:
    sequence = f"forked_{block_size}_{busy}_{end}"
    for server in pair:
        server.create(sequence)
    project = Project(
        {server.alias: server.for_clients for server in pair},
        # A busy machine must not make a server look dead.
        {"BLOCK_SIZE": block_size, "TIMEOUT": PATIENCE},
    )
    file = folder / "project"
    file.write_bytes(pickle.dumps(project))
    # Since Python 3.12, a fork of a process with threads is warned of, as this one is on purpose.
    forks_on_purpose = "ignore:This process (pid=:DeprecationWarning"
    ran = run_python(
        ["-W", forks_on_purpose, "-m", forking.__name__, str(file), sequence, busy, end],
        cwd=ROOT,
        env=os.environ,
        timeout=PATIENCE,
        # Only its own interpreter cleans up at the end.
        new_interpreter=end == "exit",
    )
    # A child that could not draw has printed the reason.
    assert ran.stderr == ""
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def prove(result: dict[str, Any], busy: str, end: str) -> None:
    count = forking.CHILDREN[end]
    assert result["ends"] == [0] * count
    ids = [number for drawn in result["ids"] for number in drawn]
    assert len(ids) == len(set(ids))
    children = result["ids"][1:]
    assert sorted(map(len, children)) == sorted([0, forking.EACH] * (count // 2))
    if busy == "idle":  # otherwise the threads take turns with several connections
        assert result["kept"] == [True, True]


@BLOCKS
@BUSY
@ENDS
def test_on_mariadb(
    pair: list[MariaDBTickets], tmp_path: Path, block_size: int, busy: str, end: str
) -> None:
    prove(fork(pair, tmp_path, block_size, busy, end), busy, end)


@BUSY
@ENDS
def test_on_postgresql(
    pair_on_postgresql: list[PostgreSQLTickets], tmp_path: Path, busy: str, end: str
) -> None:
    prove(fork(pair_on_postgresql, tmp_path, 1, busy, end), busy, end)


@BUSY
@ENDS
def test_on_sqlite(tmp_path: Path, busy: str, end: str, django_db_blocker: Any) -> None:
    with django_db_blocker.unblock():
        pair = [SQLiteTickets(tmp_path / f"{n}.sqlite3", SequenceSlot(n, 2)) for n in (1, 2)]
        prove(fork(pair, tmp_path, 1, busy, end), busy, end)
