"""Django's test classes and runners with shards, run as a user runs them.

The assertions on rows are in ``project/cases.py``, as their behaviour is part of what is tested.
"""

from __future__ import annotations

import os
import re
import socket
from urllib.parse import unquote

import pytest

from tests.services.memcached import MemcachedServer

from .conftest import Project

# Number of tests in project/cases.py that are meant to pass.
CASES = 37


#: For what is the same code on each backend.
on_sqlite = pytest.mark.long_on("mysql")


def test_serially(project: Project) -> None:
    run = project.test()
    assert (run.code, run.count) == (0, CASES), run.output
    assert len({process for process, _, _ in run.recorded}) == 1
    assert all("test_project_notes_001" in schema for _, schema, _ in run.recorded)
    assert project.schemas() == set()


@on_sqlite
@pytest.mark.parametrize(
    "order", ["--reverse", pytest.param("--shuffle=17", marks=pytest.mark.long)]
)
def test_in_other_orders(project: Project, order: str) -> None:
    run = project.test(order)
    assert (run.code, run.count) == (0, CASES), run.output


# A spawned process makes its databases from those of the first one on SQLite only.
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=on_sqlite)])
def test_in_parallel(project: Project, method: str) -> None:
    run = project.test("--parallel", "2", PROJECT_START_METHOD=method)
    assert (run.code, run.count) == (0, CASES), run.output
    of_process = {process: schema for process, schema, _ in run.recorded}
    # Each process has shards of its own.
    assert len(set(of_process.values())) == len(of_process) == 2
    assert {os.path.splitext(schema)[0][-2:] for schema in of_process.values()} == {"_1", "_2"}
    assert project.schemas() == set()


def names_on(server: MemcachedServer) -> set[str]:
    """Return all names on a cache server."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"lru_crawler metadump all\r\n")
        with connection.makefile("rb") as answer:
            lines = iter(answer.readline, b"END\r\n")
            return {unquote(line.split()[0].removeprefix(b"key=").decode()) for line in lines}


@on_sqlite
# What one process does, each of two does.
@pytest.mark.parametrize(
    "arguments", [pytest.param((), marks=pytest.mark.long), ("--parallel", "2")]
)
def test_each_process_of_each_run_has_its_own_names_in_the_cache(
    project: Project, own_memcached: MemcachedServer, arguments: tuple[str, ...]
) -> None:
    known = names_on(own_memcached)
    for _ in range(2):
        run = project.test(
            *arguments, PROJECT_START_METHOD="fork", PROJECT_MEMCACHED=own_memcached.address
        )
        assert (run.code, run.count) == (0, CASES), run.output
        names = names_on(own_memcached)
        new = {name.partition(":")[0] for name in names - known}
        assert all(re.fullmatch("test_[0-9a-f]{16}", prefix) for prefix in new)
        # Each process has names, one set after each test that committed.
        assert len(new) >= len({process for process, _, _ in run.recorded})
        assert new.isdisjoint(name.partition(":")[0] for name in known)
        known = names


def test_kept_databases(project: Project) -> None:
    for arguments in ([], [], ["--parallel", "2"], ["--parallel", "2"]):
        run = project.test("--keepdb", *arguments, PROJECT_KEEPDB="1")
        assert (run.code, run.count) == (0, CASES), run.output
        assert {"test_notes_template", "test_project_notes_001"} <= project.schemas()
    assert {"test_project_notes_001_1", "test_project_notes_001_2"} <= project.schemas()


def test_kept_shards_follow_the_template(project: Project) -> None:
    """Shards of a run with fewer migrations are rebuilt from the migrated template."""
    alone = ["--keepdb", "-k", "AfterRollsBack"]
    first = project.test(*alone, PROJECT_KEEPDB="1", PROJECT_EARLIER="1")
    # The row that the test expects comes with migration 2.
    assert first.code == 1, first.output
    assert "test_project_notes_000" in project.schemas()
    second = project.test(*alone, PROJECT_KEEPDB="1")
    assert (second.code, second.count) == (0, 1), second.output


def test_dangling_references_are_found_after_a_test(project: Project) -> None:
    run = project.test("-k", "BreaksConstraint")
    if project.defers_constraints:
        assert run.code == 1
        assert re.search("has an invalid foreign key|violates foreign key constraint", run.output)
    else:
        assert run.code == 0, run.output


def test_interrupted_run_leaves_nothing_in_the_way(project: Project) -> None:
    project.test("-k", "Commits", PROJECT_DIES="1")
    run = project.test("-k", "Commits")
    assert run.code == 0, run.output
    assert project.schemas() == set()


@on_sqlite
def test_run_that_does_not_need_the_group(project: Project) -> None:
    run = project.test("-k", ".Blocked.")
    assert (run.code, run.count) == (0, 2), run.output
    assert "shard group" not in run.output


@pytest.mark.parametrize("project", ["sqlite"], indirect=True)
def test_session_with_a_real_ticket_server_gives_no_ids_to_tests(project: Project) -> None:
    run = project.test("-k", "BlockedTickets", PROJECT_TICKETS=str(project.folder / "tickets"))
    assert (run.code, run.count) == (0, 1), run.output


# Each worker does what one process does.
@pytest.mark.parametrize("workers", [pytest.param("0", marks=on_sqlite), "2"])
def test_pytest_django(project: Project, workers: str) -> None:
    run = project.pytest("-n", workers)
    assert (run.code, run.count) == (0, 7), run.output
    assert project.schemas() == set()


def test_pytest_django_with_reused_databases(project: Project) -> None:
    for _ in range(2):
        run = project.pytest("--reuse-db")
        assert (run.code, run.count) == (0, 7), run.output


@on_sqlite
def test_without_migrations(project: Project) -> None:
    run = project.pytest("--nomigrations", PROJECT_WITHOUT_MIGRATIONS="1")
    assert (run.code, run.count) == (0, 7), run.output


@on_sqlite
def test_statements_of_shards_are_shown_on_failure(project: Project) -> None:
    run = project.test("-k", "Fails", "--debug-sql", "-v", "2")
    assert run.code == 1
    assert re.search(r"INSERT INTO .notes_note.", run.output), run.output


@on_sqlite
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["check", "--database", "notes"], "no issues"),
        (["makemigrations", "--check"], "No changes"),
        (["migrate", "--database", "notes"], "stands for all shards"),
        (["flush", "--noinput", "--database", "notes"], "stands for all shards"),
        (["inspectdb", "--database", "notes"], "stands for all shards"),
        (["dbshell", "--database", "notes"], "stands for all shards"),
    ],
)
def test_commands_on_the_group(project: Project, command: list[str], words: str) -> None:
    assert words in project.manage(*command).output
