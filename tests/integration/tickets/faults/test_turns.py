"""The servers take turns in each sequence, among all processes that draw from it (F3)."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.ids.tickets.session import SequenceSlot
from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import SQLiteTickets
from tests.patience import PATIENCE
from tests.python_process import CONTEXT

SEQUENCES = ("photos", "albums")
BATCH, PROCESSES = 500, 40
# Each process starts at a random server: fewer come about once in ten million runs.
AT_LEAST = 4


@pytest.fixture
def project(tmp_path: Path, django_db_blocker: Any) -> Iterator[Project]:
    """A pair of servers with both sequences."""
    pair = [SQLiteTickets(tmp_path / f"{n}.sqlite3", SequenceSlot(n, 2)) for n in (1, 2)]
    with django_db_blocker.unblock():
        for server in pair:
            for sequence in SEQUENCES:
                server.create(sequence)
        yield Project({server.alias: server.for_clients for server in pair})


def take_batches(project: Project) -> list[list[int]]:
    """Take one batch of each sequence, in a new process."""
    project.configure()
    generator = project.generator()
    return [list(generator.take(sequence, BATCH)) for sequence in SEQUENCES]


def take_batches_in_children(project: Project, used: bool) -> list[list[list[int]]]:
    """Take batches in children of one process, which has taken ids itself if it is ``used``."""
    project.configure()
    generator = project.generator()
    for sequence in SEQUENCES if used else ():
        generator.take(sequence, BATCH)
    found = []
    for _ in range(PROCESSES):
        reader, writer = os.pipe()
        if not os.fork():
            taken = [list(generator.take(sequence, BATCH)) for sequence in SEQUENCES]
            os.write(writer, pickle.dumps([ids[:1] for ids in taken]))
            os._exit(0)
        os.close(writer)
        os.wait()
        with open(reader, "rb") as pipe:
            found.append(pickle.load(pipe))
    return found


def take_interleaved(project: Project) -> dict[str, list[int]]:
    """Take ids like a site that saves an album and a photo in it, over and over."""
    project.configure()
    generator = project.generator()
    found: dict[str, list[int]] = {sequence: [] for sequence in SEQUENCES}
    for _ in range(12):
        for sequence in ("albums", "photos"):
            found[sequence].append(generator.next(sequence))
    return found


def in_new_processes(function: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    with CONTEXT.Pool(4, maxtasksperchild=1) as pool:
        return pool.starmap_async(function, arguments, chunksize=1).get(PATIENCE)


def assert_shared(batches: list[list[list[int]]]) -> None:
    """Check that both servers serve every sequence, independently of the other sequence."""
    places = [tuple(ids[0] % 2 for ids in of_process) for of_process in batches]
    for number, sequence in enumerate(SEQUENCES):
        counts = Counter(place[number] for place in places)
        assert min(counts[0], counts[1]) >= AT_LEAST, (sequence, counts)
    assert AT_LEAST <= sum(one == other for one, other in places) <= PROCESSES - AT_LEAST


def test_processes_that_take_one_batch_each_do_not_all_ask_the_first(project: Project) -> None:
    batches = in_new_processes(take_batches, *[(project,)] * PROCESSES)
    assert_shared(batches)
    for taken in zip(*batches, strict=True):
        ids = [number for batch in taken for number in batch]
        assert len(ids) == len(set(ids)) == PROCESSES * BATCH


@pytest.mark.parametrize("used", [False, True])
def test_forked_children_do_not_begin_where_their_parent_is(project: Project, used: bool) -> None:
    (batches,) = in_new_processes(take_batches_in_children, (project, used))
    assert_shared(batches)


def test_each_sequence_has_its_own_turn(project: Project) -> None:
    (found,) = in_new_processes(take_interleaved, (project,))
    for sequence, ids in found.items():
        parities = [number % 2 for number in ids]
        # Whichever server is first, the next id is the other server's.
        assert parities == [parities[0], 1 - parities[0]] * 6, sequence


@pytest.mark.parametrize("block_size", [1, 10])
def test_with_and_without_blocks(project: Project, block_size: int) -> None:
    blocks = Project(project.databases, {"BLOCK_SIZE": block_size})
    (found,) = in_new_processes(take_interleaved, (blocks,))
    for ids in found.values():
        places = [number % 2 for number in ids[::block_size]]
        assert {0, 1} == set(places)
        assert places[0] != places[1]
