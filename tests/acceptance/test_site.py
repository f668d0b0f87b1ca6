"""Runs the tests of ``inside/`` for every page of the photo site, on each database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.project import Project

_CREATE_DATABASES = """
from django.db import connections
for alias in ("tickets_1", "tickets_2"):
    connections[alias].create_shard_database()
"""

# One interpreter for all of them: its start takes longest.
_SHOW_HELP = """
from django import setup
from django.core.management import get_commands, load_command_class
setup()
shown = ["shards", "topology", "migrate_shards", "tickets", "cache_stats"]
for command in shown:
    load_command_class(get_commands()[command], command).print_help("manage.py", command)
print(*shown)
"""


def test_project_is_sound(tmp_path: Path) -> None:
    project = Project("sqlite", tmp_path)
    assert "no issues" in project.manage("check")
    assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")


def test_no_driver_is_needed_on_sqlite(tmp_path: Path) -> None:
    for module in ("MySQLdb", "psycopg", "kazoo", "pymemcache", "redis"):
        # A broken module of that name stands before the installed one on the path.
        (tmp_path / f"{module}.py").write_text("raise ImportError\n")
    project = Project("sqlite", tmp_path, {"PYTHONPATH": str(tmp_path)}, new_interpreter=True)
    assert "no issues" in project.manage("check")
    assert "shards topology migrate_shards tickets cache_stats" in project.python(_SHOW_HELP)
    assert "node_1" in project.manage("shards", "status")
    assert "MySQLdb" not in project.manage("shards", "promote", "node_1", fails=True)


def test_pages(project: Project, request: pytest.FixtureRequest) -> None:
    files = ["pages", "errors", "comments", "activity", "tags"]
    if project.backend == "sqlite" or request.config.getoption("--long"):
        files += ["admin", "pictures", "panel", "names", "boards"]  # The same code on each backend.
    if project.backend == "postgresql":
        # The test schemas of shards are in the databases of the nodes, which an administrator creates.
        project.manage("shell", "--command", _CREATE_DATABASES)
    assert "failed" not in project.pytest(*(f"test_{name}.py" for name in files))
