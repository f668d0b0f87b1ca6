"""Runs the test suite of a throw-away project, as its developer would."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.python_process import run_python
from tests.services import mariadb, postgresql

ROOT = Path(__file__).parents[3]
PROJECT = "tests.integration.testing_support.project"


@dataclass
class Run:
    """The result of a test run of the project."""

    code: int
    output: str
    # (process, schema of shard 1, test), for each test that recorded itself.
    recorded: list[tuple[str, str, str]]

    @property
    def count(self) -> int:
        match = re.search(r"^Ran (\d+) tests? in|\b(\d+) passed", self.output, re.MULTILINE)
        return int(match[1] or match[2]) if match else 0


class Project:
    """The project on one backend; its files are in ``folder``."""

    def __init__(self, folder: Path, nodes: dict[str, dict[str, Any]] | None) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self.nodes = nodes
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST_"))},
            "PROJECT_FOLDER": str(folder),
            # A run that dies leaves its folder behind.
            "TMPDIR": str(folder / "tmp"),
            "DJANGO_SETTINGS_MODULE": f"{PROJECT}.settings",
        }
        if nodes is not None:
            self.environment["PROJECT_NODES"] = json.dumps(nodes)

    def run(self, *command: str, **environment: str) -> Run:
        record = self.folder / "ran"
        record.unlink(missing_ok=True)
        done = run_python(
            ["-W", "error::ResourceWarning", *command],
            cwd=ROOT,
            env={**self.environment, **environment},
            stderr=STDOUT,
            timeout=PATIENCE,
            # Such a run uses multiprocessing.
            new_interpreter="--parallel" in command or "PROJECT_START_METHOD" in environment,
        )
        lines = record.read_text().splitlines() if record.exists() else []
        recorded = [tuple(line.split(" ", 2)) for line in lines]
        return Run(done.returncode, done.stdout, recorded)  # type: ignore[arg-type]

    def manage(self, *arguments: str, **environment: str) -> Run:
        return self.run("-m", f"{PROJECT}.manage", *arguments, **environment)

    def test(self, *arguments: str, **environment: str) -> Run:
        """Run ``manage.py test`` with all cases but those that fail on purpose."""
        chosen = [] if "-k" in arguments else ["--exclude-tag", "fails"]
        folder = str(Path(*PROJECT.split(".")))
        command = ["test", "--noinput", "--pattern", "cases.py", *chosen, *arguments, folder]
        return self.manage(*command, **environment)

    @property
    def defers_constraints(self) -> bool:
        """Whether foreign keys are checked at the end of a transaction."""
        return not isinstance(self, MySQLProject)

    def schemas(self) -> set[str]:
        """Return the existing test schemas of shards and templates."""
        return {path.stem for path in self.folder.glob("*/test_*.sqlite3")}

    def pytest(self, *arguments: str, **environment: str) -> Run:
        file = Path(*PROJECT.split("."), "pytest_cases.py")
        return self.run(
            "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(file), **environment
        )


class MySQLProject(Project):
    """The project on two servers that other tests use as well."""

    def __init__(self, folder: Path, addresses: list[mariadb.Address]) -> None:
        self.addresses = addresses[:2]
        options = {"ENGINE": "sharded_orm.backends.mysql", "OPTIONS": {"charset": "utf8mb4"}}
        nodes = {
            name: {**options, **address.django()}
            for name, address in zip(("one", "two"), self.addresses, strict=True)
        }
        super().__init__(folder, nodes)

    def schemas(self, *, drop: bool = False) -> set[str]:
        import MySQLdb

        schemas = set()
        for address in self.addresses:
            connection = MySQLdb.connect(**address.mysqldb())
            with connection.cursor() as cursor:
                cursor.execute("SHOW DATABASES LIKE 'test\\_%'")
                names = [name for (name,) in cursor.fetchall()]
                ours = {n for n in names if re.match("test_(project|notes|other)_", n)}
                for name in ours if drop else ():
                    cursor.execute(f"DROP DATABASE `{name}`")
            connection.close()
            schemas |= {name for name in ours if not name.startswith("test_project_default")}
        return schemas


class PostgreSQLProject(Project):
    """The project on two servers that other tests use as well; shards are schemas of their database."""

    def __init__(self, folder: Path, addresses: list[postgresql.Address]) -> None:
        self.addresses = addresses[:2]
        nodes = {
            name: address.node()
            for name, address in zip(("one", "two"), self.addresses, strict=True)
        }
        super().__init__(folder, nodes)

    def schemas(self, *, drop: bool = False) -> set[str]:
        import psycopg

        schemas = set()
        for address in self.addresses:
            with psycopg.connect(
                **address.psycopg(postgresql.DATABASE), autocommit=True
            ) as connection:
                found = connection.execute(
                    "SELECT nspname FROM pg_namespace WHERE nspname ~ '^test_(project|notes|other)_'"
                )
                schemas |= (names := {name for (name,) in found})
                for name in names if drop else ():
                    connection.execute(f'DROP SCHEMA "{name}" CASCADE')
            if drop:
                with psycopg.connect(**address.psycopg(), autocommit=True) as connection:
                    for (name,) in connection.execute(
                        "SELECT datname FROM pg_database WHERE datname ~ '^test_project_default'"
                    ).fetchall():
                        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
        return schemas


SERVERS = {
    "mysql": (MySQLProject, "mariadb_nodes"),
    "postgresql": (PostgreSQLProject, "postgresql_nodes"),
}


@pytest.fixture(params=["sqlite", *SERVERS])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    if request.param == "sqlite":
        yield Project(tmp_path, None)
        return
    kind, nodes = SERVERS[request.param]
    on_servers = kind(tmp_path, request.getfixturevalue(nodes))
    yield on_servers
    on_servers.schemas(drop=True)
