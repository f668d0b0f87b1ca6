"""The project in ``testproject`` as its users run it: ``manage.py`` in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.python_process import run_python
from tests.services import mariadb, postgresql

ROOT = Path(__file__).parents[2]
SITE_SETTINGS = "testproject.settings"
#: PostgreSQL takes part in the long runs.
BACKENDS = ["sqlite", "mariadb", pytest.param("postgresql", marks=pytest.mark.long)]

#: The variable of the environment that names the servers of the demo.
VARIABLES = {
    "mariadb": "SHARDED_ORM_DEMO_MYSQL",
    "postgresql": "SHARDED_ORM_DEMO_POSTGRESQL",
}


@dataclass
class Project:
    """An installation of the site with databases of its own."""

    backend: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    #: Whether a command starts in an interpreter of its own, which has imported nothing yet.
    new_interpreter: bool = False

    def manage(self, *arguments: object, fails: bool = False) -> str:
        """Run ``manage.py``, which must succeed (or fail), and return its output."""
        done = self._run(str(ROOT / "manage.py"), *map(str, arguments))
        assert bool(done.returncode) is fails, f"status {done.returncode}\n{done.stdout}"
        return done.stdout

    def python(self, code: str) -> str:
        """Run code, which must succeed, and return its output."""
        done = self._run("-c", code)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def pytest(self, *arguments: object) -> str:
        """Run tests of ``inside/`` with the settings of the site and return pytest's summary."""
        done = self._run(
            *("-m", "pytest", f"--ds={SITE_SETTINGS}", "-p", "no:cacheprovider", "-q"),
            *(str(Path(__file__).parent / "inside" / str(a)) for a in arguments),
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.strip().splitlines()[-1]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a process of this installation."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SHARDED_ORM_DEMO_")}
        return {
            **inherited,
            "DJANGO_SETTINGS_MODULE": SITE_SETTINGS,
            "SHARDED_ORM_DEMO_DIR": str(self.folder),
            "PYTHONWARNINGS": "error",
            **self.variables,
        }

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(
            arguments,
            cwd=ROOT,
            env=self.environment,
            stderr=STDOUT,
            timeout=PATIENCE,
            new_interpreter=self.new_interpreter,
        )


@contextmanager
def project_on(backend: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Project]:
    """An installation on ``backend``. Its databases on shared servers are dropped at the end."""
    if backend == "sqlite":
        yield Project(backend, folder)
        return
    nodes: list[Any] = request.getfixturevalue(f"{backend}_nodes")
    prefix = f"site_{secrets.token_hex(4)}_"
    variables = on_servers(nodes, prefix, backend)
    drop = _drop_on_mariadb if backend == "mariadb" else _drop_on_postgresql
    try:
        yield Project(backend, folder, variables)
    finally:
        for node in nodes:
            drop(node, prefix)


def on_servers(nodes: list[Any], prefix: str, backend: str = "mariadb") -> dict[str, str]:
    """Environment variables of an installation on servers with this prefix of database names."""
    return {
        VARIABLES[backend]: json.dumps([asdict(node) for node in nodes]),
        "SHARDED_ORM_DEMO_PREFIX": prefix,
    }


def _drop_on_postgresql(node: postgresql.Address, prefix: str) -> None:
    import psycopg

    with psycopg.connect(**node.psycopg(), autocommit=True) as connection:
        names = connection.execute("SELECT datname FROM pg_database").fetchall()
        for (name,) in names:
            # The test databases of the same installation are named test_<prefix>….
            if prefix in name:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def _drop_on_mariadb(node: mariadb.Address, prefix: str) -> None:
    import MySQLdb

    connection = MySQLdb.connect(**node.mysqldb())
    try:
        cursor = connection.cursor()
        cursor.execute("SHOW DATABASES")
        # The test databases of the same installation are named test_<prefix>….
        names = [name for (name,) in cursor.fetchall() if prefix in name]
        for name in names:
            cursor.execute(f"DROP DATABASE `{name}`")
    finally:
        connection.close()
