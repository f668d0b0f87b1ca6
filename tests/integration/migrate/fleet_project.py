"""A separate project with shards to migrate; its ``manage.py`` runs in other processes."""

from __future__ import annotations

import json
import os
import secrets
import select
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tests.integration.imports.stored_sites import copy_schema
from tests.integration.migrate import project
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess, run_python
from tests.services.postgresql import DATABASE

ROOT = Path(__file__).parents[3]
NODES = ("one", "two")

SETTINGS = """
from sharded_orm.topology.aliases import sharded_databases
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["sharded_orm", "shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SILENCED_SYSTEM_CHECKS = ["sharded_orm.W011"]
DATABASES = sharded_databases({{"default": {default!r}}})
DATABASE_ROUTERS = ["sharded_orm.routers.ShardRouter"]
SHARDED_ORM = {{"NODES": {nodes!r}, "GROUPS": {groups!r}}}
"""
MODELS = """
from django.db import models
from sharded_orm import ShardedModel

class Order(ShardedModel):
    user_id = models.BigIntegerField()
    title = models.CharField(max_length=50)

    class ShardMeta:
        group = "shop"
        shard_key = "user_id"
"""
MIGRATION = """
import os
from pathlib import Path
from django.db import migrations, models

def fail(apps, schema_editor):
    alias = schema_editor.connection.alias
    if alias in Path("failing.txt").read_text().split():
        raise ValueError(f"the rows of {{alias}}\\nare not as they should be")

def wait(apps, schema_editor):
    alias = schema_editor.connection.alias
    if alias in Path("waiting.txt").read_text().split():
        # Tells the test that it is here, and goes on when the test lets it.
        with open("arrivals", "w") as arrivals:
            arrivals.write(alias)
        with open("gate") as gate:
            gate.read(1)
    with open("ran.txt", "a") as ran:
        ran.write(alias + "\\n")

class Migration(migrations.Migration):
    atomic = {atomic}
    dependencies = {dependencies!r}
    operations = [{operations}]
"""
FIRST = """migrations.CreateModel("Order", [
    ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
    ("user_id", models.BigIntegerField()),
    ("title", models.CharField(max_length=50)),
])"""
ADD_NOTE = 'migrations.AddField("order", "note", models.CharField(max_length=20, default="n"))'
MAY_FAIL = 'migrations.RunPython(fail, migrations.RunPython.noop, hints={"model_name": "order"})'
WAITS = 'migrations.RunPython(wait, migrations.RunPython.noop, hints={"model_name": "order"})'


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Fleet:
    """The project in ``folder``: group ``shop`` on two nodes, numbered from 0."""

    def __init__(
        self,
        folder: Path,
        default: Mapping[str, Any],
        nodes: Mapping[str, Mapping[str, Any]],
        prefix: str,
        groups: Mapping[str, int],
    ) -> None:
        self.folder = folder
        described = {
            name: {
                "STRATEGY": "modulo",
                "DATABASE_NAME": f"{prefix}{name}_{{shard:05d}}",
                "RANGES": [
                    {"range": (0, count // 2 - 1), "primary": NODES[0]},
                    {"range": (count // 2, count - 1), "primary": NODES[1]},
                ],
            }
            for name, count in groups.items()
        }
        settings = SETTINGS.format(default=dict(default), nodes=dict(nodes), groups=described)
        self.write("settings.py", settings)
        self.write("shop/__init__.py", "")
        self.write("shop/models.py", MODELS)
        self.write("shop/migrations/__init__.py", "")
        self.write("failing.txt", "")
        self.write("waiting.txt", "")
        os.mkfifo(self.folder / "arrivals")
        os.mkfifo(self.folder / "gate")
        self.migration("0001_first", FIRST)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def migration(self, name: str, *operations: str, atomic: bool = True) -> None:
        """Add a migration after the last one, for example ``ADD_NOTE``, ``MAY_FAIL`` or
        ``WAITS``."""
        last = sorted(path.stem for path in (self.folder / "shop/migrations").glob("0*.py"))[-1:]
        dependencies = [("shop", stem) for stem in last]
        text = MIGRATION.format(
            atomic=atomic, dependencies=dependencies, operations=", ".join(operations)
        )
        self.write(f"shop/migrations/{name}.py", text)

    def failing(self, *aliases: str) -> None:
        """Set the shards on which ``MAY_FAIL`` fails."""
        self.write("failing.txt", " ".join(aliases))

    def waiting(self, *aliases: str) -> None:
        """Set the shards on which ``WAITS`` waits for :meth:`release`."""
        self.write("waiting.txt", " ".join(aliases))

    def wait_for_arrival(self) -> str:
        """Wait for a command to arrive on a shard, and return that shard."""
        opened = os.open(self.folder / "arrivals", os.O_RDONLY | os.O_NONBLOCK)
        try:
            readable, _, _ = select.select([opened], [], [], PATIENCE)
            assert readable, "no command came as far"
            return os.read(opened, 1000).decode()
        finally:
            os.close(opened)

    def release(self) -> None:
        """Let the waiting command go on."""
        (self.folder / "gate").write_text("go")

    def completed_shards(self) -> list[str]:
        """Return the shards on which ``WAITS`` came to its end, one entry per time."""
        path = self.folder / "ran.txt"
        return sorted(path.read_text().split()) if path.exists() else []

    # ##### Commands #####

    def manage(self, *arguments: object, status: int = 0) -> Done:
        """Run a command to its end; it must exit with ``status``."""
        return self.finish(self.start(*arguments), status)

    def start(self, *arguments: object, stderr: int = PIPE) -> PythonProcess:
        return PythonProcess(
            self._command(project.__name__, *arguments),
            cwd=self.folder,
            env=self._environment,
            stderr=stderr,
            prepared=prepared_by(project.prepare),
        )

    @staticmethod
    def _command(*arguments: object) -> list[str]:
        return ["-W", "error", "-m", *map(str, arguments)]

    @property
    def _environment(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("DJANGO_")},
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}{os.pathsep}"
            + os.environ.get("PYTHONPATH", ""),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def finish(self, process: PythonProcess, status: int = 0) -> Done:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
        return Done(process.returncode, out, err)

    def python(self, code: str) -> str:
        """Run ``code`` with the project set up, and return its output."""
        return self.manage("shell", "--no-imports", "-c", code).out

    def python_alone(self, code: str) -> str:
        """Run ``code`` like :meth:`python`, in an interpreter that shares no memory with another."""
        done = run_python(
            self._command("django", "shell", "--no-imports", "-c", code),
            cwd=self.folder,
            env=self._environment,
            timeout=PATIENCE,
            new_interpreter=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def columns(self) -> dict[str, str]:
        """Return the columns of ``shop_order`` on each shard that has the table."""
        return json.loads(self.python(COLUMNS))


COLUMNS = """
import json
from django.db import connections
from sharded_orm import runtime
found = {}
for shard in runtime.group("shop").shards():
    connection = connections[shard.alias]
    try:
        with connection.cursor() as cursor:
            columns = connection.introspection.get_table_description(cursor, "shop_order")
    except Exception:
        continue
    found[shard.alias] = " ".join(column.name for column in columns)
print(json.dumps(found))
"""


#: The migrated global database, by backend: the content of the file, or the name of a copy on the server.
_migrated: dict[str, Any] = {}


@contextmanager
def fleet_on(
    backend: str, request: pytest.FixtureRequest | None, folder: Path, **groups: int
) -> Iterator[Fleet]:
    """A project on ``backend``: its global database is migrated, its shards are not created yet."""
    if backend == "sqlite":
        engine = {"ENGINE": "sharded_orm.backends.sqlite3"}
        default = {**engine, "NAME": str(folder / "default.sqlite3")}
        nodes = {name: {**engine, "NAME": str(folder / name)} for name in NODES}
        fleet = Fleet(folder, default, nodes, "", groups)
        file = Path(default["NAME"])
        if backend not in _migrated:
            fleet.manage("migrate", "-v0")
            _migrated[backend] = file.read_bytes()
        file.write_bytes(_migrated[backend])
        yield fleet
        return
    assert request is not None
    kind = MariaDBServers if backend == "mariadb" else PostgreSQLServers
    servers = kind(request.getfixturevalue(f"{backend}_nodes"), f"fleet_{secrets.token_hex(4)}_")
    try:
        default = servers.default()
        nodes = dict(zip(NODES, servers.nodes(), strict=True))
        fleet = Fleet(folder, default, nodes, servers.prefix, groups)
        if backend not in _migrated:
            servers.create_default()
            fleet.manage("migrate", "-v0")
            _migrated[backend] = f"stored_{secrets.token_hex(4)}"
            servers.copy(default["NAME"], _migrated[backend])
        else:
            servers.copy(_migrated[backend], default["NAME"])
        yield fleet
    finally:
        servers.drop()


class Servers(ABC):
    """Two servers that other tests use as well.

    :param prefix: the beginning of all names of the project.
    """

    def __init__(self, addresses: list[Any], prefix: str) -> None:
        self.addresses = addresses[: len(NODES)]
        self.prefix = prefix

    @abstractmethod
    def nodes(self) -> list[dict[str, Any]]:
        """Return the settings of the nodes."""

    def default(self) -> dict[str, Any]:
        """Return the settings of the global database."""
        return {**self.nodes()[0], "NAME": f"{self.prefix}default"}

    def create_default(self) -> None:
        self.execute(self.addresses[0], f"CREATE DATABASE {self.prefix}default")

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Copy a database of the first server."""

    @abstractmethod
    def drop(self) -> None:
        """Drop all that begins with the prefix."""

    @abstractmethod
    def execute(self, address: Any, statement: str, **where: str) -> list[Any]:
        """Run a statement in a session of its own, and return its rows."""


class MariaDBServers(Servers):
    def nodes(self) -> list[dict[str, Any]]:
        options = {"charset": "utf8mb4", "isolation_level": "read committed"}
        engine = {"ENGINE": "sharded_orm.backends.mysql", "OPTIONS": options}
        return [{**engine, **address.django()} for address in self.addresses]

    def copy(self, source: str, target: str) -> None:
        import MySQLdb

        with closing(MySQLdb.connect(**self.addresses[0].mysqldb(), autocommit=True)) as connection:
            copy_schema(connection.cursor(), source, target)

    def drop(self) -> None:
        for address in self.addresses:
            for (name,) in self.execute(address, f"SHOW DATABASES LIKE '{self.prefix}%'"):
                self.execute(address, f"DROP DATABASE `{name}`")

    def execute(self, address: Any, statement: str, **where: str) -> list[Any]:
        import MySQLdb

        with closing(MySQLdb.connect(**address.mysqldb(), **where)) as connection:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())


class PostgreSQLServers(Servers):
    def nodes(self) -> list[dict[str, Any]]:
        return [address.node() for address in self.addresses]

    def copy(self, source: str, target: str) -> None:
        self.execute(self.addresses[0], f"CREATE DATABASE {target} TEMPLATE {source}")

    def drop(self) -> None:
        for address in self.addresses:
            schemas = f"SELECT nspname FROM pg_namespace WHERE nspname ^@ '{self.prefix}'"
            for (name,) in self.execute(address, schemas):
                self.execute(address, f'DROP SCHEMA "{name}" CASCADE')
        default = f"DROP DATABASE IF EXISTS {self.prefix}default WITH (FORCE)"
        self.execute(self.addresses[0], default)

    def execute(self, address: Any, statement: str, **where: str) -> list[Any]:
        import psycopg

        parameters = {**address.psycopg(DATABASE), **where}
        with closing(psycopg.connect(**parameters, autocommit=True)) as connection:
            done = connection.execute(statement)
            return done.fetchall() if done.description else []
