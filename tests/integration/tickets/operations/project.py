"""A small project in a temporary folder, whose ``manage.py`` runs in another process."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import STDOUT
from typing import Any

from tests.patience import PATIENCE
from tests.python_process import run_python

ROOT = Path(__file__).parents[4]

SETTINGS = """
from sharded_orm.topology.aliases import sharded_databases
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["sharded_orm", "jobs"]
DATABASES = sharded_databases({{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "default.sqlite3"}},
    "tickets_1": {one!r},
    "tickets_2": {two!r},
}})
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]
SHARDED_ORM = {{"TICKETS": ["tickets_1", "tickets_2"]}}
"""
MODELS = """
from django.db import models
from sharded_orm import TicketField

class Job(models.Model):
    id = TicketField(primary_key=True, sequence="jobs")
"""
TESTS = """
from django.test import TestCase
from jobs.models import Job
from sharded_orm import runtime

class Tests(TestCase):
    databases = {"default", "tickets_1", "tickets_2"}

    def test_ids(self):
        self.assertEqual({Job.objects.create().pk for _ in range(2)}, {100, 101})
        self.assertIn(runtime.tickets().next("more"), (1, 2))
"""


class Project:
    """Jobs with ids of the sequence ``jobs``, on SQLite."""

    def __init__(self, folder: Path, *servers: dict[str, Any]) -> None:
        """:param servers: entries of ``DATABASES``; by default two files."""
        self.folder = folder
        one, two = servers or (file("tickets_1"), file("tickets_2"))
        for name, text in {
            "settings.py": SETTINGS.format(one=one, two=two),
            "jobs/__init__.py": "",
            "jobs/models.py": MODELS,
            "jobs/tests.py": TESTS,
            "jobs/migrations/__init__.py": "",
        }.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def manage(self, *arguments: str, fails: bool = False) -> str:
        done = run_python(
            ["-m", "django", *arguments],
            cwd=self.folder,
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("DJANGO_")},
                "DJANGO_SETTINGS_MODULE": "settings",
                "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
                "PYTHONWARNINGS": "error",
            },
            stderr=STDOUT,
            timeout=PATIENCE,
        )
        assert bool(done.returncode) is fails, done.stdout
        return done.stdout

    def take(self, place: int, sequence: str, count: int) -> list[int]:
        """Return ids of one server, drawn in a new process."""
        code = (
            "from sharded_orm import runtime;"
            f" print(*runtime.tickets().servers[{place}].take({sequence!r}, {count}))"
        )
        return [*map(int, self.manage("shell", "-v", "0", "-c", code).split())]


def file(name: str) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{name}.sqlite3"}
