"""Processes that draw from ticket files are killed; others hold the lock of a file (F3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharded_orm.ids.tickets.session import SequenceSlot
from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import SQLiteTickets, all_serve, suffer
from tests.integration.tickets.faults.ticket_client import TicketClient
from tests.integration.tickets.faults.workload import Workload

PROCESSES, SEQUENCE = 4, "photos"


@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.long), 100])
@pytest.mark.parametrize(
    ("rounds", "minimum"), [(1, 500), pytest.param(10, 50_000, marks=pytest.mark.long)]
)
def test_no_id_twice_and_no_error(
    tmp_path: Path, block_size: int, rounds: int, minimum: int, django_db_blocker: Any
) -> None:
    pair = [SQLiteTickets(tmp_path / f"{n}.sqlite3", SequenceSlot(n, 2)) for n in (1, 2)]
    options = {"TIMEOUT": 2.0, "BACKOFF": 0.2, "BLOCK_SIZE": block_size}
    project = Project({server.alias: server.for_clients for server in pair}, options)
    with django_db_blocker.unblock():
        for server in pair:
            server.create(SEQUENCE)
        with Workload(project, SEQUENCE, tmp_path, PROCESSES, minimum) as workload:
            all_serve(workload, pair, SEQUENCE)
            for _ in range(rounds):
                for number in range(PROCESSES):
                    # In the middle of a statement, of a transaction, of a lock.
                    workload.replace_one(number)
                    all_serve(workload, pair, SEQUENCE)
                for place in (0, 1):
                    suffer(workload, pair, place, "locked", SEQUENCE)
            drawn = workload.finish()
    assert drawn.duplicates() == []
    assert len(drawn.ids) == PROCESSES * (1 + rounds)
    for name, report in drawn.reports.items():
        assert len(drawn.ids[name]) == report.count >= minimum
    print(f"{drawn.count} ids, the longest wait of a call was {drawn.longest:.3f} s")


def test_threads_that_wait_for_one_file_keep_nobody_from_the_other(
    tmp_path: Path, django_db_blocker: Any
) -> None:
    first, second = (SQLiteTickets(tmp_path / f"{n}.sqlite3", SequenceSlot(n, 2)) for n in (1, 2))
    project = Project({first.alias: first.for_clients, second.alias: second.for_clients})
    with django_db_blocker.unblock(), TicketClient(project) as client:
        first.create(SEQUENCE), second.create(SEQUENCE)
        client.take_from(0, SEQUENCE), client.take_from(1, SEQUENCE)
        with first.locked():
            assert {number % 2 for number in client.take_in_threads(SEQUENCE, 12)} == {0}
        assert len(client.ids) == len(set(client.ids))
