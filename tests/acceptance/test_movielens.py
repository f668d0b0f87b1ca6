"""MovieLens in sixteen shards, loaded by ``manage.py import_movielens``."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testproject.databases import ALIASES, TICKETS
from tests.acceptance.movielens_data import Data, make
from tests.acceptance.project import BACKENDS, Project, project_on

SMALL = 0.01


def prepare(project: Project) -> None:
    """Prepare the databases that films and ratings need."""
    project.folder.mkdir(parents=True, exist_ok=True)
    project.manage("shell", "--no-imports", "-c", _CREATE)
    for alias in ALIASES:
        if alias not in TICKETS:
            project.manage("migrate", "--database", alias, "--verbosity", "0")
    # Before there are shards, which may not have ids yet.
    project.manage("tickets", "create")
    project.manage("migrate_shards", "--create", "--group", "ratings", "--verbosity", "0")


_CREATE = f"""
from django.db import connections
for alias in {ALIASES!r}:
    connections[alias].create_shard_database()
"""


@pytest.fixture(scope="module")
def prepared_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a prepared site on SQLite, to be copied."""
    project = Project("sqlite", tmp_path_factory.mktemp("prepared"))
    prepare(project)
    return project.folder


@pytest.fixture(scope="module", params=BACKENDS)
def empty(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("site")
    with project_on(request.param, request, folder) as project:
        if request.param == "sqlite":
            files = request.getfixturevalue("prepared_files")
            shutil.copytree(files, folder, dirs_exist_ok=True)
        else:
            prepare(project)
        yield project


def test_loaded_rows_are_where_they_belong_and_answer_as_one_table(
    empty: Project, data: Data, say: Callable[[str], None]
) -> None:
    output = empty.manage("import_movielens", data.folder)
    for line in output.splitlines():
        if ("rows/s" in line and "%" not in line) or line.startswith("Warning"):
            say(f"{empty.backend}: {line}")
    say(f"{empty.backend}: that was {data.origin}")
    assert re.search(r"^ratings: [\d,]+ rows in [\d.]+ s, [\d,]+ rows/s$", output, re.MULTILINE)

    empty.variables["MOVIELENS_DIR"] = str(data.folder)
    summary = empty.pytest("test_movielens_queries.py")
    say(f"{empty.backend}: comparisons with one table: {summary}")

    refused = empty.manage("import_movielens", data.folder, fails=True)
    assert "--replace" in refused


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make(folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def on_sqlite(prepared_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("site") / "copied"
    return Project("sqlite", Path(shutil.copytree(prepared_files, folder)))


def totals(project: Project) -> str:
    return project.manage(
        "shell",
        "--no-imports",
        "-c",
        "from testproject.movielens.models import *\n"
        "print(Movie.objects.count(), Rating.objects.scatter().count(), Tag.objects.scatter().count())",
    ).strip()


def test_import_again(on_sqlite: Project, small: Path) -> None:
    assert totals(on_sqlite) == "0 0 0"
    on_sqlite.manage("import_movielens", small)
    stored = totals(on_sqlite)
    assert stored != "0 0 0"
    assert "--replace" in on_sqlite.manage("import_movielens", small, fails=True)
    assert totals(on_sqlite) == stored
    assert "Deleted" in on_sqlite.manage("import_movielens", small, "--replace")
    assert totals(on_sqlite) == stored


def test_bad_folder_changes_nothing(on_sqlite: Project, small: Path, tmp_path: Path) -> None:
    before = totals(on_sqlite)
    output = on_sqlite.manage("import_movielens", tmp_path / "none", "--replace", fails=True)
    assert f"there is no folder '{tmp_path / 'none'}'. Nothing was stored." in output
    for name in os.listdir(small):
        (tmp_path / name).write_bytes((small / name).read_bytes())
    with (tmp_path / "tags.csv").open("a", encoding="utf-8") as stream:
        stream.write("414,1\r\n")
    output = on_sqlite.manage("import_movielens", tmp_path, "--replace", fails=True)
    assert re.search(r"tags\.csv, line \d+: 2 fields instead of 4\. Nothing was stored\.", output)
    assert totals(on_sqlite) == before


def test_progress_without_tqdm(on_sqlite: Project, small: Path, tmp_path: Path) -> None:
    # A broken module of that name stands before the installed one on the path.
    (tmp_path / "tqdm.py").write_text("raise ImportError\n")
    project = replace(on_sqlite, variables={"PYTHONPATH": str(tmp_path)}, new_interpreter=True)
    output = project.manage("import_movielens", small, "--replace")
    assert "100 % (" in output


def test_databases_that_are_missing(small: Path, tmp_path: Path) -> None:
    output = Project("sqlite", tmp_path / "none").manage("import_movielens", small, fails=True)
    assert "demo --check" in output
    assert "Traceback" not in output
