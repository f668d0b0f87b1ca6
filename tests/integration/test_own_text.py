"""The library's own columns of text, on every database that can hold them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.python_process import run_python

ROOT = Path(__file__).parents[2]
SPELLINGS = ["Ada", "ada", "Ada ", "A\u0301da", "\u00c1da", "Ada\u200b"]
SETTINGS = """
from sharded_orm.topology.aliases import sharded_databases
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["sharded_orm"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = sharded_databases({{"default": {default!r}}})
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]
SHARDED_ORM = {{}}
"""
FILL = """
from sharded_orm.models import OperationRun, Placement
Placement.objects.create(group="photos", key="kept", shard=7)
OperationRun.objects.create(kind="migrate", subject="kept", unfinished=True)
"""
USE = """
import json
from sharded_orm.models import OperationRun, OperationStep, Placement
from sharded_orm.models.tables.directory import DatabaseDirectory
names = {names!r}
run = OperationRun.objects.create(kind="x", subject="y")
for number, name in enumerate(names):
    Placement.objects.create(group=name, key=name, shard=number)
    OperationRun.objects.create(kind="migrate", subject=name, unfinished=True)
    OperationStep.objects.create(run=run, alias=name)
directory = DatabaseDirectory("default")
directory.place("photos", {{name: number for number, name in enumerate(names)}})
found = directory.find("photos", names)
print(json.dumps({{
    "placed": [found[name][0] for name in names],
    "rows": [Placement.objects.filter(group=name, key=name).count() for name in names],
    "runs": [OperationRun.objects.filter(subject=name).count() for name in names],
    "steps": [OperationStep.objects.filter(alias=name).count() for name in names],
    "kept": [Placement.objects.get(key="kept").shard, OperationRun.objects.filter(subject="kept").count()],
}}))
"""


class Project:
    """A project with only the library, in one database."""

    def __init__(self, folder: Path, default: dict[str, Any]) -> None:
        self.folder = folder
        (folder / "settings.py").write_text(SETTINGS.format(default=default))

    def manage(self, *arguments: str) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DJANGO_")}
        done = run_python(
            ["-W", "error", "-m", "django", *arguments],
            cwd=self.folder,
            env={
                **inherited,
                "DJANGO_SETTINGS_MODULE": "settings",
                "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}",
            },
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, code: str) -> str:
        return self.manage("shell", "--no-imports", "-c", code)


@pytest.fixture(params=["sqlite", "mariadb", "postgresql"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    name = f"own_text_{secrets.token_hex(4)}"
    if request.param == "sqlite":
        engine = "django.db.backends.sqlite3"
        yield Project(tmp_path, {"ENGINE": engine, "NAME": str(tmp_path / "default.sqlite3")})
        return
    if request.param == "mariadb":
        import MySQLdb

        address: Any = request.getfixturevalue("mariadb")
        connection: Any = MySQLdb.connect(**address.mysqldb(), autocommit=True)
        engine = "django.db.backends.mysql"
    else:
        import psycopg

        address = request.getfixturevalue("postgresql")
        connection = psycopg.connect(**address.psycopg(), autocommit=True)
        engine = "django.db.backends.postgresql"
    connection.cursor().execute(f"CREATE DATABASE {name}")
    try:
        yield Project(tmp_path, {"ENGINE": engine, "NAME": name, **address.django()})
    finally:
        connection.cursor().execute(f"DROP DATABASE {name}")
        connection.close()


def check(project: Project) -> None:
    assert json.loads(project.python(USE.format(names=SPELLINGS))) == {
        "placed": list(range(len(SPELLINGS))),
        "rows": [1] * len(SPELLINGS),
        "runs": [1] * len(SPELLINGS),
        "steps": [1] * len(SPELLINGS),
        "kept": [7, 1],
    }


def test_a_new_installation_tells_texts_apart(project: Project) -> None:
    project.manage("migrate", "-v0")
    project.python(FILL)
    check(project)
    assert "No changes" in project.manage("makemigrations", "sharded_orm", "--check")


def test_an_installation_from_before_does_so_after_its_migration(project: Project) -> None:
    project.manage("migrate", "sharded_orm", "0003", "-v0")
    project.python(FILL)
    project.manage("migrate", "-v0")
    check(project)
