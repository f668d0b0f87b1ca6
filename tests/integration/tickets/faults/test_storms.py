"""Ticket servers that are killed, paused and cut off while processes draw ids (F3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import (
    MariaDBTickets,
    PostgreSQLTickets,
    ServerTickets,
    all_serve,
    suffer,
)
from tests.integration.tickets.faults.workload import DrawnIds, Workload

# A caller waits for at most twice as long as one server has.
TIMEOUT, BACKOFF = 2.0, 0.2


def storm(
    pair: Sequence[ServerTickets],
    folder: Path,
    form: str,
    block_size: int,
    processes: int,
    minimum: int,
) -> DrawnIds:
    """Draw while each server suffers each fault, again and again until all have enough."""
    sequence = f"{form}_{block_size}_{processes}"
    for server in pair:
        server.create(sequence, form)
    options = {"TIMEOUT": TIMEOUT, "BACKOFF": BACKOFF, "BLOCK_SIZE": block_size}
    project = Project({server.alias: server.for_clients for server in pair}, options)
    with Workload(project, sequence, folder, processes, minimum) as workload:
        all_serve(workload, pair, sequence)
        enough = False
        while not enough:
            for fault, place in itertools.product(ServerTickets.faults, (0, 1)):
                suffer(workload, pair, place, fault, sequence)
            enough = all(member.last.count >= minimum for member in workload.members)
        all_serve(workload, pair, sequence)
        drawn = workload.finish()
    for place, server in enumerate(pair):
        # Otherwise the other server has handed out numbers of this one.
        assert drawn.highest(place) <= server.position(sequence)
    return drawn


def prove(drawn: DrawnIds, minimum: int, record: Callable[[str, object], None]) -> None:
    assert drawn.duplicates() == []
    for name, report in drawn.reports.items():
        # Each call returned as many ids as requested; an error would have ended its process.
        assert len(drawn.ids[name]) == report.count >= minimum
    # For information only: on a busy machine anything is late.
    figures = {
        "ids": drawn.count,
        "calls": sum(report.calls for report in drawn.reports.values()),
        "longest wait of a call (s)": round(drawn.longest, 3),
        "configured (s)": TIMEOUT,
    }
    for name, value in figures.items():
        record(name, value)
    print(figures)


SIZES = pytest.mark.parametrize(
    ("processes", "minimum"), [(4, 500), pytest.param(8, 50_000, marks=pytest.mark.long)]
)


@pytest.mark.parametrize(
    ("form", "block_size"),
    [
        ("update", 100),
        ("replace", 1),
        pytest.param("update", 1, marks=pytest.mark.long),
        pytest.param("replace", 100, marks=pytest.mark.long),
    ],
)
@SIZES
def test_on_mariadb(
    pair: list[MariaDBTickets],
    tmp_path: Path,
    form: str,
    block_size: int,
    processes: int,
    minimum: int,
    record_property: Callable[[str, object], None],
) -> None:
    drawn = storm(pair, tmp_path, form, block_size, processes, minimum)
    prove(drawn, minimum, record_property)


@pytest.mark.parametrize("block_size", [1, pytest.param(100, marks=pytest.mark.long)])
@SIZES
def test_on_postgresql(
    pair_on_postgresql: list[PostgreSQLTickets],
    tmp_path: Path,
    block_size: int,
    processes: int,
    minimum: int,
    record_property: Callable[[str, object], None],
) -> None:
    drawn = storm(pair_on_postgresql, tmp_path, "sequence", block_size, processes, minimum)
    prove(drawn, minimum, record_property)
